"""Appendix C: centring once is enough, the scalar of a residual branch folds into its layer; and other claims that need
no training: exact micro-batches, a last BN inside the loss.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from mimicnorm import memory, microbatch, models
from mimicnorm.layers import Reweighted
from mimicnorm.methods import LastBN, Method, MimicNorm, NoNorm, WeightMean
from mimicnorm.paper.scales import Runs, Setting
from mimicnorm.surgery.convert import convert

STEPS = 20


def rows(_runs: Runs, _setting: Setting) -> list[dict[str, Any]]:
    """Return one row per measurement: its name and value."""
    measured = {**_folded_scalar(), **_trajectories(), **_micro_batches(), **_folded_last_norm()}
    return [{"name": name, "value": value} for name, value in measured.items()]


def _folded_scalar() -> dict[str, float]:
    """Peaks of a ResNet-50 step at batch 256 over BatchNorm's: scalars in the weights, and on the activations."""
    shape = (256, 3, 224, 224)
    model = models.build("resnet50")
    ours = convert(model, MimicNorm.paper(), example=(2, 3, 224, 224), init=None)
    apart = copy.deepcopy(ours)
    for layer in list(apart.modules()):
        if isinstance(layer, Reweighted) and layer.residual_scale is not None:
            scale, layer.residual_scale = layer.residual_scale, None
            layer.register_forward_hook(lambda _module, _args, output, s=scale: output * s)
            layer.register_parameter("branch_scale", scale)  # pyrefly: ignore
    base = memory.measure(model, shape).peak_bytes
    return {
        "peak over BatchNorm, scalars folded": memory.measure(ours, shape).peak_bytes / base,
        "peak over BatchNorm, scalars not folded": memory.measure(apart, shape).peak_bytes / base,
    }


def _trajectories() -> dict[str, float]:
    """How far the effective weights are apart after SGD with momentum and weight decay, in fp64, relative."""
    both = _trained(_small(WeightMean(centre="forward", residual=None))[0])  # the gradient of centring centres, too
    backward = _trained(_small(WeightMean(centre="backward", residual=None))[0])
    forward = _trained(_forward_only())
    return {
        f"centring backward alone, difference to both after {STEPS} steps": _distance(both, backward),
        f"centring forward alone, difference to both after {STEPS} steps": _distance(both, forward),
    }


class _Centred(nn.Module):
    """W - mean W, with the gradient of W: weight mean without backpropagation through it."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight - weight.detach().mean((1, 2, 3), keepdim=True)


def _forward_only() -> nn.Module:
    """Return the network that weight mean centres, with plain layers whose weights are centred in the forward alone."""
    centred, _, _ = _small(WeightMean(centre="forward", residual=None))
    plain, _, _ = _small(NoNorm())
    plain.load_state_dict(centred.state_dict())
    for name, layer in centred.named_modules():
        if isinstance(layer, Reweighted):
            parametrize.register_parametrization(plain.get_submodule(name), "weight", _Centred(), unsafe=True)
    return plain


def _trained(model: nn.Module) -> list[torch.Tensor]:
    """Return the weights that convolutions apply after some steps of SGD with momentum and weight decay."""
    _, x, y = _small(NoNorm())
    layers: list[Any] = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    applied = [m.effective_weight() if isinstance(m, Reweighted) else m.weight for m in layers]
    return [weight.detach() for weight in applied]


def _distance(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """Return the relative difference of all numbers together: before a last BN a bias has only rounding as gradient."""
    flat = [torch.cat([t.flatten() for t in tensors]) for tensors in (a, b)]
    return float((flat[0] - flat[1]).norm() / flat[0].norm())


def _micro_batches() -> dict[str, float]:
    """The gradient of 16 samples from micro-batches of one, against that of the whole batch, in fp64."""
    model, x, y = _small(MimicNorm.paper())
    F.cross_entropy(model(x), y).backward()
    whole = _gradients(model)
    model.zero_grad()
    microbatch.backward(model, F.cross_entropy, x, y, micro_batch=1)
    return {"gradient from micro-batches of one, relative error": _distance(whole, _gradients(model))}


def _folded_last_norm() -> dict[str, float]:
    """The gradient with a last BN in the loss, against that with one in the network, in fp64."""
    inside, x, y = _small(LastBN(logit_scale=False))
    outside, _, _ = _small(NoNorm())
    F.cross_entropy(inside(x), y).backward()
    loss_fn = microbatch.LastNormCrossEntropy(10, logit_scale=False).double()
    loss_fn(outside(x), y).backward()
    return {"gradient with the last BN in the loss, relative error": _distance(_gradients(inside), _gradients(outside))}


def _small(method: Method) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return a converted ResNet-10 of a quarter of its width in fp64, and a batch; the same ones every time."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = models.build("resnet10", input="cifar", num_classes=10, width=0.25).double()
        model = convert(model, method, example=(2, 3, 16, 16))
        return model, torch.randn(16, 3, 16, 16, dtype=torch.float64), torch.randint(10, (16,))


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]
