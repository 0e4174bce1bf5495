"""The last BN in the loss is the last BN in the head."""

from __future__ import annotations

import copy

import torch
from whole_and_parts import Classifier, batch, converted, full_batch, gradient, scaled, state

from mimicnorm.layers import LastNorm, last_norm_
from mimicnorm.microbatch import LastNormCrossEntropy


def pair():
    """The same network with its LastNorm in the head, and without."""
    without = converted(Classifier(), last_norm=False)
    within = copy.deepcopy(without)
    last_norm_(within.fc, LastNorm(5, dim=-1, logit_scale=True).double())
    return scaled(within), without


def error(head: torch.nn.Module, *folded: torch.nn.Module) -> float:
    """The parameters come in the same order: those of the LastNorm last."""
    right = gradient(head)
    return float((gradient(*folded) - right).norm() / right.norm())


def test_same_value_gradient_and_statistics():
    within, without = pair()
    x, y = batch()
    weight = torch.linspace(0.5, 2, 5, dtype=torch.float64)
    loss_fn = scaled(LastNormCrossEntropy(5, weight=weight, label_smoothing=0.1).double())
    plain = torch.nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1)
    head, value = full_batch(within, plain, x, y)
    folded, loss = full_batch(without, loss_fn, x, y)
    torch.testing.assert_close(loss, value, rtol=0, atol=1e-14)
    assert error(head, folded, loss_fn) < 1e-13
    torch.testing.assert_close(state(loss_fn.last_norm), state(head))
    loss_fn.eval(), head.eval(), folded.eval()
    torch.testing.assert_close(loss_fn.normalise(folded(x)), head(x))


def test_invariant_to_the_scale_and_shift_of_a_class():
    loss_fn = LastNormCrossEntropy(4)
    logits, y = torch.randn(50, 4), torch.randint(4, (50,))
    moved = logits * torch.tensor([1.0, 5.0, 100.0, 0.5]) + torch.arange(4)
    torch.testing.assert_close(loss_fn(logits, y), loss_fn(moved, y), rtol=1e-3, atol=1e-4)


def test_its_logit_scale_follows_the_number_of_classes():
    assert [LastNormCrossEntropy(c).last_norm.logit_scale is not None for c in (2, 139, 140, 1000)] == [1, 1, 0, 0]
    assert LastNormCrossEntropy(1000, logit_scale=True).last_norm.logit_scale is not None
    assert LastNormCrossEntropy(2, logit_scale=False).last_norm.logit_scale is None
