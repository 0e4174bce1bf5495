"""Centring in the forward pass and in the backward pass: the same steps, however gradients are taken."""

from __future__ import annotations

import copy
import pickle

import nets
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from weight_layers import LAYERS, parameter, saved_bytes

import mimicnorm as mn
from mimicnorm.layers import OFF_CENTRE, WeightMean, centre_, weight_mean

every_layer = pytest.mark.parametrize("name", LAYERS)
both_ends = pytest.mark.parametrize("scaled", [False, True])


def pair(name: str, scaled: bool) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """A layer centred in its forward, its twin that centres its gradient, an input."""
    make, shape = LAYERS[name]
    forward = centre_(make().double(), parameter(0.7) if scaled else None)
    forward.project_()
    backward = copy.deepcopy(forward)
    backward.centring = "backward"
    return forward, backward, torch.randn(shape, dtype=torch.float64)


def gradients(layer: nn.Module, x: torch.Tensor, create_graph: bool = False) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(layer(x).pow(3).sum(), list(layer.parameters()), create_graph=create_graph)


# -- one layer ---------------------------------------------------------------------------------------------------


@every_layer
@both_ends
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_output_and_gradients_of_the_layer_that_centres_forward(name, scaled, large, monkeypatch):
    monkeypatch.setattr(weight_mean, "LARGE", 0 if large else weight_mean.LARGE)
    forward, backward, x = pair(name, scaled)
    torch.testing.assert_close(backward(x), forward(x))
    torch.testing.assert_close(gradients(backward, x), gradients(forward, x))
    for layer in (forward, backward):
        for _ in range(2):  # accumulated
            layer(x).pow(3).sum().backward()
    torch.testing.assert_close([p.grad for p in backward.parameters()], [p.grad for p in forward.parameters()])


def test_nothing_is_centred_in_the_forward_pass():
    _, layer, x = pair("conv2d", scaled=False)
    with torch.no_grad():
        layer.weight += 1.0
    torch.testing.assert_close(layer(x), F.conv2d(x, layer.weight, layer.bias, layer.stride, layer.padding))
    assert gradients(layer, x)[0].mean((1, 2, 3)).abs().max() < 1e-12


def test_a_scalars_gradient_sees_the_means_that_the_weight_has():
    _, layer, x = pair("conv2d", scaled=True)
    with torch.no_grad():
        layer.weight += 1.0
    weight, bias, scale = (p.detach().requires_grad_() for p in layer.parameters())
    plain = F.conv2d(x, scale * weight, bias, layer.stride, layer.padding)
    expected = torch.autograd.grad(plain.pow(3).sum(), (weight, bias, scale))
    centred = expected[0] - expected[0].mean((1, 2, 3), keepdim=True)
    torch.testing.assert_close(gradients(layer, x), (centred, *expected[1:]))


@both_ends
@pytest.mark.parametrize("large", [False, True])
def test_second_derivatives(scaled, large, monkeypatch):
    monkeypatch.setattr(weight_mean, "LARGE", 0 if large else weight_mean.LARGE)
    layers = pair("conv2d", scaled)
    hessians = []
    for layer in layers[:2]:
        first = gradients(layer, layers[2], create_graph=True)
        hessians.append(torch.autograd.grad(sum(g.square().sum() for g in first), list(layer.parameters())))
    torch.testing.assert_close(hessians[1], hessians[0])


@both_ends
@pytest.mark.filterwarnings("ignore")
def test_functorch_functional_call_and_compiled(scaled):
    forward, backward, x = pair("conv2d", scaled)
    expected = gradients(forward, x)
    p = {k: v.detach() for k, v in backward.named_parameters()}
    loss = lambda p: functional_call(backward, p, (x,)).pow(3).sum()  # noqa: E731
    torch.testing.assert_close(tuple(grad(loss)(p).values()), expected)
    leaves = {k: v.clone().requires_grad_() for k, v in p.items()}
    computed = {k: v * 1.0 for k, v in leaves.items()}
    torch.testing.assert_close(torch.autograd.grad(loss(computed), list(leaves.values())), expected)
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(backward), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients(compiled, x), expected)


def test_a_parametrized_weight_is_centred_at_every_use():
    backward = parametrizations.weight_norm(nn.Linear(5, 3).double())
    forward = centre_(copy.deepcopy(backward))
    x = torch.randn(4, 5, dtype=torch.float64)
    applied = centre_(copy.deepcopy(backward), centring="backward")
    for layer in (forward, applied):
        layer(x).sum().backward()  # the loss is linear: its gradient does not depend on the mean of the weight
    grads = [[p.grad for p in layer.parameters()] for layer in (forward, applied)]
    torch.testing.assert_close(grads[1], grads[0])
    backward(x).sum().backward()
    assert not torch.allclose(list(backward.parameters())[-1].grad, grads[0][-1])


def test_copies_pickles_and_assigned_weights_centre_their_gradients(tmp_path):
    _, layer, x = pair("conv2d", scaled=False)
    expected = gradients(layer, x)
    torch.save(layer, tmp_path / "layer.pt")
    assigned = copy.deepcopy(layer)
    assigned.load_state_dict({k: v.clone() for k, v in layer.state_dict().items()}, assign=True)
    twins = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), assigned]
    twins.append(torch.load(tmp_path / "layer.pt", weights_only=False))
    for twin in twins:
        for _ in range(3):  # one hook, however often it runs
            torch.testing.assert_close(gradients(twin, x), expected)
        assert len(twin.weight._backward_hooks) == 1


@both_ends
@pytest.mark.parametrize("channels", [8, 96])
def test_saves_what_a_plain_layer_saves(scaled, channels):
    plain, x = nn.Conv2d(channels, channels, 3), torch.randn(2, channels, 6, 6, requires_grad=True)
    layer = centre_(copy.deepcopy(plain), nn.Parameter(torch.ones(1)) if scaled else None, "backward")
    assert saved_bytes(layer, layer, x) == saved_bytes(plain, plain, x)


def test_frozen_then_thawed():
    _, layer, x = pair("conv2d", scaled=False)
    layer.requires_grad_(False)
    assert not layer(x).requires_grad
    layer.requires_grad_()
    assert gradients(layer, x)[0].mean((1, 2, 3)).abs().max() < 1e-12


def test_bf16_weights_and_autocast():
    layer = centre_(nn.Linear(512, 4), centring="backward")
    x = torch.randn(8, 512)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().pow(3).sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    assert layer.weight.grad.mean(1).abs().max() < 1e-6 * layer.weight.grad.abs().max()
    half = copy.deepcopy(layer).to(torch.bfloat16)
    half(x.bfloat16()).pow(3).sum().backward()
    assert half.weight.grad.dtype == torch.bfloat16
    assert half.weight.grad.float().mean(1).abs().max() < 1e-3 * half.weight.grad.abs().max()


# -- loading -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("assign", [False, True])
def test_weights_trained_forward_are_centred_when_loaded(assign):
    forward, backward, x = pair("transposed grouped", scaled=True)
    with torch.no_grad():
        forward.weight.normal_().add_(0.3)
    given = {k: v.clone() for k, v in forward.state_dict().items()}
    before = {k: v.clone() for k, v in given.items()}
    backward.load_state_dict(given, assign=assign)
    torch.testing.assert_close(backward(x), forward(x))
    torch.testing.assert_close(given, before, rtol=0, atol=0)  # the caller's tensors are untouched


def test_weights_that_are_centred_up_to_rounding_load_bit_for_bit():
    layer = centre_(nn.Conv2d(64, 8, 3), centring="backward")
    layer.project_()
    with torch.no_grad():
        layer.weight += 1e-9 * torch.randn(8, 1, 1, 1)
    twin = centre_(nn.Conv2d(64, 8, 3), centring="backward")
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin.weight, layer.weight)
    assert 0 < layer.off_centre() < OFF_CENTRE


def test_off_centre_is_the_cosine_with_a_constant_row():
    layer = centre_(nn.Linear(4, 2, bias=False), centring="backward")
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, -1.0, 1.0, -1.0], [1.0, 0.0, 0.0, 0.0]]))
    assert layer.off_centre() == pytest.approx(0.5)
    with torch.no_grad():
        layer.weight.zero_()
    assert layer.off_centre() == 0.0
    assert copy.deepcopy(layer).to("meta").off_centre() == 0.0


# -- networks ----------------------------------------------------------------------------------------------------


def trajectory(method: mn.MimicNorm, optimizer, steps: int, clip=None, project: bool = False) -> list[torch.Tensor]:
    """What each layer of a small residual network applies after some steps, and its other parameters."""
    torch.manual_seed(0)
    model = nets.resnet().double()
    mn.convert_(model, method, example=(2, 3, 8, 8))
    rule = optimizer(model.parameters())
    if project:
        rule.register_step_post_hook(lambda *_: mn.project_(model))
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(8, 3, 8, 8, generator=generator, dtype=torch.float64)
        rule.zero_grad()
        F.cross_entropy(model(x), torch.arange(8) % 4).backward()
        if clip is not None:
            clip(model.parameters())
        rule.step()
    assert any(isinstance(m, WeightMean) and m.residual_scale is not None for m in model.modules())
    # The last BN takes the head's bias out, so its gradient is rounding, which Adam makes as large as any other.
    layers = [m for m in model.modules() if isinstance(m, WeightMean)]
    others = {id(m.weight) for m in layers} | {id(model.fc.bias)}
    return [m.effective_weight().detach() for m in layers] + [
        p.detach() for p in model.parameters() if id(p) not in others
    ]


def methods(**settings) -> tuple[mn.MimicNorm, mn.MimicNorm]:
    return mn.MimicNorm(min_fan_in=8, **settings), mn.MimicNorm(min_fan_in=8, centre="backward", **settings)


@pytest.mark.parametrize("settings", [{}, {"nesterov": True, "weight_decay": 5e-4}])
def test_sgd_takes_the_same_steps(settings):
    def optimizer(p):
        return torch.optim.SGD(p, lr=0.05, momentum=0.9, **settings)

    forward, backward = (trajectory(m, optimizer, 100) for m in methods())
    torch.testing.assert_close(backward, forward, rtol=0, atol=1e-12)


OTHERS = {
    "adamw": (lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1), None),
    "clipped by value": (lambda p: torch.optim.SGD(p, lr=0.05), lambda p: clip_grad_value_(p, 1e-3)),
    "clipped by norm": (lambda p: torch.optim.SGD(p, lr=0.05), lambda p: clip_grad_norm_(p, 1e-2)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_with_project_any_optimizer_takes_the_same_steps(name):
    optimizer, clip = OTHERS[name]
    forward, backward = (trajectory(m, optimizer, 30, clip, project=m.centre == "backward") for m in methods())
    torch.testing.assert_close(backward, forward, rtol=0, atol=1e-11)
    if name != "clipped by norm":  # without project_, these leave the means
        drifted = trajectory(methods()[1], optimizer, 30, clip)
        assert max(float((a - b).abs().max()) for a, b in zip(drifted, forward, strict=True)) > 1e-4


@pytest.mark.parametrize("init", ["theory", "calibrate", None])
def test_conversion_starts_from_the_same_function(init):
    nets_ = []
    for method in methods():
        torch.manual_seed(0)
        model = nets.resnet().double()
        report = mn.convert_(model, method, example=torch.randn(4, 3, 8, 8, dtype=torch.float64), init=init)
        nets_.append(model)
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(nets_[1](x), nets_[0](x))
    assert "centre, backward" in str(report)
    assert all(m.off_centre() < 1e-12 for m in nets_[1].modules() if isinstance(m, WeightMean))
    mn.check(nets_[1])
    mn.init_(nets_[1])
    mn.check(nets_[1])


def test_check_says_when_rows_have_left_their_means():
    model = nets.resnet()
    mn.convert_(model, methods()[1], example=(2, 3, 8, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    F.cross_entropy(model(torch.randn(8, 3, 8, 8)), torch.arange(8) % 4).backward()
    optimizer.step()
    with pytest.raises(mn.MimicNormError, match=r"have left their means.*project_\(model\) after each optimizer step"):
        mn.check(model)
    mn.project_(model)
    mn.check(model)


class Kernels(TorchDispatchMode):
    """Counts operations that compute something."""

    FREE = ("empty", "view", "_unsafe_view", "t", "detach", "permute", "expand", "unsqueeze", "alias", "reshape")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ not in self.FREE
        return func(*args, **(kwargs or {}))


def test_the_forward_pass_has_one_more_kernel_per_scalar_and_one_for_the_last_bn():
    counts, x = {}, torch.randn(4, 3, 8, 8)
    for name, method in (("none", mn.NoNorm()), ("backward", methods(logit_scale=False)[1])):
        model = nets.resnet()
        report = mn.convert_(model, method, example=(2, 3, 8, 8))
        model(x)  # hooks are hung here
        with Kernels() as kernels:
            model(x)
        counts[name] = kernels.count
    batch_norm = 2  # the normalisation, and the counter of batches
    assert counts["backward"] == counts["none"] + report.totals()["residual_scalars"] + batch_norm


def test_micro_batches_are_exact():
    model = nets.resnet().double()
    mn.convert_(model, methods()[1], example=(2, 3, 8, 8))
    x, y = torch.randn(6, 3, 8, 8, dtype=torch.float64), torch.arange(6) % 4
    F.cross_entropy(model(x), y).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    mn.microbatch.backward(model, F.cross_entropy, x, y, micro_batch=1)
    torch.testing.assert_close([p.grad for p in model.parameters()], expected, rtol=1e-10, atol=1e-12)


def test_project_needs_weight_mean_layers():
    with pytest.raises(mn.MimicNormError, match="has no weight-mean layer: convert it with MimicNorm first"):
        mn.project_(nets.plain())


def test_a_wrong_place_is_refused():
    with pytest.raises(mn.MimicNormError, match='centre=\'both\'; use "forward" or "backward"'):
        mn.MimicNorm(centre="both")
