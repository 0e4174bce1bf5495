"""Per-sample gradients against a loop over samples, in fp64."""

from __future__ import annotations

import copy

import nets
import pytest
import torch
import weight_layers
from opacus import PrivacyEngine
from opacus.grad_sample import GradSampleModule
from torch import Tensor, nn

import mimicnorm as mn
from mimicnorm.layers import Scale, Shift, WeightMeanConv2d, centre_, scale_weight_
from mimicnorm.opacus import prepare_

pytestmark = [
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:Secure RNG turned off"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel"),
]
FAST = GradSampleModule.GRAD_SAMPLERS


def compare(model: nn.Module, x: Tensor, **mode) -> None:
    """Each parameter's per-sample gradients equal those of a network that is given one sample at a time."""
    alone = copy.deepcopy(model)
    (wrapped := GradSampleModule(model, loss_reduction="sum", **mode))(x).square().sum().backward()
    for i in range(len(x)):
        alone.zero_grad()
        alone(x[i : i + 1]).square().sum().backward()
        for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
            if p.requires_grad:
                torch.testing.assert_close(p.grad_sample[i], q.grad, rtol=1e-10, atol=1e-12, msg=name)
    wrapped.remove_hooks()


def perturbed(model: nn.Module) -> nn.Module:
    """Move every parameter from its start, where means and biases are 0 and scalars 1."""
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 + 0.3 * torch.rand_like(p)
    return model


LAYERS = {
    "centred": centre_,
    "centred, scalar": lambda m: centre_(m, weight_layers.parameter(0.7)),
    "gradient centred": lambda m: centre_(m, centring="backward"),
    "gradient centred, scalar": lambda m: centre_(m, weight_layers.parameter(0.7), "backward"),
    "scaled": lambda m: scale_weight_(m, weight_layers.parameter(0.7)),
    "scaled, with its bias": lambda m: scale_weight_(m, weight_layers.parameter(0.7), scales_bias=True),
}
FALLEN_BACK = ("transposed", "transposed grouped", "own forward", "foreign")  # opacus has no sampler for what they do


@pytest.mark.parametrize("name", [n for n in weight_layers.LAYERS if n != "without batch"])
@pytest.mark.parametrize("kind", LAYERS)
def test_layers(kind, name):
    make, shape = weight_layers.LAYERS[name]
    model = nn.Sequential(perturbed(LAYERS[kind](make().double())))
    prepare_(model)
    assert (type(model[0]) in FAST) == (name not in FALLEN_BACK)
    compare(model, torch.randn(shape, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 5), (3, 4, 5, 5)])
@pytest.mark.parametrize("dim", [1, -1])
def test_shift_and_scale(shape, dim):
    bias = lambda: nn.Parameter(torch.randn(shape[dim]))  # noqa: E731
    model = nn.Sequential(
        Shift(bias(), dim), Scale(torch.tensor(0.7), bias(), dim, factor=0.5), Shift(None), Scale(torch.tensor(2.0))
    ).double()
    prepare_(model)
    compare(model, torch.randn(shape, dtype=torch.float64))


@pytest.mark.parametrize("frozen", ["weight", "bias", "residual_scale"])
def test_frozen_parameters(frozen):
    model = nn.Sequential(scale_weight_(nn.Conv2d(4, 6, 3).double(), weight_layers.parameter(0.7), scales_bias=True))
    getattr(model[0], frozen).requires_grad_(False)
    prepare_(model)
    compare(model, torch.randn(2, 4, 5, 5, dtype=torch.float64))


NETWORKS = {
    "plain": (nets.plain, (3, 6, 8, 8)),
    "preact": (nets.preact, (3, 3, 8, 8)),
    "dense": (nets.Dense, (3, 3, 8, 8)),
    "gated": (nets.SqueezeExcite, (3, 3, 8, 8)),
    "resnet18": (lambda: mn.models.build("resnet18", num_classes=5, width=0.125), (3, 3, 16, 16)),
}


@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize("centre", ["forward", "backward"])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name, centre, prepared):
    """Without ``prepare_`` opacus' vmap gives the same gradients."""
    make, shape = NETWORKS[name]
    model = make().double()
    mn.convert_(model, mn.MimicNorm(last_norm=False, min_fan_in=8, centre=centre), example=shape)
    prepare_(perturbed(model))
    x = torch.randn(shape, dtype=torch.float64)
    compare(model, x, **({} if prepared else {"force_functorch": True}))


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_make_private_takes_steps(mode):
    model = nets.preact()
    mn.convert_(model, mn.MimicNorm(last_norm=False, min_fan_in=8), example=(2, 3, 8, 8))
    prepare_(model)
    data = torch.utils.data.TensorDataset(torch.randn(8, 3, 8, 8), torch.arange(8) % 5)
    parts = PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=torch.utils.data.DataLoader(data, batch_size=2),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
    )
    private, optimizer, *criterion, loader = parts
    before = {n: p.detach().clone() for n, p in private.named_parameters()}
    for x, y in loader:  # Poisson sampling: some batches are empty
        optimizer.zero_grad()
        (criterion[0] if criterion else nn.functional.cross_entropy)(private(x), y).backward()
        optimizer.step()
    assert all(not torch.equal(p, before[n]) and p.isfinite().all() for n, p in private.named_parameters())


def test_a_batch_without_samples():
    model = nn.Sequential(centre_(nn.Conv2d(4, 6, 3), nn.Parameter(torch.ones(1))), nn.Flatten(), nn.Linear(54, 2))
    prepare_(model)
    GradSampleModule(model)(torch.empty(0, 4, 5, 5)).sum().backward()
    assert all(p.grad_sample.shape == (0, *p.shape) for p in model.parameters())


def test_a_kept_network_is_refused_by_opacus_and_folds_to_plain_layers():
    model = nets.plain()
    model(torch.randn(9, 6, 8, 8))
    mn.convert_(model, mn.MimicNorm(last_norm=False), example=(2, 6, 8, 8), init="keep")
    prepare_(model)
    with pytest.raises(NotImplementedError, match="buffers"):
        GradSampleModule(model)
    folded = mn.fold(model.eval()).double().train()
    compare(folded, torch.randn(3, 6, 8, 8, dtype=torch.float64))


def test_refusals_name_the_module():
    model = nets.plain()
    with pytest.raises(mn.MimicNormError, match=r"^1: normalises over the batch.*last_norm=False"):
        prepare_(model)
    mn.convert_(model, mn.MimicNorm(), example=(2, 6, 8, 8))
    with pytest.raises(mn.MimicNormError, match=r"^8\.last_norm: normalises"):
        prepare_(model)

    with pytest.raises(mn.MimicNormError, match=r"^1: Opacus computes its gradients as if padded with zeros.*reflect"):
        prepare_(nn.Sequential(nn.ReLU(), nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")))


def test_opacus_is_wrong_about_padding():
    """When this fails, the refusal can go."""
    layer = nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")
    GradSampleModule(nn.Sequential(layer), loss_reduction="sum")(torch.randn(2, 3, 5, 5)).square().sum().backward()
    assert not torch.allclose(layer.weight.grad_sample.sum(0), layer.weight.grad)


def test_a_users_subclass_of_a_converted_class_is_left_to_opacus():
    class Doubled(WeightMeanConv2d):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(Doubled(4, 6, 3).double())
    prepare_(model)
    assert Doubled not in FAST
    compare(model, torch.randn(2, 4, 5, 5, dtype=torch.float64))
