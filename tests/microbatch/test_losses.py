"""Losses of every kind: with parameters, with penalties, that write into their arguments, that are no mean."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from whole_and_parts import Classifier, Pooled, Tempered, batch, converted, full_batch, gradient, relative_error, state

from mimicnorm.errors import MicroBatchError
from mimicnorm.layers import LastNorm
from mimicnorm.microbatch import LastNormCrossEntropy, backward

EXACT = 1e-12


def test_parameters_of_the_loss_get_their_gradient():
    net, loss_fn = converted(Classifier()), Tempered()
    x, y = batch()
    own = copy.deepcopy(loss_fn)
    whole, _ = full_batch(net, own, x, y)
    backward(net, loss_fn, x, y, micro_batch=5)
    torch.testing.assert_close(loss_fn.temperature.grad, own.temperature.grad)
    assert relative_error(net, whole) <= EXACT
    loss_fn.temperature.grad = None
    backward(net.requires_grad_(False), loss_fn, x, y, micro_batch=5)  # a calibration: only the loss learns
    torch.testing.assert_close(loss_fn.temperature.grad, own.temperature.grad)


def test_a_penalty_over_the_model_s_parameters():
    x, y = batch()
    nets = [converted(Classifier())]
    nets.append(copy.deepcopy(nets[0]))

    def loss_of(net: nn.Module):
        return lambda out, t: F.cross_entropy(out, t) + 0.1 * sum(p.square().sum() for p in net.parameters())

    loss_of(nets[0])(nets[0](x), y).backward()
    backward(nets[1], loss_of(nets[1]), x, y, micro_batch=5)
    assert relative_error(nets[1], nets[0]) <= EXACT


def test_targets_that_require_a_gradient():
    net = converted(Classifier())
    x, soft = batch()[0], torch.randn(32, 5, dtype=torch.float64, requires_grad=True)

    def loss_fn(out: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(out, targets.softmax(1))

    full_batch(net, loss_fn, x, soft)
    expected, soft.grad = soft.grad, None
    backward(net, loss_fn, x, soft, micro_batch=5)
    torch.testing.assert_close(soft.grad, expected)


@pytest.mark.parametrize("make", [Classifier, Pooled])
def test_a_loss_that_writes_into_the_outputs(make):
    def loss_fn(out: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(out.div_(0.3), targets)

    x, y = batch()
    for method in ({}, {"last_norm": False}):
        net = converted(make(), **method)
        whole, _ = full_batch(net, loss_fn, x, y)
        expected = copy.deepcopy(net)(x)
        _, outputs = backward(net, loss_fn, x, y, micro_batch=5, return_outputs=True)
        assert relative_error(net, whole) <= EXACT
        torch.testing.assert_close(outputs, expected.detach())


def test_complex_outputs():
    class Spectrum(Classifier):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.body(x).mean((2, 3))
            return self.fc(y), torch.complex(y, y * y)

    def loss_fn(out: tuple, targets: Tensor) -> Tensor:
        return F.cross_entropy(out[0], targets) + out[1].abs().square().mean()

    net = converted(Classifier())
    net.__class__ = Spectrum
    x, y = batch()
    whole, _ = full_batch(net, loss_fn, x, y)
    backward(net, loss_fn, x, y, micro_batch=5)
    assert relative_error(net, whole) <= EXACT


WEIGHT = torch.linspace(0.5, 2, 5, dtype=torch.float64)


def weighted_inside(out: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(out, targets, WEIGHT)


NO_MEANS = [  # a loss, the kind of targets, and what it is refused for where it is computed in parts
    (nn.CrossEntropyLoss(WEIGHT), "classes", "class weights"),
    (nn.CrossEntropyLoss(reduction="sum"), "classes", 'reduction="sum"'),
    (nn.MSELoss(reduction="sum"), "values", 'reduction="sum"'),
    (functools.partial(F.mse_loss, reduction="sum"), "values", 'reduction="sum"'),
    (functools.partial(functools.partial(F.l1_loss, reduction="mean"), reduction="sum"), "values", 'reduction="sum"'),
    (functools.partial(F.mse_loss, size_average=False), "values", 'reduction="sum"'),
    (functools.partial(F.binary_cross_entropy_with_logits, reduction="sum"), "values", 'reduction="sum"'),
    (functools.partial(F.kl_div, reduction="sum"), "values", 'reduction="sum"'),
    (torch.compile(functools.partial(F.mse_loss, reduction="sum"), backend="eager"), "values", 'reduction="sum"'),
    (functools.partial(nn.CrossEntropyLoss(WEIGHT)), "classes", "class weights"),
    (nn.CrossEntropyLoss(WEIGHT).forward, "classes", "class weights"),
    (functools.partial(nn.CrossEntropyLoss(WEIGHT).__call__), "classes", "class weights"),
    (functools.partial(functools.partial(F.nll_loss), weight=WEIGHT), "classes", "class weights"),
    (functools.partial(F.cross_entropy, weight=WEIGHT, label_smoothing=0.1), "classes", "class weights"),
    (functools.partial(F.cross_entropy, ignore_index=2), "classes", r"targets to ignore \(2\)"),
    (F.cross_entropy, "ignored", r"targets to ignore \(-100\)"),
    (nn.CrossEntropyLoss(), "ignored", r"targets to ignore \(-100\)"),
    (weighted_inside, "classes", "the loss is .* from each by itself"),
    (
        functools.partial(lambda out, t, reduction: F.mse_loss(out, t, reduction=reduction), reduction="sum"),
        "values",
        "",
    ),
]


def targets_of(kind: str, n: int = 32) -> Tensor:
    if kind == "values":
        return torch.softmax(torch.randn(n, 5, dtype=torch.float64), 1)
    y = batch(n)[1]
    y[: 3 if kind == "ignored" else 0] = -100
    return y


@pytest.mark.filterwarnings("ignore:.*size_average and reduce args will be deprecated")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo looks
@pytest.mark.parametrize(("loss_fn", "kind", "word"), NO_MEANS)
def test_what_is_no_mean_sees_the_whole_batch(loss_fn, kind, word):
    x, y = batch()[0], targets_of(kind)
    for net in (converted(Classifier(), last_norm=False), converted(Classifier()).eval()):
        whole, loss = full_batch(net, loss_fn, x, y)
        torch.testing.assert_close(backward(net, loss_fn, x, y, micro_batch=3), loss)
        assert relative_error(net, whole) <= EXACT


@pytest.mark.filterwarnings("ignore:.*size_average and reduce args will be deprecated")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo looks
@pytest.mark.filterwarnings("ignore::mimicnorm.microbatch.RegressionLossWarning")
@pytest.mark.parametrize(("loss_fn", "kind", "word"), NO_MEANS)
@pytest.mark.parametrize("last_norm", [True, False])
def test_what_is_no_mean_is_refused_in_pieces(loss_fn, kind, word, last_norm):
    x, y = batch()[0], targets_of(kind)
    net = converted(Classifier(), last_norm=last_norm)
    before = state(net)
    with pytest.raises(MicroBatchError, match=f"{word}.*denominator="):
        backward(net, loss_fn, x, y, micro_batch=3, loss_in_pieces=True)
    assert all(p.grad is None for p in net.parameters())
    assert torch.equal(state(net), before)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo looks
@pytest.mark.parametrize(
    "loss_fn",
    [
        nn.MSELoss(reduction="none"),
        functools.partial(F.l1_loss, reduction="none"),
        torch.compile(nn.MSELoss(reduction="none"), backend="eager"),
    ],
)
def test_a_loss_that_reduces_nothing(loss_fn):
    net, x, y = converted(Classifier(), last_norm=False), batch(8)[0], targets_of("values", 8)
    with pytest.raises(MicroBatchError, match=r"must return one number.*\(8, 5\)"):
        backward(net, loss_fn, x, y, micro_batch=3)
    with pytest.raises(MicroBatchError, match=r'reduction="none".*denominator='):
        backward(net, loss_fn, x, y, micro_batch=3, loss_in_pieces=True)
    assert all(p.grad is None for p in net.parameters())


class OwnMean(nn.MSELoss):
    """Averages by itself what torch leaves apart."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input, target).mean()


@pytest.mark.parametrize(
    "loss_fn",
    [
        functools.partial(F.mse_loss, reduction="mean"),
        functools.partial(F.kl_div, reduction="batchmean"),
        functools.partial(functools.partial(F.mse_loss, reduction="sum"), reduction="mean"),
        nn.HuberLoss().forward,
        OwnMean(reduction="none"),
        functools.partial(lambda out, t, ignore_index: F.l1_loss(out, t), ignore_index=0),
    ],
)
def test_means_by_any_way_of_giving_them_are_exact_in_one_pass(loss_fn):
    net = converted(Classifier(), last_norm=False)
    x, soft = batch(13)[0], torch.softmax(torch.randn(13, 5, dtype=torch.float64), 1)
    whole, _ = full_batch(net, loss_fn, x, soft)
    backward(net, loss_fn, x, soft, micro_batch=4)
    assert relative_error(net, whole) <= EXACT


def test_a_method_of_the_user_s_is_a_function_of_the_user_s():
    class Trained(Classifier):
        other = nn.CrossEntropyLoss(WEIGHT)

        def loss(self, out: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(out, targets)

    net = converted(Classifier())
    net.__class__ = Trained
    x, y = batch()
    whole, _ = full_batch(net, net.loss, x, y)
    backward(net, net.loss, x, y, micro_batch=5, loss_in_pieces=True)
    assert relative_error(net, whole) <= EXACT


def test_class_weights_of_soft_targets_are_a_mean():
    net = converted(Classifier(), last_norm=False)
    x, soft = batch()[0], torch.softmax(torch.randn(32, 5, dtype=torch.float64), 1)
    whole, _ = full_batch(net, nn.CrossEntropyLoss(WEIGHT), x, soft)
    backward(net, nn.CrossEntropyLoss(WEIGHT), x, soft, micro_batch=5)
    assert relative_error(net, whole) <= EXACT


@pytest.mark.parametrize("last_norm", [True, False])
def test_a_loss_that_is_not_finite(last_norm):
    net = converted(Classifier(), last_norm=last_norm)
    x, y = batch(8)
    with pytest.raises(MicroBatchError, match="the loss is nan"):
        backward(net, lambda out, t: F.cross_entropy(out, t) * float("nan"), x, y, micro_batch=3)
    assert all(p.grad is None for p in net.parameters())


def test_a_loss_without_a_graph():
    x, y = batch(8)
    with torch.no_grad(), pytest.raises(MicroBatchError, match="no_grad"):
        backward(converted(Classifier()), F.cross_entropy, x, y, micro_batch=3)


@pytest.mark.parametrize("wrap", [functools.partial, lambda loss: loss.forward])
def test_a_last_norm_inside_a_partial_sees_the_whole_batch(wrap):
    net, loss_fn = converted(Classifier(), last_norm=False), LastNormCrossEntropy(5).double()
    x, y = batch()
    whole, _ = full_batch(net, copy.deepcopy(loss_fn), x, y)
    backward(net, wrap(loss_fn), x, y, micro_batch=5)
    assert relative_error(net, whole) <= EXACT
    assert loss_fn.last_norm.num_batches_tracked == 1


def test_a_last_norm_hidden_in_a_function():
    net, loss_fn = converted(Classifier(), last_norm=False), LastNormCrossEntropy(5).double()
    x, y = batch(8)
    own = copy.deepcopy(loss_fn)
    whole, _ = full_batch(net, own, x, y)
    with pytest.raises(MicroBatchError, match="the module itself"):
        backward(net, lambda out, t: loss_fn(out, t), x, y, micro_batch=3, loss_in_pieces=True)
    assert all(p.grad is None for p in net.parameters())
    assert loss_fn.last_norm.num_batches_tracked == 0
    backward(net, lambda out, t: loss_fn(out, t), x, y, micro_batch=3)
    assert relative_error(net, whole) <= EXACT
    torch.testing.assert_close(state(loss_fn), state(own))


def test_hooks_on_a_last_norm_run_once():
    x, y = batch()
    for register in (
        lambda m: m.register_forward_hook(lambda _m, _i, out: out * 2),
        lambda m: m.register_forward_pre_hook(lambda _m, args: (args[0] ** 3,)),
        lambda m: m.register_full_backward_hook(lambda _m, gi, _go: (gi[0] * 2,)),
    ):
        nets = [converted(Classifier())]
        nets.append(copy.deepcopy(nets[0]))
        for net in nets:
            register(next(m for m in net.modules() if isinstance(m, LastNorm)))
        F.cross_entropy(nets[0](x), y).backward()
        backward(nets[1], F.cross_entropy, x, y, micro_batch=5)
        assert float((gradient(nets[1]) - gradient(nets[0])).norm() / gradient(nets[0]).norm()) <= EXACT
