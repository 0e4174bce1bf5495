"""A loss that is not a mean over samples sees the whole batch, in the model with or without a last BN."""

from __future__ import annotations

import copy
import functools
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from whole_and_parts import Classifier, Tempered, WithFeatures, batch, converted, full_batch, relative_error, state

from mimicnorm.errors import MicroBatchError
from mimicnorm.microbatch import backward

EXACT = 1e-12
WEIGHT = torch.tensor([0.1, 1.0, 2.0, 4.0, 8.0], dtype=torch.float64)


def info_nce(out: Tensor, targets: Tensor) -> Tensor:
    z = F.normalize(out)
    return F.cross_entropy(z @ z.T / 0.2, torch.arange(len(z)).roll(1))


def supervised_pairs(out: Tensor, targets: Tensor) -> Tensor:
    same = targets[:, None] == targets[None]
    return ((out[:, None] - out[None]).square().sum(-1) * same).sum() / same.sum()


def spread(out: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(out, targets) + F.relu(2 - (out.var(0, correction=0) + 1e-4).sqrt()).mean()


def hard_examples(out: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(out, targets, reduction="none")
    return losses.topk(max(len(losses) // 2, 1)).values.mean()


def relative(out: Tensor, targets: Tensor) -> Tensor:
    loss = F.cross_entropy(out, targets)
    return loss / loss.detach()  # always 1: only its gradient tells


def penalised(out: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(out, targets, WEIGHT) + 1e8


def squared(out: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(out, targets).square()


NO_MEANS = [
    *(info_nce, supervised_pairs, spread, hard_examples, relative, penalised, squared),
    lambda out, t: F.cross_entropy(out, t, WEIGHT),
    lambda out, t: (F.cross_entropy(out, t, reduction="none") * WEIGHT[t]).sum() / WEIGHT[t].sum(),
    lambda out, t: F.cross_entropy(out, t, reduction="sum"),
    lambda out, t: F.mse_loss(out[:, :1], t.double()),  # (n, 1) and (n,): each output with all targets
]


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("micro_batch", [1, 3, 16, 31])
@pytest.mark.parametrize("loss_fn", NO_MEANS)
def test_a_loss_that_is_no_mean_is_exact_without_a_last_norm(loss_fn, micro_batch):
    net = converted(Classifier(), last_norm=False)
    x, y = batch()
    whole, loss = full_batch(net, loss_fn, x, y)
    value = backward(net, loss_fn, x, y, micro_batch=micro_batch)
    assert relative_error(net, whole) <= EXACT
    torch.testing.assert_close(value, loss)


@pytest.mark.filterwarnings("ignore:Using a target size", "ignore::mimicnorm.microbatch.RegressionLossWarning")
@pytest.mark.parametrize("loss_fn", NO_MEANS)
@pytest.mark.parametrize("last_norm", [True, False])
def test_it_is_refused_where_it_cannot_see_the_whole_batch(loss_fn, last_norm):
    net = converted(Classifier(), last_norm=last_norm)
    x, y = batch()
    before = state(net)
    with pytest.raises(
        MicroBatchError, match=r"not a mean over samples.*micro-batch 0.*denominator=.*leave loss_in_pieces"
    ):
        backward(net, loss_fn, x, y, micro_batch=3, loss_in_pieces=True)
    assert all(p.grad is None for p in net.parameters())
    assert torch.equal(state(net), before)


def test_a_head_of_zeros_does_not_hide_weights():
    net = converted(Classifier(), last_norm=False)
    nn.init.zeros_(net.fc.weight), nn.init.zeros_(net.fc.bias)
    x, y = batch()
    whole, _ = full_batch(net, lambda out, t: F.cross_entropy(out, t, WEIGHT), x, y)
    backward(net, lambda out, t: F.cross_entropy(out, t, WEIGHT), x, y, micro_batch=5)
    assert relative_error(net, whole) <= EXACT


@pytest.mark.parametrize("micro_batch", [1, 2, 8])
def test_a_weak_comparison_of_samples_does_not_hide_in_rounding(micro_batch):
    def loss_fn(out: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(out, targets) + 1e-3 * out.mean(0).square().sum()

    for seed in range(5):
        torch.manual_seed(seed)
        net = converted(Classifier(), torch.float32, last_norm=False)
        x, y = batch(dtype=torch.float32)
        whole, _ = full_batch(net, loss_fn, x, y)
        backward(net, loss_fn, x, y, micro_batch=micro_batch)
        assert relative_error(net, whole) <= 1e-5


def mixup(out: Tensor, targets: tuple) -> Tensor:
    a, b, share = targets
    return share * F.cross_entropy(out, a) + (1 - share) * F.cross_entropy(out, b)


def random_for_all(out: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(out * (1 + np.random.rand() + random.random() + torch.rand(()).item()), targets)


@pytest.mark.parametrize(
    ("loss_fn", "targets"),
    [
        (lambda out, t: F.cross_entropy(out, t), batch()[1]),
        (lambda out, t: F.cross_entropy(out, t, torch.full_like(WEIGHT, 2)), batch()[1]),
        (lambda out, t: F.cross_entropy(out, t["y"].argmax(1)), {"y": torch.eye(5)[batch()[1]].numpy()}),
        (lambda out, t: (out.log_softmax(1) * t).sum(1).neg().mean(), torch.rand(32, 5, dtype=torch.float64)),
        (lambda out, t: F.binary_cross_entropy(out.sigmoid(), t), torch.rand(32, 5, dtype=torch.float64)),
        (lambda out, t: out.mean() - (out * t).mean(), torch.rand(32, 5, dtype=torch.float64)),  # cancels
        (mixup, (batch()[1], batch()[1].flip(0), 0.3)),
    ],
)
@pytest.mark.parametrize("micro_batch", [1, 5])
def test_a_mean_of_one_s_own_takes_one_pass(loss_fn, targets, micro_batch):
    targets = {"y": torch.from_numpy(targets["y"])} if isinstance(targets, dict) else targets
    net = converted(Classifier(), last_norm=False)
    x, _ = batch()
    whole, _ = full_batch(net, loss_fn, x, targets)
    calls: list[bool] = []
    net.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    backward(net, loss_fn, x, targets, micro_batch=micro_batch)
    assert relative_error(net, whole) <= EXACT
    assert calls.count(True) == -(-32 // micro_batch)
    assert calls.count(False) == (2 if micro_batch == 1 else 1), "tried on the first, or on the first two samples"


def test_one_micro_batch_needs_no_comparison():
    calls: list[int] = []

    def loss_fn(out: Tensor, targets: Tensor) -> Tensor:
        calls.append(len(out))
        return info_nce(out, targets)

    net = converted(Classifier(), last_norm=False)
    backward(net, loss_fn, *batch(8), micro_batch=8)
    assert calls == [8]


@pytest.mark.parametrize("wrap", [lambda f: f, functools.partial])
def test_torch_s_own_means_are_not_tried(wrap, monkeypatch):
    monkeypatch.setattr("mimicnorm.microbatch.route.LossProbe", None)
    x, y = batch(8)
    soft = torch.rand(8, 5, dtype=torch.float64)
    for loss_fn, targets in [
        *((F.cross_entropy, y), (nn.CrossEntropyLoss(label_smoothing=0.1), y), (nn.CrossEntropyLoss(WEIGHT), soft)),
        *((F.mse_loss, soft), (nn.L1Loss(), soft), (F.binary_cross_entropy_with_logits, soft), (nn.HuberLoss(), soft)),
    ]:
        backward(converted(Classifier(), last_norm=False), wrap(loss_fn), x, targets, micro_batch=3)
        sums = copy.deepcopy(loss_fn) if isinstance(loss_fn, nn.Module) else functools.partial(loss_fn, reduction="sum")
        sums.reduction = "sum"
        backward(converted(Classifier(), last_norm=False), wrap(sums), x, targets, micro_batch=3, denominator=8)


def test_with_a_denominator_the_loss_has_to_be_a_sum():
    net = converted(Classifier(), last_norm=False)
    x, y = batch()
    for loss_fn in (lambda out, t: F.cross_entropy(out, t), F.cross_entropy, info_nce):  # means, divided once more
        whole, loss = full_batch(net, loss_fn, x, y)
        part = copy.deepcopy(net)
        torch.testing.assert_close(backward(part, loss_fn, x, y, micro_batch=5, denominator=3.0), loss / 3)
        for p in whole.parameters():
            p.grad /= 3
        assert relative_error(part, whole) <= EXACT
        with pytest.raises(MicroBatchError, match=r"not a sum over samples.*With denominator="):
            backward(net, loss_fn, x, y, micro_batch=5, denominator=3.0, loss_in_pieces=True)
    total = lambda out, t: F.cross_entropy(out, t, WEIGHT, reduction="sum")  # noqa: E731
    whole, loss = full_batch(net, lambda out, t: F.cross_entropy(out, t, WEIGHT), x, y)
    value = backward(net, total, x, y, micro_batch=5, denominator=lambda t: WEIGHT[t].sum(), loss_in_pieces=True)
    torch.testing.assert_close(value, loss)
    assert relative_error(net, whole) <= EXACT


class ArcFace(nn.Module):
    """A classifier inside the loss, with class weights: parameters of its own and no mean."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, inputs, dtype=torch.float64))

    def forward(self, out: tuple, targets: Tensor) -> Tensor:
        return F.cross_entropy(4 * F.linear(F.normalize(out[1]), F.normalize(self.weight)), targets, WEIGHT)


@pytest.mark.parametrize("last_norm", [True, False])
@pytest.mark.parametrize("wrap", [lambda loss: loss, lambda loss: lambda out, t: loss(out, t)])
def test_parameters_of_a_loss_get_their_exact_gradient(last_norm, wrap):
    for make, loss_fn in ((WithFeatures, ArcFace(12)), (Classifier, Tempered())):
        net, own = converted(make(), last_norm=last_norm), copy.deepcopy(loss_fn)
        net.fc.requires_grad_(make is Classifier)  # the logits are not used
        x, y = batch()
        whole, _ = full_batch(net, own, x, y)
        backward(net, wrap(loss_fn), x, y, micro_batch=5)
        assert relative_error(net, whole) <= EXACT
        for p, q in zip(loss_fn.parameters(), own.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=0)


# -- without a trace ---------------------------------------------------------------------------------------------


class Queue(nn.Module):
    """Compares with the samples of earlier batches, counts its calls, and draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.ones(4, 5, dtype=torch.float64))
        self.register_buffer("replaced", torch.zeros(()))
        self.calls, self.seen = 0, []
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, out: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(torch.cat([out, out @ self.queue.T.clone()], 1), targets)
        loss = loss * (1 + torch.rand((), generator=self.generator).item())
        self.queue.copy_(torch.cat([out.detach(), self.queue])[:4])
        self.replaced = self.replaced + 1
        self.calls += 1
        self.seen.append(len(out))
        return loss


@pytest.mark.parametrize(
    "wrap", [lambda loss: loss, lambda loss: lambda out, t: loss(out, t), lambda loss: loss.forward]
)
def test_a_loss_with_a_state_is_called_once_with_the_whole_batch(wrap):
    net, loss_fn = converted(Classifier(), last_norm=False), Queue()
    own = copy.deepcopy(loss_fn)
    own.generator.set_state(loss_fn.generator.get_state())
    x, y = batch()
    whole, loss = full_batch(net, own, x, y)
    torch.testing.assert_close(backward(net, wrap(loss_fn), x, y, micro_batch=5), loss)
    assert relative_error(net, whole) <= EXACT
    torch.testing.assert_close(state(loss_fn), state(own))
    assert (loss_fn.calls, loss_fn.seen) == (own.calls, own.seen) == (1, [32])
    assert torch.equal(loss_fn.generator.get_state(), own.generator.get_state())
    with pytest.raises(MicroBatchError, match=r"changes the state of Queue.*Leave loss_in_pieces out"):
        backward(net, wrap(loss_fn), x, y, micro_batch=5, loss_in_pieces=True)
    assert (loss_fn.calls, loss_fn.seen) == (1, [32])


def test_random_numbers_go_on_as_without_the_comparison():
    net = converted(Classifier(dropout=0.3), last_norm=False)
    x, y = batch(12)
    reference = copy.deepcopy(net)

    def seed() -> None:
        torch.manual_seed(5), random.seed(5), np.random.seed(5)

    seed()
    for a, b in zip(x.split(5), y.split(5), strict=True):
        (random_for_all(reference(a), b) * len(a) / 12).backward()
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
    seed()
    backward(net, random_for_all, x, y, micro_batch=5)
    assert relative_error(net, reference) <= EXACT
    assert torch.equal(torch.get_rng_state(), after[0])
    assert random.getstate() == after[1]
    assert (np.random.get_state()[1] == after[2]).all()


def noisy(out: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.dropout(out, 0.5), targets)


def test_a_loss_with_noise_for_each_sample_cannot_be_compared():
    net = converted(Classifier(), last_norm=False)
    x, y = batch()
    whole = copy.deepcopy(net)
    torch.manual_seed(3)
    noisy(whole(x), y).backward()
    torch.manual_seed(3)
    backward(net, noisy, x, y, micro_batch=5)
    assert relative_error(net, whole) <= EXACT, "so it sees the whole batch"
    backward(net, noisy, x, y, micro_batch=5, loss_in_pieces=True)  # the user's word counts


def test_a_model_that_writes_into_its_inputs_may_do_so_in_one_pass():
    class Shifts(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.sub_(1.0))

    net = converted(Classifier(), last_norm=False)
    x, y = batch(8)
    whole, _ = full_batch(net, F.cross_entropy, x - 1, y)
    net.__class__ = Shifts
    backward(net, lambda out, t: F.cross_entropy(out, t), x, y, micro_batch=3)
    assert relative_error(net, whole) <= EXACT


def test_targets_and_outputs_that_have_no_whole():
    """Images of two sizes, and a share of mixup for each micro-batch: a mean all the same."""

    class Dense(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.body(x).movedim(1, -1)).movedim(-1, 1)

    def dense_mixup(out: Tensor, targets: tuple) -> Tensor:
        return targets[1] * F.cross_entropy(out, targets[0]) + (1 - targets[1]) * out.logsumexp(1).mean()

    net = converted(Classifier(), last_norm=False)
    net.__class__ = Dense
    sizes = [(9, 4), (11, 5), (9, 4)]
    loader = [
        (torch.randn(2, 3, s, s, dtype=torch.float64), (torch.randint(5, (2, t, t)), 0.1 + 0.2 * i))
        for i, (s, t) in enumerate(sizes)
    ]
    whole = copy.deepcopy(net)
    for x, targets in loader:
        (dense_mixup(whole(x), targets) / 3).backward()
    backward(net, dense_mixup, loader)
    assert relative_error(net, whole) <= EXACT
    with pytest.raises(MicroBatchError) as caught:  # a loss that compares samples has no whole batch to see
        backward(net, lambda out, t: spread(out.mean((2, 3)), t[0][:, 0, 0]), loader)
    assert "loss_fn must see the whole batch" in " ".join(caught.value.__notes__)


def confident(out: Tensor, targets: Tensor) -> Tensor:
    """Pseudo-labels: the mean over samples that the model is sure of, if there are any."""
    sure = out.detach().softmax(1).amax(1) > 0.9
    return (F.cross_entropy(out, targets, reduction="none") * sure).sum() / sure.sum().clamp(min=1)


def test_what_only_later_outputs_show_is_an_error_with_a_way_out():
    net = nn.Linear(5, 5).double()
    nn.init.eye_(net.weight), nn.init.zeros_(net.bias)
    x = torch.randn(12, 5, dtype=torch.float64) * 0.1
    x[[7, 10, 11], 2] += 20
    y = torch.arange(12) % 5
    whole, _ = full_batch(net, confident, x, y)
    with pytest.raises(MicroBatchError, match=r"not a mean over samples.*Give loss_in_pieces=False.*clear them"):
        backward(net, confident, x, y, micro_batch=3)
    net.zero_grad()
    backward(net, confident, x, y, micro_batch=3, loss_in_pieces=False)
    assert relative_error(net, whole) <= EXACT


def test_autocast_and_half_precision():
    """A mean stays a mean by rounding, and class weights do not hide in it."""
    net = converted(Classifier(), torch.float32, last_norm=False)
    x, y = batch(12, torch.float32)
    weight = WEIGHT.float()
    seen: list[torch.dtype] = []

    def mean(out: Tensor, targets: Tensor) -> Tensor:
        seen.append(out.dtype)
        return -out.log_softmax(1)[torch.arange(len(out)), targets].mean()

    for loss_fn, passes in ((mean, 1), (lambda out, t: F.cross_entropy(out.float(), t, weight), 2)):
        calls: list[bool] = []
        hook = net.register_forward_hook(lambda *_, calls=calls: calls.append(torch.is_grad_enabled()))
        net.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            backward(net, loss_fn, x, y, micro_batch=5)
        hook.remove()
        assert len(calls) - 1 == 3 * passes
        whole = copy.deepcopy(net)
        whole.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss_fn(whole(x), y).backward()
        assert relative_error(net, whole) <= 0.02
    assert set(seen) == {torch.bfloat16}
