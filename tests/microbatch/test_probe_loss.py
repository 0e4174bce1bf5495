"""A loss is compared with itself, by value and gradient, and the comparison leaves no trace."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from whole_and_parts import (
    EXACT,
    Classifier,
    Tempered,
    batch,
    check_exact,
    converted,
    full_batch,
    gradient,
    relative_error,
    state,
)

from mimicnorm.errors import MicroBatchError
from mimicnorm.microbatch import backward
from mimicnorm.microbatch.batches import MicroBatch
from mimicnorm.microbatch.probe_loss import is_plain_cross_entropy

WEIGHT = torch.tensor([0.1, 1.0, 2.0, 4.0, 8.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("loss_fn", "targets", "plain"),
    [
        *((F.cross_entropy, torch.arange(5), True), (nn.CrossEntropyLoss(label_smoothing=0.1), torch.eye(5), True)),
        *((nn.CrossEntropyLoss(WEIGHT), torch.arange(5), False), (F.cross_entropy, torch.tensor([1, -100]), False)),
        *((nn.CrossEntropyLoss(ignore_index=3), torch.arange(5), False), (F.mse_loss, torch.eye(5), False)),
        *((nn.CrossEntropyLoss(reduction="sum"), torch.arange(5), False), (F.cross_entropy, [1, 2], False)),
        *((type("Own", (nn.CrossEntropyLoss,), {})(), torch.arange(5), False), (lambda out, t: out.sum(), None, False)),
    ],
)
def test_only_torch_s_cross_entropy_without_weights_and_ignored_targets_is_known_to_be_a_mean(loss_fn, targets, plain):
    pieces = [MicroBatch(i, 5 * i, 5, (), {}, targets) for i in range(2)]
    assert is_plain_cross_entropy(loss_fn, pieces) == plain
    if plain and isinstance(loss_fn, nn.Module):
        loss_fn.register_forward_hook(lambda _module, _args, loss: loss**2)
        assert not is_plain_cross_entropy(loss_fn, pieces)


def test_a_loss_that_the_model_averages_itself_takes_the_user_s_word():
    class Scores(Classifier):
        """Like a language model: the mean over the labels that are not ignored, whose number differs."""

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            out = super().forward(x)
            return {"out": out, "loss": F.cross_entropy(out, labels)}

    net = converted(Classifier(), run_as=Scores, last_norm=False)
    x, y = batch(8)
    y[:2] = -100
    how = {"model": net, "loss_fn": lambda out, _: out["loss"], "inputs": (x, y), "micro_batch": 3}
    with pytest.raises(MicroBatchError, match=r"(?s)shape \(\).*loss_in_pieces=True\).*does not count the samples"):
        backward(**how)
    assert net.fc.weight.grad is None
    backward(**how, loss_in_pieces=True)


def test_a_loader_with_several_targets_per_sample():
    net = nn.Sequential(nn.Linear(3, 5), nn.Flatten(0, 1)).double()
    inputs, y = torch.randn(6, 4, 3, dtype=torch.float64), torch.arange(24) % 5
    whole, _ = full_batch(net, F.cross_entropy, inputs, y)
    backward(net, F.cross_entropy, [(inputs[:2], y[:8]), (inputs[2:], y[8:])])
    assert relative_error(net, whole) <= EXACT
    with pytest.raises(MicroBatchError, match="must count the samples"):  # another number: no mean over samples
        backward(net, F.cross_entropy, [(inputs[:2], y[:8]), (inputs[2:, :3], y[:12])])


def test_a_head_of_zeros_does_not_hide_weights():
    net = converted(Classifier(), last_norm=False)
    nn.init.zeros_(net.fc.weight), nn.init.zeros_(net.fc.bias)
    check_exact(net, lambda out, t: F.cross_entropy(out, t, WEIGHT), *batch(), micro_batch=5)


@pytest.mark.parametrize("micro_batch", [1, 2, 8])
def test_a_weak_comparison_of_samples_does_not_hide_in_rounding(micro_batch):
    def loss_fn(out: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(out, targets) + 1e-3 * out.mean(0).square().sum()

    for seed in range(2):
        torch.manual_seed(seed)
        net = converted(Classifier(), torch.float32, last_norm=False)
        check_exact(net, loss_fn, *batch(dtype=torch.float32), allowed=1e-5, micro_batch=micro_batch)


def confident(out: Tensor, targets: Tensor) -> Tensor:
    """Pseudo-labels: the mean over samples that the model is sure of, if there are any."""
    sure = out.detach().softmax(1).amax(1) > 0.9
    return (F.cross_entropy(out, targets, reduction="none") * sure).sum() / sure.sum().clamp(min=1)


@pytest.mark.parametrize("how", [{}, {"return_outputs": True}, {"loss_in_pieces": False}])
def test_what_only_later_outputs_show_is_taken_back(how):
    """The first two micro-batches look like a mean, and their gradients have been added by then."""
    net = nn.Linear(5, 5).double()
    nn.init.eye_(net.weight), nn.init.zeros_(net.bias)
    x = torch.randn(12, 5, dtype=torch.float64) * 0.1
    x[[7, 10, 11], 2] += 20
    y = torch.arange(12) % 5
    calls: list[bool] = []
    net.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    check_exact(net, confident, x, y, micro_batch=3, **how)
    parts = calls[2:] if "return_outputs" in how else calls[1:]  # the whole batch came before
    assert parts == [True] * 3 * ("loss_in_pieces" not in how) + [False] * 4 + [True] * 4
    with pytest.raises(MicroBatchError, match=r"(?s)not a mean over samples.*\(loss_in_pieces=True\).*clear them"):
        backward(net, confident, x, y, micro_batch=3, loss_in_pieces=True)


class Confident(Tempered):
    """The same with a parameter of its own, on one of two outputs in a dict whose keys come in any order."""

    def forward(self, out: dict[str, Tensor], targets: Tensor) -> Tensor:
        return confident(out["a"] * self.temperature, targets) + out["b"].square().mean()


def test_what_is_taken_back_includes_the_loss_s_parameters_inputs_and_dropout():
    class Outputs(nn.Sequential):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            a = super().forward(x)
            return {"a": a, "b": x} if float(x.detach()[0, 0]) > 0 else {"b": x, "a": a}

    torch.manual_seed(0)
    net = Outputs(nn.Linear(5, 5), nn.Dropout(0.3)).double()
    nn.init.eye_(net[0].weight), nn.init.zeros_(net[0].bias)
    x = torch.randn(12, 5, dtype=torch.float64) * 0.1
    x[[7, 10, 11], 2] += 20
    x.requires_grad_()
    y, loss_fn = torch.arange(12) % 5, Confident()
    found = []
    for whole in (True, False):
        net.zero_grad(), loss_fn.zero_grad()
        x.grad = None
        torch.manual_seed(3)
        if whole:
            parts = [net(part) for part in x.split(3)]
            loss_fn({k: torch.cat([p[k] for p in parts]) for k in "ab"}, y).backward()
        else:
            backward(net, loss_fn, x, y, micro_batch=3)
        found.append([gradient(net, loss_fn), x.grad.flatten(), torch.rand(1)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-15)


def random_for_all(out: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(out * (1 + np.random.rand() + random.random() + torch.rand(()).item()), targets)


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
        assert len(calls) == (3 if passes == 1 else 1 + 2 * 3)
        whole = copy.deepcopy(net)
        whole.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss_fn(whole(x), y).backward()
        assert relative_error(net, whole) <= 0.02
    assert set(seen) == {torch.bfloat16}
