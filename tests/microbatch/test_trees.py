"""Outputs of another structure: put into order where only the order differs, else an error that says what differs."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from whole_and_parts import EXACT, Classifier, batch, check_exact, converted, full_batch, relative_error

from mimicnorm.errors import MicroBatchError
from mimicnorm.microbatch import backward
from mimicnorm.microbatch.trees import leaves


class TwoHeads(Classifier):
    """A dict of two heads, made by ``arrange`` from the logits, an auxiliary output and the number of the call."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> object:
        y = self.body(x).mean((2, 3))
        self.calls = getattr(self, "calls", -1) + 1
        return getattr(self, "arrange", in_order)(self.fc(y), self.second(y), len(x), self.calls)


def in_order(a: Tensor, b: Tensor, *_: int) -> dict:
    return {"a": a, "b": b}


def by_size(a: Tensor, b: Tensor, size: int, _call: int) -> dict:
    return {"a": a, "b": b} if size == 3 else {"b": b, "a": a}


def by_turns(a: Tensor, b: Tensor, _size: int, call: int) -> dict:
    return {"a": a, "b": b} if call % 2 else {"b": b, "a": a}


def nested(a: Tensor, b: Tensor, size: int, _call: int) -> dict:
    inner = OrderedDict(a=a, z=1) if size == 3 else OrderedDict(z=1, a=a)
    outer = [("b", [b]), ("inner", inner)]
    return defaultdict(None, outer if size == 3 else outer[::-1])


def loss_fn(out: dict, targets: Tensor) -> Tensor:
    first, second = (out["inner"]["a"], out["b"][0]) if "inner" in out else (out["a"], out["b"])
    return F.cross_entropy(first, targets) + 3 * F.cross_entropy(second, targets.flip(0) * 0)


MODES = [
    *({"last_norm": True}, {"last_norm": True, "loss_in_pieces": True}, {"last_norm": True, "return_outputs": True}),
    *(
        {"last_norm": False},
        {"last_norm": False, "return_outputs": True},
        {"last_norm": False, "loss_in_pieces": False},
    ),
]


@pytest.mark.parametrize("arrange", [by_size, by_turns, nested])
@pytest.mark.parametrize("mode", MODES)
def test_keys_in_another_order_are_put_in_order(arrange, mode):
    net = converted(TwoHeads(), last_norm=mode["last_norm"])
    net.arrange = arrange
    check_exact(net, loss_fn, *batch(8), micro_batch=3, **{k: v for k, v in mode.items() if k != "last_norm"})


Pair = namedtuple("Pair", ["a", "b"])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            lambda a, _b: {"a": a},
            r"output\['b'\] is in the first micro-batch, but not in micro-batch 2 \(samples 6 to 7\)",
        ),
        (lambda a, b: {"a": a, "b": b, "c": a}, r"output\['c'\] is in micro-batch 2 .*, but not in the first"),
        (lambda a, b: {"a": a, "b": [b]}, r"output\['b'\] is in the first micro-batch, but not in micro-batch 2"),
        (lambda a, b: (a, b), r"output\['a'\] is in the first micro-batch, but not in micro-batch 2"),
        (lambda a, b: Pair(a, b), r"output\['a'\] is in the first micro-batch, but not in micro-batch 2"),
    ],
)
@pytest.mark.parametrize("last_norm", [True, False])
def test_another_structure_says_what_differs(other, message, last_norm):
    net = converted(TwoHeads(), last_norm=last_norm)
    net.arrange = lambda a, b, size, _call: {"a": a, "b": b} if size == 3 else other(a, b)
    x, y = batch(8)
    with pytest.raises(MicroBatchError, match=message):
        backward(net, lambda out, t: F.cross_entropy(out["a"], t), x, y, micro_batch=3, return_outputs=True)


@pytest.mark.parametrize("how", [{}, {"loss_in_pieces": True}])
def test_another_structure_when_a_micro_batch_runs_again(how):
    net = converted(TwoHeads())
    net.calls = -1
    net.arrange = lambda a, b, _size, call: {"a": a, "b": b} if call < 4 else {"a": a, "b": (b,)}
    x, y = batch(8)
    with pytest.raises(
        MicroBatchError,
        match=r"(?s)output\['b'\] is in .*micro-batch.*, but not in micro-batch 1 .* ran again.*clear them",
    ):
        backward(net, lambda out, t: F.cross_entropy(out["a"], t), x, y, micro_batch=3, **how)


def test_structures_that_nobody_puts_together_may_differ():
    """A detector's list of one dict per image, as long as the micro-batch."""

    class PerImage(Classifier):
        def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
            return [{"scores": row} for row in super().forward(x)]

    def per_image(out: list[dict[str, Tensor]], targets: Tensor) -> Tensor:
        return torch.stack([F.cross_entropy(o["scores"], t) for o, t in zip(out, targets, strict=True)]).mean()

    check_exact(converted(Classifier(), run_as=PerImage, last_norm=False), per_image, *batch(8), micro_batch=3)


@pytest.mark.parametrize("value", [0.5, "warm", torch.tensor([1.0]).numpy()])
def test_a_value_for_all_samples_has_to_be_the_same(value):
    net = converted(TwoHeads())
    net.arrange = lambda a, b, size, _call: {"a": a, "b": b, "scale": value if size == 3 else value * 2}
    x, y = batch(8)
    with pytest.raises(
        MicroBatchError, match=r"output 2 of the model is .* in the first micro-batch and .* in micro-batch 2"
    ):
        backward(net, lambda out, t: F.cross_entropy(out["a"], t), x, y, micro_batch=3)
    assert all(p.grad is None for p in net.parameters())


class Output(dict):
    """A dict with attributes of its own, which torch's pytree takes for a single value."""

    def __init__(self, **items: Tensor):
        super().__init__(**items)
        self.source = "kept"


class Attributes(dict):
    """A dict whose items are its attributes."""

    def __init__(self, **items: Tensor):
        super().__init__(**items)
        self.__dict__ = self


@dataclass
class Record:
    """A dataclass, with an attribute that is no field."""

    a: Tensor
    b: Tensor
    nothing: None = None

    def __post_init__(self) -> None:
        self.doubled = 2 * self.a


@dataclass(frozen=True, slots=True)
class Frozen:
    a: Tensor
    b: Tensor
    swapped: tuple = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "swapped", (self.b, self.a))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [Output, Attributes, SimpleNamespace, Record, Frozen])
def test_dicts_of_other_classes_namespaces_and_dataclasses(kind, mode):
    def total(out: object, targets: Tensor) -> Tensor:
        a, b = (out["a"], out["b"]) if kind is Output else (out.a, out.b)
        return F.cross_entropy(a, targets) + 3 * F.cross_entropy(b, targets * 0)

    net = converted(TwoHeads(), last_norm=mode["last_norm"])
    net.arrange = lambda a, b, *_: kind(a=a, b=b)
    x, y = batch(8)
    whole = copy.deepcopy(net)
    expected = whole(x)
    total(expected, y).backward()
    made = backward(net, total, x, y, micro_batch=3, **{k: v for k, v in mode.items() if k != "last_norm"})
    assert relative_error(net, whole) <= EXACT
    if mode.get("return_outputs"):
        assert type(made[1]) is kind
        assert kind is not Output or made[1].source == "kept"
        assert kind is not Record or torch.equal(made[1].doubled, 2 * made[1].a)
        assert kind is not Frozen or torch.equal(made[1].swapped[1], made[1].a)
        torch.testing.assert_close(leaves(made[1]), [t if t is None else t.detach() for t in leaves(expected)])


def test_dataclasses_as_targets_are_cut_and_joined():
    x, y = batch(8)
    for last_norm in (True, False):
        net, targets = converted(Classifier(), last_norm=last_norm), Record(y, y.double())
        check_exact(net, lambda out, t: F.cross_entropy(out, t.a), x, targets, micro_batch=3)
    loader = [(x[:3], Record(y[:3], y[:3])), (x[3:], Record(y[3:], y[3:]))]
    net = converted(Classifier())
    whole, _ = full_batch(net, F.cross_entropy, x, y)
    backward(net, lambda out, t: F.cross_entropy(out, t.a), loader)
    assert relative_error(net, whole) <= EXACT


def test_an_output_without_tensors_says_what_may_be_returned():
    net = converted(TwoHeads())
    net.arrange = lambda *_: object()
    with pytest.raises(
        MicroBatchError, match=r"returned a object without tensors .*dict, dataclass or SimpleNamespace"
    ):
        backward(net, lambda out, t: F.cross_entropy(out.a, t), *batch(8), micro_batch=3)
