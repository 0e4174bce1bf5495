"""Trained BatchNorms, taken up by their layers or on their own, against BatchNorm in evaluation mode, written out."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter
from weight_layers import LAYERS, saved_bytes

from mimicnorm.layers import TrainedAffine, TrainedLayer, TrainedNorm, centre, keep_, recoverable
from mimicnorm.memory import measure

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")
every_layer = pytest.mark.parametrize("name", LAYERS)


def trained_norm(width: int, dtype: torch.dtype = torch.float64, small_gamma: float = 0.5) -> TrainedNorm:
    gamma, beta = torch.rand(width, dtype=dtype) + small_gamma, torch.randn(width, dtype=dtype)
    mean, var = torch.randn(width, dtype=dtype), torch.rand(width, dtype=dtype) + 0.5
    return TrainedNorm(Parameter(gamma), Parameter(beta), mean, var, 1e-5)


def batch_norm(x: Tensor, norm: TrainedNorm, dim: int = 1) -> Tensor:
    """Written out: PyTorch's has a wrong gradient for some strides of a batch of one."""
    y = (x.movedim(dim, -1) - norm.mean) / (norm.var + norm.eps).sqrt() * norm.gamma + norm.beta
    return y.movedim(-1, dim)


def layer_and_norm(name: str) -> tuple[nn.Module, TrainedNorm, Tensor, int]:
    """A layer, a BatchNorm for its outputs, an input, and the dimension along which the outputs lie."""
    make, shape = LAYERS[name]
    layer, x = make().double(), torch.randn(shape, dtype=torch.float64)
    dim = {"linear": -1, "foreign": -1, "without batch": 0}.get(name, 1)
    return layer, trained_norm(layer(x).shape[dim]), x, dim


@every_layer
def test_a_layer_takes_up_its_batch_norm(name):
    layer, norm, x, dim = layer_and_norm(name)
    parameters = [*layer.parameters(), norm.gamma, norm.beta]
    x.requires_grad_()
    expected = batch_norm(layer(x), norm, dim)
    grads = torch.autograd.grad(expected.pow(3).sum(), [x, *parameters])
    kept = keep_(layer, norm)
    assert {id(p) for p in kept.parameters()} == {id(p) for p in parameters}
    torch.testing.assert_close(kept(x), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(kept(x).pow(3).sum(), [x, *parameters]), grads, rtol=1e-9, atol=1e-9)


@every_layer
def test_effective_weight_and_bias_make_the_same_plain_layer(name):
    layer, norm, x, _ = layer_and_norm(name)
    plain = copy.deepcopy(layer)
    kept = keep_(layer, norm)
    plain.weight, plain.bias = Parameter(kept.effective_weight()), Parameter(kept.effective_bias())
    torch.testing.assert_close(plain(x), kept(x), rtol=1e-10, atol=1e-10)


@every_layer
def test_the_weights_gradient_is_centred_after_the_scale(name):
    layer, norm, x, _ = layer_and_norm(name)
    kept = keep_(layer, norm)
    given = [kept.weight, kept.gamma, kept.beta]
    weight, *affine = torch.autograd.grad(kept(x).pow(3).sum(), given)
    kept.centring = "backward"
    centred, *same = torch.autograd.grad(kept(x).pow(3).sum(), given)
    transposed = bool(getattr(kept, "transposed", False))
    expected = centre(weight, groups=getattr(kept, "groups", 1), transposed=transposed)
    torch.testing.assert_close(centred, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(same, affine, rtol=1e-9, atol=1e-9)  # those of gamma and beta are not


def test_second_derivatives():
    layer, norm = nn.Linear(3, 2).double(), trained_norm(2)
    kept = keep_(layer, norm)
    x = torch.randn(4, 3, dtype=torch.float64)

    def loss(weight, bias, gamma, beta):
        return torch.func.functional_call(
            kept, {"weight": weight, "bias": bias, "gamma": gamma, "beta": beta}, (x,)
        ).pow(3)

    given = tuple(p.detach().clone().requires_grad_() for p in (kept.weight, kept.bias, kept.gamma, kept.beta))
    assert torch.autograd.gradgradcheck(loss, given)


def test_saves_what_a_plain_layer_saves_and_a_vector():
    x = torch.randn(4, 8, 32, 32, requires_grad=True)
    plain = nn.Conv2d(8, 16, 3)
    norm = trained_norm(16, torch.float32)
    kept = keep_(copy.deepcopy(plain), norm, "backward")
    assert saved_bytes(kept, kept, x) <= saved_bytes(plain, plain, x) + 16 * 4 * 3  # gamma / sigma, mean, variance


def test_without_a_batch_norm_only_the_gradient_is_centred():
    plain, x = nn.Linear(5, 3).double(), torch.randn(7, 5, dtype=torch.float64)
    kept = keep_(copy.deepcopy(plain), None, "backward")
    assert torch.equal(kept(x), plain(x))
    kept(x).pow(2).sum().backward()
    plain(x).pow(2).sum().backward()
    torch.testing.assert_close(kept.weight.grad, centre(plain.weight.grad))
    assert not torch.allclose(kept.weight.mean(1), torch.zeros(3).double())  # W keeps its means
    assert list(kept.state_dict()) == ["weight", "bias"]


@pytest.mark.parametrize("affine", [True, False])
def test_copies_and_pickles(affine):
    layer, norm = nn.Conv2d(3, 4, 3), trained_norm(4, torch.float32)
    kept = keep_(layer, norm if affine else norm._replace(gamma=None, beta=None), "backward")
    x = torch.randn(2, 3, 5, 5)
    for twin in (copy.deepcopy(kept), pickle.loads(pickle.dumps(kept))):
        assert isinstance(twin, TrainedLayer)
        assert isinstance(twin, nn.Conv2d)
        assert torch.equal(twin(x), kept(x))
    assert ("gamma" in kept.state_dict()) is affine


def test_half_precision_makes_the_weight_in_float():
    layer, norm = nn.Linear(64, 8).to(torch.bfloat16), trained_norm(8, torch.bfloat16)
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    kept = keep_(copy.deepcopy(layer), norm)
    exact = batch_norm(layer.double()(x.double()), TrainedNorm(*(t.double() for t in norm[:4]), norm.eps))
    torch.testing.assert_close(kept(x).double(), exact, rtol=0.03, atol=0.03)
    kept(x).sum().backward()
    assert kept.gamma.grad.dtype == kept.weight.grad.dtype == torch.bfloat16


def test_compiled_as_in_eager_mode():
    layer, norm = nn.Linear(6, 4), trained_norm(4, torch.float32)
    kept, x = keep_(layer, norm, "backward"), torch.randn(3, 6)
    expected = torch.autograd.grad(kept(x).pow(2).sum(), list(kept.parameters()))
    compiled = torch.compile(kept, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(x).pow(2).sum(), list(kept.parameters())), expected)


# -- on its own --------------------------------------------------------------------------------------------------


def relu_in_place(x: Tensor) -> Tensor:
    return F.relu(x, inplace=True)


@pytest.mark.parametrize("before_relu", [False, True])
@pytest.mark.parametrize("train_gamma", [False, True])
@pytest.mark.parametrize("shape", [(5, 4), (3, 4, 6), (2, 4, 3, 3), (2, 3, 3, 4), (1, 2, 3, 4)])
def test_on_its_own(shape, train_gamma, before_relu):
    dim = -1 if shape[-1] == 4 and len(shape) == 4 else 1
    norm = trained_norm(4)
    norm.gamma.requires_grad_(train_gamma)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    kept = TrainedAffine(norm, dim, before_relu)
    expected, y = F.relu(batch_norm(x, norm, dim)), relu_in_place(kept(x))
    scale, shift = kept.as_affine()
    torch.testing.assert_close((x.movedim(dim, -1) * scale + shift).movedim(-1, dim).relu(), expected)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    wanted = [p for p in (x, norm.gamma, norm.beta) if p.requires_grad]
    grads = torch.autograd.grad(y.pow(3).sum(), wanted)
    torch.testing.assert_close(grads, torch.autograd.grad(expected.pow(3).sum(), wanted), rtol=1e-9, atol=1e-9)


def test_saved_bytes_on_its_own():
    x = torch.randn(4, 8, 32, 32, requires_grad=True)

    def saved(before_relu: bool, trains: bool) -> int:
        norm = trained_norm(8, torch.float32)
        norm.gamma.requires_grad_(trains)
        net = nn.Sequential(nn.Conv2d(8, 8, 1), TrainedAffine(norm, 1, before_relu), nn.ReLU(inplace=True))
        return measure(net, x, loss=lambda y: y.sum()).saved_bytes

    activation = x.numel() * 4
    assert saved(False, True) >= 2 * activation  # the convolution's output for gamma, that of the ReLU
    assert saved(True, True) < 1.01 * activation  # what the ReLU saves says the input, too
    assert saved(False, False) < 1.01 * activation


def test_gammas_too_small_to_divide_by_are_not():
    norm = trained_norm(3, torch.float32)
    with torch.no_grad():
        norm.gamma[1], norm.beta[1] = 1e-6, 1.0
    kept = TrainedAffine(norm, before_relu=True)
    assert not kept.saves_output
    assert not recoverable(norm.gamma, norm.beta)
    state = kept.state_dict() | {"gamma": torch.ones(3)}
    kept.load_state_dict(state)
    assert kept.saves_output
    kept.load_state_dict(state | {"gamma": torch.zeros(3)})
    assert not kept.saves_output


def test_a_gamma_that_reaches_zero_gets_a_finite_gradient():
    norm = trained_norm(2)
    kept = TrainedAffine(norm, before_relu=True)
    norm.gamma.data.zero_()
    relu_in_place(kept(torch.randn(3, 2, dtype=torch.float64))).sum().backward()
    assert norm.gamma.grad.isfinite().all()


def test_another_activation_in_place_is_noticed():
    x = torch.randn(8, 3, dtype=torch.float64)
    y = F.silu(TrainedAffine(trained_norm(3), before_relu=True)(x), inplace=True)
    with pytest.raises(RuntimeError, match="something else than a ReLU"):
        y.sum().backward()
    F.silu(
        TrainedAffine(trained_norm(3), before_relu=True)(x)
    ).sum().backward()  # out of place: the output is as it was


def test_second_derivatives_on_its_own():
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    for before_relu in (False, True):
        y = TrainedAffine(trained_norm(2), before_relu=before_relu)(x)
        if before_relu:
            with pytest.raises(RuntimeError, match="saves_output = False"):
                torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
        else:
            (grad,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
            assert torch.autograd.grad(grad.sum(), x)[0].isfinite().all()
