"""Weight mean: the same numbers as the plain expression, everywhere PyTorch can take it, at a plain layer's memory."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

from mimicnorm.layers import WeightMeanConv2d, WeightMeanLinear, centre, centre_, fan_in, weight_mean_class


class SamePad(nn.Conv2d):
    """A convolution with a forward of its own, as timm's Conv2dSame."""

    def forward(self, x):
        return F.conv2d(F.pad(x, (0, 1, 0, 1)), self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


CASES = {
    "conv1d": (lambda: nn.Conv1d(4, 6, 3), (2, 4, 7)),
    "conv1d same, even": (lambda: nn.Conv1d(4, 6, 4, padding="same", dilation=2), (2, 4, 9)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=1, stride=2), (2, 4, 5, 5)),
    "conv2d grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2, bias=False), (2, 4, 5, 5)),
    "conv2d reflect": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (2, 4, 5, 5)),
    "conv2d same": (lambda: nn.Conv2d(4, 6, 3, padding="same"), (2, 4, 5, 5)),
    "conv2d without batch": (lambda: nn.Conv2d(4, 6, 3), (4, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (2, 2, 3, 3, 3)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1), (2, 4, 3, 3)),
    "transposed grouped": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), (2, 4, 3, 3)),
    "linear": (lambda: nn.Linear(5, 3), (2, 4, 5)),
    "own forward": (lambda: SamePad(4, 6, 2), (2, 4, 5, 5)),
}


def build(name: str, scaled: bool = True) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """A weight-mean layer, the plain layer with its effective weight, an input."""
    make, shape = CASES[name]
    plain = make().double()
    layer = centre_(copy.deepcopy(plain), nn.Parameter(torch.tensor([0.7], dtype=torch.float64)) if scaled else None)
    transposed, groups = getattr(plain, "transposed", False), getattr(plain, "groups", 1)
    with torch.no_grad():
        plain.weight.copy_(centre(plain.weight, groups=groups, transposed=transposed) * (0.7 if scaled else 1.0))
    return layer, plain, torch.randn(shape, dtype=torch.float64, requires_grad=True)


def parameters(layer: nn.Module) -> dict[str, torch.Tensor]:
    return dict(layer.named_parameters())


@pytest.mark.parametrize("name", CASES)
def test_equals_the_plain_layer_with_the_centred_weight(name):
    layer, plain, x = build(name)
    torch.testing.assert_close(layer(x), plain(x))
    torch.testing.assert_close(layer.effective_weight(), plain.weight)


@pytest.mark.parametrize("name", CASES)
def test_first_and_second_derivatives(name):
    layer, _, x = build(name)
    names, values = zip(*parameters(layer).items(), strict=True)
    call = lambda x, *p: functional_call(layer, dict(zip(names, p, strict=True)), (x,))  # noqa: E731
    assert torch.autograd.gradcheck(call, (x, *values))
    assert torch.autograd.gradgradcheck(call, (x, *values))


@pytest.mark.parametrize("name", CASES)
def test_functorch_agrees_with_autograd(name):
    layer, _, x = build(name)
    p = {k: v.detach() for k, v in parameters(layer).items()}
    x = x.detach()
    loss = lambda p, x: functional_call(layer, p, (x,)).square().sum()  # noqa: E731
    expected = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
    got = grad(loss)(p, x)
    for value, name_ in zip(expected, p, strict=True):
        torch.testing.assert_close(got[name_], value)
    tangent = {k: torch.randn_like(v) for k, v in p.items()}
    _, directional = jvp(lambda p: loss(p, x), (p,), (tangent,))
    torch.testing.assert_close(directional, sum((got[k] * tangent[k]).sum() for k in p))
    forward, reverse = (j(lambda s: functional_call(layer, {**p, "residual_scale": s}, (x,))) for j in (jacfwd, jacrev))
    torch.testing.assert_close(forward(p["residual_scale"]), reverse(p["residual_scale"]))
    assert hessian(lambda s: loss({**p, "residual_scale": s}, x))(p["residual_scale"]).isfinite().all()


def test_per_sample_gradients_by_vmap():
    layer, _, _ = build("conv2d")
    x = torch.randn(3, 2, 4, 5, 5, dtype=torch.float64)
    p = {k: v.detach() for k, v in parameters(layer).items()}
    loss = lambda p, x: functional_call(layer, p, (x,)).square().sum()  # noqa: E731
    each = vmap(grad(loss), (None, 0))(p, x)
    for i in range(3):
        torch.testing.assert_close(each["weight"][i], grad(loss)(p, x[i])["weight"])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_compiles_whole_and_exports(name):
    layer, plain, x = build(name)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
    got = torch.autograd.grad(compiled(x).square().sum(), list(layer.parameters()))
    torch.testing.assert_close(got, expected)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), plain(x))
    exported = torch.export.export(layer, (x.detach(),)).module()
    torch.testing.assert_close(exported(x.detach()), plain(x.detach()))


@pytest.mark.parametrize("reentrant", [True, False])
def test_both_kinds_of_checkpointing(reentrant):
    layer, _, x = build("conv2d")
    expected = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    checkpoint(layer, x, use_reentrant=reentrant).square().sum().backward()
    got = [x.grad, *(p.grad for p in layer.parameters())]
    torch.testing.assert_close(got, list(expected))


def test_dual_numbers_outside_functorch():
    layer, plain, x = build("conv2d")
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x))
        tangent = torch.autograd.forward_ad.unpack_dual(layer(dual)).tangent
        wanted = torch.autograd.forward_ad.unpack_dual(plain(dual)).tangent
    torch.testing.assert_close(tangent, wanted)


def test_one_module_used_twice():
    layer = weight_mean_class(nn.Linear)(5, 5).double()
    x = torch.randn(3, 5, dtype=torch.float64)
    w = layer.weight.detach().clone().requires_grad_()
    b = layer.bias.detach().clone().requires_grad_()
    step = lambda x: F.linear(x, w - w.mean(1, keepdim=True), b)  # noqa: E731
    layer(layer(x)).square().sum().backward()
    step(step(x)).square().sum().backward()
    torch.testing.assert_close((layer.weight.grad, layer.bias.grad), (w.grad, b.grad))


def saved_bytes(layer: nn.Module, x: torch.Tensor) -> int:
    """What autograd keeps beside parameters."""
    own = {p.untyped_storage()._cdata for p in layer.parameters()}
    seen: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(t):
        storage = t.untyped_storage()
        if storage._cdata not in own:
            seen[storage._cdata] = (storage.nbytes(), t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = layer(x)
    assert y.requires_grad
    return sum(n for n, _ in seen.values())


@pytest.mark.parametrize("name", CASES)
def test_saves_what_a_plain_layer_saves_and_the_row_means(name):
    layer, plain, x = build(name)
    rows = (
        layer.weight.shape[1] * getattr(layer, "groups", 1)
        if getattr(layer, "transposed", False)
        else len(layer.weight)
    )
    assert saved_bytes(layer, x) <= saved_bytes(plain, x) + 8 * rows


def test_frozen_weight_keeps_no_input_and_gets_no_gradient():
    layer, _, x = build("conv2d", scaled=False)
    layer.weight.requires_grad_(False)
    layer.bias.requires_grad_(False)
    assert saved_bytes(layer, x) < x.nbytes
    layer(x).sum().backward()
    assert layer.weight.grad is None
    expected = torch.autograd.grad(F.conv2d(x, layer.effective_weight(), None, 2, 1).sum(), x)[0]
    torch.testing.assert_close(x.grad, expected)


def test_channels_last_in_channels_last_out():
    layer, plain, x = build("conv2d")
    layer, plain = layer.to(memory_format=torch.channels_last), plain.to(memory_format=torch.channels_last)
    x = x.detach().to(memory_format=torch.channels_last)
    y = layer(x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, plain(x))
    y.square().sum().backward()
    plain(x).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, 0.7 * centre(plain.weight.grad))
    inner = (plain.weight.grad * plain.weight / 0.7).sum()
    torch.testing.assert_close(layer.residual_scale.grad, inner.reshape(1))


def test_autocast_runs_narrow_and_centres_wide():
    layer = WeightMeanConv2d(64, 8, 3)
    with torch.no_grad():
        layer.weight.add_(100.0)  # a mean that bf16 could not subtract
    x = torch.randn(2, 64, 6, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
        half = saved_bytes(layer, x)
    assert y.dtype == torch.bfloat16
    assert half < x.nbytes
    torch.testing.assert_close(y.float(), layer(x), atol=0.1, rtol=0.1)
    y.float().square().sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    assert layer.weight.grad.mean((1, 2, 3)).abs().max() < 1e-3 * layer.weight.grad.abs().max()


def test_half_precision_weights_are_centred_in_float():
    layer = WeightMeanLinear(4096, 4, bias=False)
    with torch.no_grad():
        layer.weight.normal_().add_(3.0)
    half = copy.deepcopy(layer).to(torch.bfloat16)
    x = torch.randn(8, 4096)
    torch.testing.assert_close(half(x.bfloat16()).float(), layer(x), atol=3.0, rtol=0.05)
    assert half.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("name", CASES)
def test_pickles_copies_and_stays_what_it_was(name, tmp_path):
    make, _ = CASES[name]
    original = make()
    base, weight, keys = type(original), original.weight, list(original.state_dict())
    layer = centre_(original)
    assert layer is original
    assert layer.weight is weight
    assert isinstance(layer, base)
    assert list(layer.state_dict()) == keys
    if name != "own forward":  # its class is local to this file, which pickle cannot import
        twin = pickle.loads(pickle.dumps(layer))
        torch.save(layer, tmp_path / "layer.pt")
        again = torch.load(tmp_path / "layer.pt", weights_only=False)
        assert type(twin) is type(again) is type(layer)
        assert torch.equal(twin.weight, weight)
    assert type(copy.deepcopy(layer)) is type(layer)


def test_fan_in_counts_what_reaches_one_output():
    assert fan_in(torch.empty(64, 16, 3, 3), 4, False, (1, 1)) == 144
    assert fan_in(torch.empty(8, 4, 4, 4), 2, True, (2, 2)) == 4 * 4
    assert fan_in(torch.empty(8, 4, 3, 3), 1, True, (2, 2)) == 8 * 4
    x, layer = torch.ones(1, 8, 9, 9), nn.ConvTranspose2d(8, 1, 3, stride=2, bias=False)
    with torch.no_grad():
        layer.weight.fill_(1.0)
        assert layer(x).max() == 8 * 4


def test_no_weight_mean_of_something_without_weights():
    with pytest.raises(TypeError, match="ReLU"):
        weight_mean_class(nn.ReLU)
