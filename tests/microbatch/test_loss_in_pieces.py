"""The loss of one micro-batch at a time: the same gradient, and no outputs of the whole batch."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from whole_and_parts import (
    AveragedHeads,
    Classifier,
    Pooled,
    SavedBytes,
    Segmenter,
    SharedHead,
    Tempered,
    WithFeatures,
    batch,
    converted,
    dict_loss,
    feature_loss,
    full_batch,
    one_graph,
    relative_error,
    state,
    two_view_loss,
)

from mimicnorm.errors import MicroBatchError
from mimicnorm.microbatch import LastNormCrossEntropy, backward

EXACT = 1e-12


@pytest.mark.parametrize("micro_batch", [1, 7])
@pytest.mark.parametrize(
    ("make", "loss_fn"),
    [
        (Classifier, F.cross_entropy),
        (AveragedHeads, F.cross_entropy),
        (Pooled, F.cross_entropy),
        (WithFeatures, feature_loss),
        (SharedHead, two_view_loss),
        (Segmenter, dict_loss),
    ],
)
def test_gradient_loss_statistics_and_outputs(make, loss_fn, micro_batch):
    net = converted(make())
    x, y = batch(12)
    if make is Segmenter:
        y = torch.randint(4, (12, 9, 9))
    whole, loss = full_batch(net, loss_fn, x, y)
    expected = copy.deepcopy(net)(x)
    value, outputs = backward(net, loss_fn, x, y, micro_batch=micro_batch, loss_in_pieces=True, return_outputs=True)
    assert relative_error(net, whole) <= EXACT
    torch.testing.assert_close(value, loss)
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(state(net), state(whole))


def test_parameters_of_the_loss_a_scaler_and_a_denominator():
    net, loss_fn = converted(Classifier()), Tempered()
    x, y = batch()
    own = copy.deepcopy(loss_fn)
    whole, _ = full_batch(net, own, x, y)
    backward(net, loss_fn, x, y, micro_batch=5, loss_in_pieces=True)
    torch.testing.assert_close(loss_fn.temperature.grad, own.temperature.grad)
    assert relative_error(net, whole) <= EXACT
    weight = torch.linspace(0.5, 2, 5, dtype=torch.float64)
    whole, _ = full_batch(net.requires_grad_(), nn.CrossEntropyLoss(weight), x, y)
    net.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    summed = nn.CrossEntropyLoss(weight, reduction="sum")
    settings = {"denominator": lambda t: weight[t].sum(), "scaler": scaler, "loss_in_pieces": True}
    backward(net, summed, x, y, micro_batch=5, **settings)
    for p in net.parameters():
        p.grad /= 2**10
    whole.zero_grad()
    F.cross_entropy(whole(x), y, weight).backward()
    assert relative_error(net, whole) <= EXACT


def test_randomness_replays():
    net = converted(Segmenter(dropout=0.4))
    x, y = batch(8)[0], torch.randint(4, (8, 9, 9))
    reference = copy.deepcopy(net)
    torch.manual_seed(5)
    one_graph(reference, dict_loss, x, y, 3)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    backward(net, dict_loss, x, y, micro_batch=3, loss_in_pieces=True)
    assert relative_error(net, reference) <= EXACT
    assert torch.equal(torch.get_rng_state(), after)


def test_no_outputs_of_the_whole_batch_are_saved():
    net = converted(Segmenter())
    x, y = batch(64)[0], torch.randint(4, (64, 9, 9))
    peaks = []
    for in_pieces in (False, True):
        with (saved := SavedBytes([*net.parameters(), *net.buffers(), x, y])):
            backward(net, dict_loss, x, y, micro_batch=1, loss_in_pieces=in_pieces)
        assert saved.now == 0
        peaks.append(saved.peak)
    raw_logits = 64 * 2 * 4 * 4 * 4 * 8  # of two heads, four classes, 4 x 4 pixels
    assert peaks[1] < raw_logits + peaks[0] / 16


@pytest.mark.parametrize(
    ("loss_fn", "said"),
    [
        (LastNormCrossEntropy(5).double(), "must see it whole"),
        (nn.CrossEntropyLoss(torch.ones(5, dtype=torch.float64)), "class weights.*denominator="),
        (lambda out, t: LastNormCrossEntropy(5).double()(out, t), "one micro-batch at a time"),
    ],
)
def test_a_loss_that_needs_the_whole_batch_is_refused(loss_fn, said):
    net = converted(Classifier())
    x, y = batch(8)
    with pytest.raises(MicroBatchError, match=said):
        backward(net, loss_fn, x, y, micro_batch=3, loss_in_pieces=True)
    assert all(p.grad is None for p in net.parameters())


def test_a_loss_that_changes_is_noticed():
    net, calls = converted(Classifier()), []

    def drifting(out: Tensor, targets: Tensor) -> Tensor:
        calls.append(1)
        return F.cross_entropy(out, targets) * len(calls)

    with pytest.raises(MicroBatchError, match=r"the loss of micro-batch 0.*differed"):
        backward(net, drifting, *batch(8), micro_batch=3, loss_in_pieces=True)
