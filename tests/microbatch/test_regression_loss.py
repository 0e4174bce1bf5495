"""A regression loss through a last BN is a warning, in plain training and in micro-batches."""

from __future__ import annotations

import functools
import gc
import threading
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from whole_and_parts import AveragedHeads, Classifier, Pooled, SavedBytes, Segmenter, WithFeatures, batch, converted

from mimicnorm.layers import LastNorm
from mimicnorm.microbatch import RegressionLossWarning, backward

VALUES = torch.rand(8, 5, dtype=torch.float64)
REGRESSIONS = {
    "mean square error": [
        *(F.mse_loss, nn.MSELoss(), functools.partial(F.mse_loss, reduction="sum")),
        lambda out, t: 0.5 * F.mse_loss(out[:, 1:3], t[:, 1:3]) + 0.1,
        lambda out, t: F.mse_loss(t.float(), out.float()),
    ],
    "L1": [F.l1_loss, nn.L1Loss(), lambda out, t: (t - out).abs().sum(1).mean()],
    "smooth L1": [F.smooth_l1_loss, nn.SmoothL1Loss(), lambda out, t: F.smooth_l1_loss(3 * out + 1, t).sqrt()],
    "Huber": [F.huber_loss, nn.HuberLoss(delta=2.0)],
    "squared difference": [
        *(lambda out, t: (out - t).pow(2).mean(), lambda out, t: ((out - t) ** 2).mean()),
        *(lambda out, t: (1 - out).square().mean(), lambda out, t: (out - t).float().square().mean()),
    ],
}
CLASSES = torch.arange(8) % 5
OTHERS = [
    lambda out, t: F.cross_entropy(out, CLASSES),
    lambda out, t: F.mse_loss(out.softmax(1), t),  # Brier's score
    lambda out, t: F.l1_loss(out.sigmoid(), t),
    lambda out, t: F.mse_loss(out.log_softmax(1).exp(), t),
    lambda out, t: F.mse_loss(out.exp() / out.exp().sum(1, keepdim=True), t),
    lambda out, t: F.mse_loss(out, out.flip(0)),  # consistency
    lambda out, t: (out - out.mean(0)).square().mean(),
    lambda out, t: out.square().mean() + out.abs().mean(),  # penalties
    lambda out, t: (out - t).pow(3).mean(),
    lambda out, t: F.binary_cross_entropy_with_logits(out, t),
    lambda out, t: F.cross_entropy(out, CLASSES) + F.mse_loss(t.clone().requires_grad_(), t),  # elsewhere
    lambda out, t: F.mse_loss(F.linear(out, torch.ones(3, 5).to(out)), t[:, :3]),  # behind another layer
]


def plain(net: nn.Module, loss_fn, x: Tensor, targets: Tensor) -> None:
    loss_fn(net(x), targets).backward()


def accumulated_by_grad(net: nn.Module, loss_fn, x: Tensor, targets: Tensor) -> None:
    torch.autograd.grad(loss_fn(net(x), targets), list(net.parameters()), allow_unused=True)


def scaled(net: nn.Module, loss_fn, x: Tensor, targets: Tensor) -> None:
    torch.amp.GradScaler("cpu").scale(loss_fn(net(x), targets)).backward()


whole = functools.partial(backward, micro_batch=3)
in_pieces = functools.partial(backward, micro_batch=4, loss_in_pieces=True)
WAYS = {"plain": plain, "grad": accumulated_by_grad, "scaler": scaled, "whole": whole, "in pieces": in_pieces}


@pytest.mark.parametrize(
    ("kind", "loss_fn", "way"),
    [
        *((kind, loss, way) for kind, losses in REGRESSIONS.items() for loss in losses for way in ("plain", "whole")),
        *(("L1", F.l1_loss, way) for way in ("grad", "scaler", "in pieces")),
    ],
)
def test_a_regression_loss_warns_once(kind, loss_fn, way):
    net = converted(Classifier())
    x, _ = batch(8)
    head = r"LastNorm of 5 outputs" if way in ("plain", "grad", "scaler") else "fc"
    with pytest.warns(RegressionLossWarning, match=rf"^{head}: a regression loss \({kind}\).*last_norm=False") as given:
        WAYS[way](net, loss_fn, x, VALUES)
    assert len(given) == 1
    net.zero_grad()
    WAYS[way](net, loss_fn, x, VALUES)  # warnings are errors here: a second one would raise


@pytest.mark.parametrize("way", ["plain", "whole"])
@pytest.mark.parametrize("loss_fn", OTHERS)
def test_other_losses_do_not_warn(loss_fn, way):
    WAYS[way](converted(Classifier()), loss_fn, batch(8)[0], VALUES)


@pytest.mark.parametrize("way", ["plain", "whole"])
def test_where_the_outputs_pass_by_or_go_on(way):
    x, y = batch(8)

    def features(out: tuple, targets: Tensor) -> Tensor:
        return F.cross_entropy(out[0], targets) + F.mse_loss(out[1], torch.zeros_like(out[1]))

    WAYS[way](converted(WithFeatures()), features, x, y)  # a loss of features is none of the head's
    for make, loss_fn in (
        *((AveragedHeads, F.mse_loss), (Pooled, F.mse_loss)),
        (Segmenter, lambda out, t: F.l1_loss(out["aux"].mean((2, 3)), t[:, :4])),
    ):
        with pytest.warns(RegressionLossWarning) as given:
            WAYS[way](converted(make()), loss_fn, x, VALUES)
        assert len(given) == (2 if make is AveragedHeads else 1)

    class Probabilities(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).softmax(1)

    WAYS[way](converted(Classifier(), run_as=Probabilities), F.mse_loss, x, VALUES)


def test_without_a_last_norm_nothing_warns():
    x, _ = batch(8)
    for net in (converted(Classifier(), last_norm=False), converted(Classifier()).eval()):
        plain(net, F.mse_loss, x, VALUES)
        backward(net, F.mse_loss, x, VALUES, micro_batch=3)


def test_the_last_norm_of_a_loss_warns_too():
    norm = LastNorm(5).double()
    with pytest.warns(RegressionLossWarning):
        backward(nn.Linear(5, 5).double(), lambda out, t: F.mse_loss(norm(out), t), VALUES, VALUES, micro_batch=3)


def test_it_is_looked_at_from_another_thread():
    """On accelerators hooks run in a thread of the engine's; here the backward pass is not in the main thread."""
    net = converted(Classifier())
    loss = F.mse_loss(net(batch(8)[0]), VALUES)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert [w.category for w in given] == [RegressionLossWarning]


def test_only_the_first_backward_pass_is_looked_at(monkeypatch):
    looks: list[int] = []
    monkeypatch.setattr("mimicnorm.layers.last_norm.losses_under_way", lambda: looks.append(1) or [])
    net = converted(Classifier())
    for _ in range(3):
        net.zero_grad()
        plain(net, F.mse_loss, batch(8)[0], VALUES)
    assert len(looks) == 1


def test_a_graph_that_is_never_used_is_freed():
    net = nn.Sequential(nn.Linear(5, 5), LastNorm(5)).double()
    with (saved := SavedBytes([*net.parameters()])):
        out = net(VALUES.clone())
    assert saved.now > 0
    del out
    gc.collect()
    assert saved.now == 0


def test_a_look_at_the_loss_keeps_nothing_alive():
    net = nn.Sequential(nn.Linear(3, 4), LastNorm(4))
    gc.collect()
    gc.disable()
    try:
        loss = F.cross_entropy(net(torch.randn(8, 3)), torch.arange(8) % 4)
        alive = weakref.ref(loss)
        loss.backward()
        del loss
        assert alive() is None
    finally:
        gc.enable()
