"""Small networks of every kind that matters here, and the two ways to a gradient that are compared."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mimicnorm as mn
from mimicnorm.layers import LastNorm
from mimicnorm.microbatch import backward
from mimicnorm.microbatch.trees import leaves

EXACT = 1e-12


def body(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Dropout2d(dropout),
        nn.Conv2d(8, 12, 3, stride=2, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(inplace=True),
    )


class Classifier(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.body = body(dropout)
        self.drop = nn.Dropout(dropout)
        self.fc = nn.Linear(12, 5)

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        y = self.body(x).mean((2, 3))
        return self.fc(self.drop(y if shift is None else y + shift))


class AveragedHeads(Classifier):
    """The mean of two heads: a tail after two LastNorms."""

    def __init__(self, dropout: float = 0.0):
        super().__init__(dropout)
        self.second = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x).mean((2, 3))
        return self.tail(x, self.fc(y), self.second(self.drop(y)))

    def tail(self, _x: Tensor, *heads: Tensor) -> Tensor:
        return sum(heads) / 2


class Chained(AveragedHeads):
    """A head behind a head."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x).mean((2, 3))
        return self.second(y + self.fc(y).mean(1, keepdim=True))


class Counts(Classifier):
    """State outside of buffers."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x * torch.linspace(1, 2 + self.calls, 9, dtype=x.dtype))


class Segmenter(nn.Module):
    """A 1x1 convolution as the head, upsampled; an auxiliary head; a dict out."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = body(dropout)
        self.head = nn.Conv2d(12, 4, 1)
        self.auxiliary = nn.Conv2d(12, 4, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.body(x)
        return self.tail(x, self.head(y), self.auxiliary(y))

    def tail(self, x: Tensor, *heads: Tensor) -> dict[str, Tensor]:
        up = [F.interpolate(h, x.shape[2:], mode="bilinear") for h in heads]
        return {"out": up[0], "aux": up[1]}


class Pooled(nn.Module):
    """A 1x1 convolution as the head, pooled after it, with a learnt temperature behind the LastNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.body = body()
        self.head = nn.Conv2d(12, 5, 1)
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).mean((2, 3)).mul_(self.temperature)


class WithFeatures(Classifier):
    """Logits and, past the LastNorm, the features they came from."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, None]:
        y = self.body(x).mean((2, 3))
        return self.fc(y), y, None


class Tempered(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.3, dtype=torch.float64))

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits * self.temperature, targets)


class SharedHead(Classifier):
    """One head for two views, each with statistics of its own."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.body(x)
        return self.fc(y.mean((2, 3))), self.fc(y.amax((2, 3)))


def dict_loss(out: dict[str, Tensor], targets: Tensor) -> Tensor:
    return F.cross_entropy(out["out"], targets) + 0.4 * F.cross_entropy(out["aux"], targets)


def feature_loss(out: tuple, targets: Tensor) -> Tensor:
    return F.cross_entropy(out[0], targets) + 0.1 * out[1].square().mean()


def two_view_loss(out: tuple, targets: Tensor) -> Tensor:
    return F.cross_entropy(out[0], targets) + F.cross_entropy(out[1], targets)


def converted(
    net: nn.Module, dtype: torch.dtype = torch.float64, run_as: type | None = None, **method: object
) -> nn.Module:
    """Convert a network; ``run_as`` is a subclass whose forward it runs from then on."""
    net = net.to(dtype)
    mn.convert_(net, mn.MimicNorm(**method), example=torch.zeros(2, 3, 9, 9, dtype=dtype), init="theory")
    net.__class__ = run_as or type(net)
    return scaled(net)


def scaled(module: nn.Module) -> nn.Module:
    """Move every logit scale away from 1, where a forgotten one would not show."""
    for norm in module.modules():
        if isinstance(norm, LastNorm) and norm.logit_scale is not None:
            nn.init.constant_(norm.logit_scale, 1.7)
    return module


def batch(n: int = 32, dtype: torch.dtype = torch.float64, classes: int = 5) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(n, 3, 9, 9, generator=g, dtype=dtype), torch.randint(classes, (n,), generator=g)


def one_graph(net: nn.Module, loss_fn: Callable, x: Tensor, y: Tensor, micro_batch: int) -> Tensor:
    """Backward through one graph over the same micro-batches: dropout draws what it draws for each of them."""
    raw: dict[LastNorm, list[Tensor]] = {m: [] for m in net.modules() if isinstance(m, LastNorm)}
    for norm, kept in raw.items():
        norm.intercept = lambda logits, kept=kept: kept.append(logits) or logits
    for part in x.split(micro_batch):
        net(part)
    for norm in raw:
        norm.intercept = None
    normed = [norm(torch.cat(kept)) for norm, kept in raw.items()]
    loss = loss_fn(net.tail(x, *normed) if hasattr(net, "tail") else normed[0], y)
    loss.backward()
    return loss.detach()


def full_batch(net: nn.Module, loss_fn: Callable, x: object, y: object) -> tuple[nn.Module, Tensor]:
    """A copy of the network with the gradient of the whole batch, and the loss."""
    whole = copy.deepcopy(net)
    loss = loss_fn(whole(x), y)
    loss.backward()
    return whole, loss.detach()


def check_exact(net: nn.Module, loss_fn: Callable, x: Tensor, y: object, allowed: float = EXACT, **how: object) -> None:
    """Compare gradient, loss, statistics and outputs of ``backward`` with those of the whole batch."""
    expected = copy.deepcopy(net)(x) if how.get("return_outputs") else None
    whole, loss = full_batch(net, loss_fn, x, y)
    made = backward(net, loss_fn, x, y, **how)
    value, outputs = made if how.get("return_outputs") else (made, None)
    assert relative_error(net, whole) <= allowed
    assert not any(isinstance(t, Tensor) and t.requires_grad for t in leaves((value, outputs)))
    torch.testing.assert_close(value, loss)
    torch.testing.assert_close(state(net), state(whole))
    torch.testing.assert_close(outputs, expected)
    assert [p.requires_grad for p in net.parameters()] == [p.requires_grad for p in whole.parameters()]


def check_replay(net: nn.Module, loss_fn: Callable, x: Tensor, y: object, micro_batch: int, **how: object) -> nn.Module:
    """Compare ``backward`` with one graph over the same micro-batches and random numbers; return the latter."""
    reference, after = copy.deepcopy(net), []
    for run in (
        lambda: one_graph(reference, loss_fn, x, y, micro_batch),
        lambda: backward(net, loss_fn, x, y, micro_batch=micro_batch, **how),
    ):
        torch.manual_seed(5), random.seed(5), np.random.seed(5)
        run()
        after.append((torch.rand(()).item(), random.random(), np.random.rand()))
    assert relative_error(net, reference) <= EXACT
    assert after[0] == after[1], "random numbers go on as after one pass"
    return reference


def gradient(*modules: object) -> Tensor:
    """The gradients of the modules among the arguments, as one vector."""
    parameters = [p for m in modules if isinstance(m, nn.Module) for p in m.parameters() if p.requires_grad]
    return torch.cat([p.grad.flatten().double() for p in parameters])


def relative_error(net: nn.Module, reference: nn.Module) -> float:
    right = gradient(reference)
    return float((gradient(net) - right).norm() / right.norm())


def state(*modules: object) -> Tensor:
    """All buffers of the modules among the arguments, as one vector."""
    buffers = [b for m in modules if isinstance(m, nn.Module) for b in m.buffers()]
    return torch.cat([torch.empty(0, dtype=torch.float64), *(b.flatten().double() for b in buffers)])


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Bytes that autograd keeps for the backward pass, parameters and the data apart, and their peak."""

    def __init__(self, not_counted: list[Tensor]):
        self.apart = {t.untyped_storage().data_ptr() for t in not_counted}
        self.users: dict[int, int] = {}
        self.now = self.peak = 0
        super().__init__(lambda t: _Kept(self, t), lambda kept: kept.tensor)


class _Kept:
    def __init__(self, count: SavedBytes, tensor: Tensor):
        storage = tensor.untyped_storage()
        self.count, self.tensor = count, tensor
        self.key, self.size = storage.data_ptr(), storage.nbytes()
        if self.key in count.apart:
            self.size = 0
        if count.users.setdefault(self.key, 0) == 0:
            count.now += self.size
            count.peak = max(count.peak, count.now)
        count.users[self.key] += 1

    def __del__(self) -> None:
        self.count.users[self.key] -= 1
        if self.count.users[self.key] == 0:
            self.count.now -= self.size
