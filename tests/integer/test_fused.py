import shutil

import pytest
import torch
from converted_networks import batch, network

from mimicnorm.errors import IntegerError
from mimicnorm.integer import Trainer, fused
from mimicnorm.integer.formats import Block
from mimicnorm.integer.narrow import narrow

pytestmark = pytest.mark.skipif(not shutil.which("c++"), reason="torch.compile needs a C++ compiler")


def wide(count: int, bits: int = 31) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (count, 5, 7), dtype=torch.int32, generator=generator)


SHIFTS = (-50, -25, -3, 0, 1, 8, 24, 25, 30, 31, 60)


@pytest.mark.parametrize("count", [3, 64])
@pytest.mark.parametrize("random", [None, (7, 2**31 - 5)])
@pytest.mark.parametrize("blocks", [1, 2])
def test_kernels_give_the_codes_of_the_operations_they_replace(count, random, blocks):
    codes = wide(count, 8).clamp(-127, 127).to(torch.int8)
    open_ = None if random is None else codes.clamp(0)
    low = 0 if random is None else -127
    for by in SHIFTS:
        for own in (0, 5, 28, 29, 60, -9, -30, -31, -60) if blocks == 2 else (0,):
            terms = [Block(wide(count), 0), Block(codes, own)][:blocks]
            case = (terms, 0, by, low, open_, random)
            made, right = fused.narrow(*case), narrow(*case)
            assert torch.equal(made[0], right[0])
            assert made[1] == right[1]


def test_weights_are_those_of_a_trainer_that_does_not_compile():
    images, labels = batch(12)
    trainers = [Trainer(network("resnet10"), lr=0.1, weight_decay=1e-3, compile=c) for c in (False, True)]
    for trainer in trainers:
        for _ in range(2):
            trainer.step(images, labels)
        trainer.step(images, labels, micro_batch=5)
    states = [trainer.state_dict() for trainer in trainers]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert torch.equal(*(trainer.logits(images) for trainer in trainers))


def test_without_a_compiler_the_error_says_what_to_do(monkeypatch):
    def broken(*_):
        raise RuntimeError("No working C++ compiler found\nand more")

    monkeypatch.setattr(fused, "_compiled", lambda: broken)
    fused.require.cache_clear()
    with pytest.raises(IntegerError, match=r"No working C\+\+ compiler found; without compile=True"):
        fused.require()
    fused.require.cache_clear()
