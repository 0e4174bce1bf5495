"""Random numbers by counting: uniform, independent, the same everywhere and for ever."""

from __future__ import annotations

import torch

from mimicnorm.data.counter import uniforms


def test_the_numbers_do_not_change_between_versions():
    """A resumed run and a published result rest on them; splitmix64 by plain integers gives the same."""

    def mixed(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    step = 0x9E3779B97F4A7C15
    seed, epoch, index = 2**40 + 5, 17, 49_999
    key = (mixed((seed + step) % 2**64) + epoch) % 2**64
    key = mixed((mixed((key + step) % 2**64) + index) % 2**64)
    expected = [(mixed((key + k * step) % 2**64) >> 11) * 2.0**-53 for k in (1, 2, 3)]
    assert uniforms(seed, epoch, torch.tensor([index]), 3)[0].tolist() == expected
