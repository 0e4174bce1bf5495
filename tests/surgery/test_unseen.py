from __future__ import annotations

import pytest
from torch import nn

from mimicnorm.surgery.unseen import unseen


def conv(inputs: int = 4, outputs: int = 8) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 1)


def block(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(conv(), nn.BatchNorm2d(8), *layers)


@pytest.mark.parametrize(
    ("idle", "reads", "expected"),
    [
        (nn.BatchNorm2d(8), False, "2 did not run and may share its layer"),
        (nn.Sequential(nn.ReLU(), nn.BatchNorm2d(8)), False, "2.1 did not run and may share its layer"),
        (nn.BatchNorm2d(6), False, None),
        (block(), False, None),
        (nn.Sequential(nn.BatchNorm2d(8), conv()), False, "2.0 did not run and may share its layer"),
        (conv(), False, "2 did not run and may share this BatchNorm"),
        (nn.ConvTranspose2d(4, 8, 1, groups=2), False, "2 did not run and may share this BatchNorm"),
        (nn.ConvTranspose2d(4, 4, 1), False, None),
        (conv(8, 4), False, None),
        (conv(8, 4), True, "2 did not run and may share this BatchNorm"),
        (nn.ConvTranspose2d(8, 4, 1), True, "2 did not run and may share this BatchNorm"),
    ],
)
def test_what_may_meet_a_norm_in_another_call(idle, reads, expected):
    modules = dict(block(idle).named_modules())
    norms = {n: m.num_features for n, m in modules.items() if isinstance(m, nn.BatchNorm2d)}
    assert unseen("1", 8, modules, norms, {"0", "1"}, reads) == expected
