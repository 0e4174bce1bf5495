"""LastNorm by itself: BatchNorm's arithmetic, and the warning when a batch reaches it in pieces."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from whole_and_parts import AveragedHeads, Classifier, batch, converted, state

from mimicnorm.errors import MicroBatchError
from mimicnorm.layers import LastNorm, last_norm_
from mimicnorm.microbatch import AccumulationWarning, backward


@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
def test_same_as_batch_norm(momentum):
    ours = LastNorm(4, dim=-1, momentum=momentum)
    theirs = nn.BatchNorm1d(4, affine=False, momentum=momentum)
    for step in range(3):
        x = torch.randn(6 + step, 4) * 3 + 1
        torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(state(ours), state(theirs))
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))


def test_a_sequential_head_normalises_once():
    layer, norm, x = nn.Linear(4, 3), LastNorm(3), torch.randn(6, 4)
    norm.running_mean.fill_(2.0)
    head = last_norm_(nn.Sequential(copy.deepcopy(layer)), copy.deepcopy(norm)).eval()
    torch.testing.assert_close(head(x), norm.eval()(layer(x)))


def test_a_lone_sample_points_here_and_counts_nothing():
    norm = LastNorm(4)
    with pytest.raises(MicroBatchError, match=r"\(1, 4\).*mimicnorm\.microbatch\.backward"):
        norm(torch.randn(1, 4))
    assert norm.num_batches_tracked == 0
    norm.eval()(torch.randn(1, 4))


def test_whole_graphs_export_and_vmap_without_ranks():
    net = converted(Classifier())
    x, _ = batch(4)
    expected = copy.deepcopy(net)(x)
    compiled = torch.compile(copy.deepcopy(net), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    program = torch.export.export(copy.deepcopy(net).eval(), (x,))
    torch.testing.assert_close(program.module()(x), copy.deepcopy(net).eval()(x))
    norm = LastNorm(4).eval()
    z = torch.randn(3, 5, 4)
    torch.testing.assert_close(torch.vmap(norm)(z), torch.stack([norm(t) for t in z]))


# -- accumulation ------------------------------------------------------------------------------------------------


def step(net: nn.Module, loss_weight: float = 1.0) -> None:
    x, y = batch(8)
    (loss_weight * F.cross_entropy(net(x), y)).backward()


def test_plain_accumulation_warns_once_and_points_here():
    net = converted(Classifier())
    step(net)
    with pytest.warns(AccumulationWarning, match=r"mimicnorm\.microbatch\.backward"):
        step(net)
    step(net)  # warnings are errors here: a second one would raise
    net.zero_grad(set_to_none=False)
    step(net)


def test_accumulation_that_starts_after_steps_with_zeroed_gradients():
    net = converted(Classifier())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        step(net)
        optimizer.step()
    with pytest.warns(AccumulationWarning):
        step(net)


def test_after_the_first_passes_nothing_is_looked_for_any_more():
    layer = last_norm_(nn.Linear(4, 3), LastNorm(3))
    for passes in range(40):
        layer.zero_grad()
        logits = layer(torch.randn(8, 4))
        F.cross_entropy(logits, torch.arange(8) % 3).backward()
        assert layer.last_norm._accumulation.active == (passes < 32)


def test_two_heads_warn_once():
    net = converted(AveragedHeads())
    step(net)
    with pytest.warns(AccumulationWarning) as given:
        step(net)
    assert len(given) == 1
    step(net)


@pytest.mark.parametrize("wanted", ["inputs", "parameters"])
def test_gradients_by_autograd_grad_are_no_accumulation(wanted):
    net = converted(Classifier())
    x, y = batch(8)
    x.requires_grad_()
    step(net)
    parameters = list(net.parameters())
    grads = torch.autograd.grad(F.cross_entropy(net(x), y), x if wanted == "inputs" else parameters)
    assert wanted == "inputs" or all(torch.equal(g, p.grad) for g, p in zip(grads, parameters, strict=True))
    with pytest.warns(AccumulationWarning):
        step(net)


def test_the_accumulation_of_real_and_fake_batches_says_that_a_batch_must_not_carry_the_label():
    net = converted(Classifier())
    (real, _), fake = batch(8), torch.randn(8, 3, 9, 9, dtype=torch.float64)
    F.binary_cross_entropy_with_logits(net(real), torch.ones(8, 5, dtype=torch.float64)).backward()
    with pytest.warns(
        AccumulationWarning, match=r"must not carry the label: .* in one batch, or convert with last_norm=F"
    ):
        F.binary_cross_entropy_with_logits(net(fake), torch.zeros(8, 5, dtype=torch.float64)).backward()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("clear", ["before forward", "after forward", "after step"])
def test_ordinary_training_does_not_warn(set_to_none, clear):
    net = converted(Classifier())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x, y = batch(8)
    for _ in range(3):
        if clear == "before forward":
            optimizer.zero_grad(set_to_none=set_to_none)
        loss = F.cross_entropy(net(x), y)
        if clear == "after forward":
            optimizer.zero_grad(set_to_none=set_to_none)
        loss.backward()
        optimizer.step()
        if clear == "after step":
            optimizer.zero_grad(set_to_none=set_to_none)


def test_micro_batches_shared_modules_and_several_losses_do_not_warn():
    x, y = batch(8)
    net = converted(Classifier())
    for _ in range(2):
        backward(net, F.cross_entropy, x, y, micro_batch=3)
    twice = converted(Classifier())
    (F.cross_entropy(twice(x), y) + F.cross_entropy(twice(x + 1), y)).backward()
    out = converted(Classifier())(x)
    F.cross_entropy(out, y).backward(retain_graph=True)
    out.square().mean().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_recomputation_does_not_warn(reentrant):
    net = converted(Classifier())
    x, y = batch(8)
    for _ in range(2):
        net.zero_grad()
        features = net.body(x).mean((2, 3))
        F.cross_entropy(checkpoint(net.fc, features, use_reentrant=reentrant), y).backward()


def test_evaluation_and_gradient_free_passes_do_not_warn():
    net = converted(Classifier())
    step(net)
    x, y = batch(8)
    with torch.no_grad():
        net(x)
    net.eval()
    F.cross_entropy(net(x), y).backward()


def test_copies_and_pickles_watch_for_themselves():
    net = converted(Classifier())
    step(net)
    for twin in (copy.deepcopy(net.fc.last_norm), pickle.loads(pickle.dumps(net.fc.last_norm))):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            linear = nn.Linear(3, 5)
            twin.float()(linear(torch.randn(4, 3))).square().sum().backward()
