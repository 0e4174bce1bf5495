"""A loss that reads what forward left outside of its output is right or refused by name; who only keeps it, runs."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from whole_and_parts import EXACT, AveragedHeads, Classifier, batch, check_exact, converted, gradient, relative_error

from mimicnorm.errors import MicroBatchError
from mimicnorm.microbatch import LastNormCrossEntropy, backward
from mimicnorm.microbatch.left_behind import LeftBehind

ELSEWHERE: dict[str, Tensor] = {}


class Keeps(Classifier):
    """Gives its features to ``keep``, with itself."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x).mean((2, 3))
        getattr(self, "keep", in_attribute)(self, y)
        return self.fc(y)


def in_attribute(net: nn.Module, y: Tensor) -> None:
    net.aux = y.square().mean()


def in_list_of_child(net: nn.Module, y: Tensor) -> None:
    net.drop.losses = [y.mean(), {"square": y.square().mean()}]


def in_global(_net: nn.Module, y: Tensor) -> None:
    ELSEWHERE["y"] = y


def in_place(net: nn.Module, y: Tensor) -> None:
    net.sums.copy_(y.detach().sum(0))


def counted(net: nn.Module, y: Tensor) -> None:
    net.counts = y.argmax(1).bincount(minlength=12)


def network(
    keep: Callable = in_attribute, make: type = Classifier, run_as: type = Keeps, **method: object
) -> nn.Module:
    net = converted(make(), run_as=run_as, **method)
    net.keep = keep
    net.sums = torch.zeros(12, dtype=torch.float64)
    return net


def plus(read: Callable[[], Tensor | float]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda out, t: F.cross_entropy(out, t) + read()


def refused(net: nn.Module, loss_fn: Callable, name: str, micro_batch: int = 3, **how: object) -> list[str]:
    """The call is refused by this name, and no gradient was added; return the notes of the error."""
    with pytest.raises(MicroBatchError) as caught:
        backward(net, loss_fn, *batch(8), micro_batch=micro_batch, **how)
    assert str(caught.value).startswith(f"{name}: loss_fn reads this tensor")
    assert "Return it from forward" in str(caught.value)
    assert all(p.grad is None for p in net.parameters())
    return getattr(caught.value, "__notes__", [])


@pytest.mark.parametrize(
    ("keep", "read", "name"),
    [
        (in_attribute, lambda net: net.aux, "model.aux"),
        (in_attribute, lambda net: net.aux.item(), "model.aux"),
        (in_attribute, lambda net: torch.stack([net.aux, net.aux]).sum(), "model.aux"),
        (in_list_of_child, lambda net: net.drop.losses[1]["square"], "model.drop.losses[1]['square']"),
        (in_global, lambda _: ELSEWHERE["y"].square().mean(), "ELSEWHERE['y']"),
        (in_place, lambda net: net.sums.mean(), "model.sums"),
        (counted, lambda net: net.counts.double().var(), "model.counts"),
    ],
)
def test_wherever_it_is_left_and_however_it_is_read(keep, read, name):
    net = network(keep)
    for micro_batch in (1, 8):
        refused(net, plus(lambda: read(net)), name, micro_batch)


def test_what_a_hook_or_a_closure_holds():
    net, features, last = converted(Classifier()), [], None

    def hook(_module: nn.Module, _inputs: tuple, out: Tensor) -> None:
        nonlocal last
        features[:], last = [out], out.mean()

    net.body.register_forward_hook(hook)
    refused(net, plus(lambda: features[0].square().mean()), "features[0]")
    refused(net, plus(lambda: last), "last")
    check_exact(net, F.cross_entropy, *batch(8), micro_batch=3)


class LossOfModel(nn.Module):
    """A loss that holds the model."""

    def __init__(self, net: nn.Module, criterion: Callable):
        super().__init__()
        self.net, self.criterion = net, criterion

    def forward(self, out: Tensor, targets: Tensor) -> Tensor:
        return self.criterion(out, targets) + self.net.aux


def test_losses_that_are_modules():
    net = network()
    loss_fn = LossOfModel(net, F.cross_entropy)
    refused(net, loss_fn, "model.aux")
    refused(net, loss_fn.forward, "model.aux")
    net = network(last_norm=False)
    refused(net, LossOfModel(net, LastNormCrossEntropy(5).double()), "model.aux")


def test_an_attribute_of_a_module_outside_of_the_model():
    class Task(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(lambda _, y: vars(self).update(aux=y.square().mean()))

        def loss(self, out: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(out, targets) + self.aux

    task = Task()
    refused(task.net, task.loss, "self.aux")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_losses():
    net = network()
    refused(net, torch.compile(plus(lambda: net.aux), backend="eager"), "model.aux")
    loss_fn = torch.compile(lambda out, t: F.cross_entropy(out, t), backend="eager", fullgraph=True)
    check_exact(network(), loss_fn, *batch(8), micro_batch=3)  # the network keeps something that nobody reads


def test_without_a_last_norm_if_the_loss_sees_the_whole_batch():
    net = network(last_norm=False)
    notes = refused(net, lambda out, _: F.cross_entropy(out @ out.T, torch.arange(len(out))) + net.aux, "model.aux")
    assert any("loss_fn must see the whole batch" in note for note in notes)
    refused(net, plus(lambda: net.aux), "model.aux", loss_in_pieces=False)


def compare(net: nn.Module, loss_of: Callable[[nn.Module], Callable], **how: object) -> None:
    """Compare with the whole batch, where the loss reads from the model."""
    whole, (x, y) = copy.deepcopy(net), batch(8)
    loss = loss_of(whole)(whole(x), y)
    loss.backward()
    for _ in range(2):  # in the second step there is something from the first
        net.zero_grad()
        value = backward(net, loss_of(net), x, y, micro_batch=3, **how)
        assert relative_error(net, whole) <= EXACT
        torch.testing.assert_close(value, loss.detach())


def test_in_one_pass_the_user_says_that_it_is_a_mean():
    compare(network(last_norm=False), lambda net: plus(lambda: net.aux), loss_in_pieces=True)
    net = network(lambda net, y: vars(net).update(aux=y.mean(0).square().sum()), last_norm=False)  # no mean
    assert any("cannot be decided" in note for note in refused(net, plus(lambda: net.aux), "model.aux"))


class TwoKeep(AveragedHeads):
    """Something follows the heads, so that it runs once more for each micro-batch."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.aux = out.square().mean() + self.fc.weight.square().sum()
        return out


def test_in_pieces_it_is_right_or_refused():
    net = network()
    refused(net, plus(lambda: net.aux), "model.aux", loss_in_pieces=True)
    tail = network(make=AveragedHeads, run_as=TwoKeep)
    refused(tail, plus(lambda: tail.aux), "model.aux")  # the whole batch
    in_pieces = network(make=AveragedHeads, run_as=TwoKeep)
    compare(in_pieces, lambda net: plus(lambda: net.aux), loss_in_pieces=True)


def test_an_attribute_of_the_second_pass_only():
    net = network(lambda net, y: in_attribute(net, y) if torch.is_grad_enabled() else None)
    net.aux = 0.0
    with pytest.raises(MicroBatchError, match=r"the loss of micro-batch 0 .* differed .* the second time"):
        backward(net, plus(lambda: net.aux), *batch(8), micro_batch=3, loss_in_pieces=True)


class Moving:
    """A loss with a state of its own, which it reads and writes."""

    def __init__(self) -> None:
        self.mean = torch.ones((), dtype=torch.float64)

    def __call__(self, out: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(out, targets) * self.mean.clone()
        self.mean.mul_(0.9)
        return loss


def keep_much(net: nn.Module, y: Tensor) -> None:
    """Keep features, and what the loss may read: parameters, and an attribute that was there before."""
    in_attribute(net, y)
    in_list_of_child(net, y)
    in_global(net, y)
    net.used = [net.fc.weight, net.constant]


@pytest.mark.parametrize("how", [{}, {"loss_in_pieces": True}, {"loss_in_pieces": False}, {"return_outputs": True}])
@pytest.mark.parametrize("last_norm", [True, False])
def test_who_only_keeps_it_is_not_refused(last_norm, how):
    net = network(last_norm=last_norm)
    net.constant = torch.ones(12, dtype=torch.float64)
    net.keep = keep_much
    check_exact(net, F.cross_entropy, *batch(8), micro_batch=3, **how)
    if "return_outputs" not in how:
        net.aux, net.drop.losses = None, []  # with a graph, which cannot be copied
        net.zero_grad()
        compare(net, lambda net: plus(lambda: (net.used[0] * net.used[1]).square().sum() + len(net.drop.losses)), **how)


def test_a_loss_with_a_state_of_its_own():
    for last_norm in (True, False):
        net = network(last_norm=last_norm)
        whole, loss_fn = copy.deepcopy(net), Moving()
        x, y = batch(8)
        Moving()(whole(x), y).backward()
        backward(net, loss_fn, x, y, micro_batch=3, loss_in_pieces=False)
        assert relative_error(net, whole) <= EXACT
    with pytest.raises(MicroBatchError, match=r"keeps a state outside of modules.*loss_in_pieces=False"):
        backward(net, loss_fn, x, y, micro_batch=3)  # to compare it has moved its state


def test_a_loss_that_runs_the_model_itself():
    net = network()
    x, y = batch(8)
    backward(net, lambda out, t: F.cross_entropy(out, t) + net(x).mean() * 0 + net.aux, x, y, micro_batch=3)
    assert gradient(net).isfinite().all()


def test_nothing_is_kept_alive():
    net = network()
    left = LeftBehind(net, plus(lambda: net.aux))
    net.aux = torch.ones(3)
    before = weakref.ref(net.aux)
    left.begin()
    net.aux = torch.zeros(3)
    assert before() is None
    after = weakref.ref(net.aux)
    left.find()
    net.aux = None
    assert after() is None
