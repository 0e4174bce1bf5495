import pytest
import torch

from mimicnorm.integer import formats
from mimicnorm.integer.counter import key
from mimicnorm.integer.formats import Block
from mimicnorm.integer.operation import Pass
from mimicnorm.integer.requantise import Requantise


def at(first: int = 0, **options) -> Pass:
    return Pass(first, lambda place: key(0, place), **options)


def test_requantising_uses_the_exponent_of_the_step_before_and_saturates():
    op = Requantise("relu", relu=True)
    op.output.exponent = 0
    x = torch.tensor([[-50, 3, 1000]], dtype=torch.int32)
    ((out, unit),), _ = op.forward(at(), [Block(x, 0)])
    assert (out.tolist(), unit) == ([[0, 3, 127]], 0)
    op.output.advance()
    ((out, unit),), _ = op.forward(at(), [Block(x, 0)])
    assert (out.tolist(), unit) == ([[0, 0, 125]], 3)


def test_a_sum_of_blocks_is_requantised_as_one():
    op = Requantise("sum", relu=False)
    op.output.exponent = 1
    terms = [Block(torch.tensor([[5]], dtype=torch.int8), 2), Block(torch.tensor([[-100]], dtype=torch.int32), -3)]
    ((out, unit),), _ = op.forward(at(), terms)
    assert out.item() * 2**unit == pytest.approx(20 - 12.5, abs=1)


def test_errors_are_masked_and_rounded_at_random_by_index():
    op = Requantise("relu", relu=True)
    saved = torch.ones(64, 32, dtype=torch.int8)
    saved[:, 0] = 0
    op.error.exponent = 4
    error = [Block(torch.full((64, 32), 36, dtype=torch.int32), 0)]  # 2.25 codes
    ((whole, unit),) = op.backward(at(), saved, error)[0]
    assert unit == 4
    assert not whole[:, 0].any()
    assert set(whole[:, 1:].unique().tolist()) == {2, 3}
    assert whole[:, 1:].double().mean() == pytest.approx(2.25, abs=0.05)
    half = [Block(error[0].data[40:], 0)]
    assert torch.equal(op.backward(at(40), saved[40:], half)[0][0].data, whole[40:])
    ((nearest, _),) = op.backward(at(stochastic=False), saved, error)[0]
    assert nearest[:, 1:].unique().tolist() == [2]


def test_chunks_give_the_same_bits(monkeypatch):
    x, error = (torch.randint(-(2**20), 2**20, (12, 5, 5, 8), dtype=torch.int32) for _ in range(2))
    results = []
    for size in (2**18, 300):
        monkeypatch.setattr("mimicnorm.integer.formats.CHUNK", size)
        assert (len(list(formats.chunks(12, 200))) > 1) == (size == 300)
        op = Requantise("relu", relu=True)
        op.output.exponent, op.error.exponent = 13, 15
        ((out, _),), saved = op.forward(at(), [Block(x, 0), Block(x.flip(0), -1)])
        ((back, _),) = op.backward(at(), saved, [Block(error, 0)])[0]
        results.append((out, back, op.output.peak, op.error.peak, op.output.saturated))
    one, other = results
    assert all(map(torch.equal, one[:2], other[:2]))
    assert one[2:] == other[2:]
