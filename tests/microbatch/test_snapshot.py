"""A batch that fails leaves all statistics where they were."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from whole_and_parts import AveragedHeads, Chained, Classifier, Counts, batch, converted, state

from mimicnorm.errors import MicroBatchError
from mimicnorm.microbatch import LastNormCrossEntropy, backward
from mimicnorm.microbatch.snapshot import Snapshot


def moved(net: nn.Module) -> nn.Module:
    """The network after a batch, so that its statistics are not those it starts with."""
    backward(net, F.cross_entropy, *batch(16), micro_batch=4)
    net.zero_grad()
    return net


def test_after_any_other_error_too():
    x, y = batch(8)
    nothing_to_train = moved(converted(Classifier())).requires_grad_(False)

    chained, counts = moved(converted(AveragedHeads())), moved(converted(Classifier()))
    chained.__class__, counts.__class__ = Chained, Counts  # Counts is noticed at the end, with gradients added
    for net, message in (
        (nothing_to_train, "nothing that requires a gradient"),
        (chained, "another LastNorm"),
        (counts, "clear them"),
    ):
        before = state(net)
        with pytest.raises(MicroBatchError, match=message):
            backward(net, F.cross_entropy, x, y, micro_batch=3)
        assert torch.equal(state(net), before)


class Centred(nn.Module):
    """A loss with statistics: a LastNorm and a running mean that is replaced, not written."""

    def __init__(self, fault: object = None):
        super().__init__()
        self.folded = LastNormCrossEntropy(5).double()
        self.register_buffer("centre", torch.zeros(5, dtype=torch.float64))
        self.calls, self.fault = 0, fault

    def forward(self, out: Tensor, targets: Tensor) -> Tensor:
        loss = self.folded(out - self.centre, targets)
        self.centre = self.centre * 0.9 + out.detach().mean(0) * 0.1
        self.calls += 1
        return loss if self.fault is None else self.fault(loss)


@pytest.mark.parametrize(
    "wrap", [lambda loss: loss, functools.partial, lambda loss: loss.forward, lambda loss: lambda out, t: loss(out, t)]
)
@pytest.mark.parametrize("last_norm", [True, False])
def test_statistics_of_the_loss_are_put_back(wrap, last_norm):
    net, loss_fn = converted(Classifier(), last_norm=last_norm), Centred()
    x, y = batch(8)
    backward(net, wrap(loss_fn), x, y, micro_batch=3)
    assert loss_fn.folded.last_norm.num_batches_tracked == loss_fn.calls == 1
    net.zero_grad()
    loss_fn.fault = lambda loss: loss * float("nan")
    before = state(net, loss_fn)
    with pytest.raises(MicroBatchError, match="the loss is nan"):
        backward(net, wrap(loss_fn), x, y, micro_batch=3)
    assert torch.equal(state(net, loss_fn), before)
    assert loss_fn.calls == 1


def test_a_snapshot_tells_what_had_changed():
    loss_fn = Centred()
    snapshot = Snapshot(loss_fn.modules())
    assert snapshot.restore() == set()
    loss_fn(*(torch.randn(4, 5, dtype=torch.float64), torch.zeros(4, dtype=torch.long)))
    assert snapshot.restore() == {"Centred", "LastNorm"}
    assert loss_fn.calls == 0


def test_a_scripted_loss_has_a_snapshot_too():
    loss = torch.jit.script(nn.CrossEntropyLoss(weight=torch.arange(1.0, 4.0)))
    snapshot = Snapshot([loss])
    loss.weight.mul_(2)
    snapshot.restore()
    assert torch.equal(loss.weight, torch.arange(1.0, 4.0))
