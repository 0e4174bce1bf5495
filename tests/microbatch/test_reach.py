"""What a loss can refer to is found, and has a name."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mimicnorm.microbatch.reach import modules_in, reached

LOSS = nn.CrossEntropyLoss()


def by_a_global_name(out: Tensor, targets: Tensor) -> Tensor:
    return LOSS(out, targets)


class Trainer:
    """No module itself."""

    def __init__(self) -> None:
        self.criterion = nn.Sequential(LOSS)

    def loss(self, out: Tensor, targets: Tensor) -> Tensor:
        return self.criterion[0](out, targets)

    def __call__(self, out: Tensor, targets: Tensor) -> Tensor:
        return self.loss(out, targets)


def test_the_modules_of_a_loss_are_found():
    trainer = Trainer()
    inside = [LOSS]
    for loss_fn in (
        *(LOSS, LOSS.forward, functools.partial(LOSS), by_a_global_name, functools.partial(by_a_global_name)),
        *(
            lambda out, t: by_a_global_name(out, t),
            lambda out, t: inside[0](out, t),
            lambda out, t, loss=LOSS: loss(out, t),
        ),
        *(lambda out, t: [LOSS(out, x) for x in t], torch.compile(LOSS, backend="eager")),
    ):
        assert LOSS in modules_in(loss_fn), loss_fn
    assert modules_in(trainer) == modules_in(trainer.loss) == [trainer.criterion, LOSS]
    assert modules_in(F.cross_entropy) == []


def test_things_have_the_names_that_lead_to_them():
    kept = {"stem": [torch.zeros(1)], "long": list(range(100)), LOSS: 3.5}

    def loss_fn(out: Tensor, targets: Tensor, scale: float = 2.5) -> Tensor:
        return LOSS(out, targets) * kept["stem"][0] * scale

    names = dict(reached([("loss_fn", functools.partial(loss_fn, scale=1.5))]))
    assert names["kept['stem'][0]"] is kept["stem"][0]
    assert names["LOSS"] is LOSS
    assert names["kept[CrossEntropyLoss]"] == 3.5
    assert names["loss_fn.keywords['scale']"] == 1.5
    assert names["loss_fn's default 0"] == 2.5
    assert "kept['long'][0]" not in names


def test_a_circle_ends():
    circle: list = []
    circle.append(circle)
    assert [name for name, _ in reached([("a", circle), ("b", circle)])] == ["a"]
