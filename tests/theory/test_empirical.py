from __future__ import annotations

import pytest
import torch
from torch import nn

from mimicnorm.theory import FiniteNetwork, TheoryError, Transition, empirical_ntk, kernels, residual_kernels


def explicit(model, x, x2=None):
    """The full Jacobian, one output of the whole batch after another."""

    def jacobian(batch):
        parameters = [p for p in model.parameters() if p.requires_grad]
        out = model(batch).flatten(1)
        settings = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        rows = [torch.autograd.grad(value, parameters, **settings) for value in out.flatten()]
        rows = [torch.cat([g.flatten() for g in row]) for row in rows]
        return torch.stack(rows).reshape(*out.shape, -1)

    a = jacobian(x)
    b = a if x2 is None else jacobian(x2)
    return torch.einsum("icp,jdp->icjd", a, b)


def convolutional():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(100, 3)
    ).double()


@pytest.mark.parametrize("memory", [2**29, 40_000, 1])
@pytest.mark.parametrize("mode", ["per_sample", "batch"])
def test_any_memory_limit_gives_the_same_kernel(memory, mode):
    model = convolutional().eval()
    x = torch.randn(4, 2, 5, 5, dtype=torch.float64)
    model[0].bias.requires_grad_(False)  # and is left out
    full = empirical_ntk(model, x, mode=mode, outputs="full", memory_bytes=memory)
    expected = explicit(model, x)
    assert torch.allclose(full, expected, rtol=1e-10, atol=1e-12)
    mean = empirical_ntk(model, x, mode=mode, memory_bytes=memory)
    assert torch.allclose(mean, torch.einsum("icjc->ij", expected) / 3, rtol=1e-10, atol=1e-12)
    cross = empirical_ntk(model, x[:3], x[2:], mode=mode, outputs="full", memory_bytes=memory)
    assert torch.allclose(cross, expected[:3, :, 2:], rtol=1e-10, atol=1e-12)


class Noisy(nn.Linear):
    """Functional noise, now and then, which no module of it shows."""

    def __init__(self, kind):
        super().__init__(3, 3)
        self.kind = kind

    def forward(self, x):
        if self.kind == "dropout":
            return nn.functional.dropout(super().forward(x), 0.5)
        if self.kind == "path":
            return super().forward(x) * (torch.rand(len(x), 1) > 0.3) / 0.7
        return super().forward(x) + 0 * torch.rand(len(x), 1)  # draws, and makes nothing of it


@pytest.mark.parametrize("mode", ["per_sample", "batch"])
def test_functional_noise_is_refused(mode):
    x = torch.randn(4, 3)
    for kind in ("dropout", "path"):
        with pytest.raises(TheoryError, match="noise in part"):
            empirical_ntk(Noisy(kind), x, mode=mode)
    quiet = empirical_ntk(Noisy("none"), x, mode=mode)
    assert torch.allclose(quiet, (x @ x.T + 1).double(), rtol=1e-5, atol=1e-5)


class Recurrent(nn.Module):
    """What vmap cannot run; it counts its calls in an attribute."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head, self.calls = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2), 0

    def forward(self, x):
        self.calls += 1
        return self.head(self.lstm(x)[0][:, -1])


def test_what_vmap_cannot_run_takes_the_batch_mode_and_stays_as_it_was():
    model, x = Recurrent().double(), torch.randn(4, 5, 3, dtype=torch.float64)
    expected, calls = explicit(model, x), model.calls
    with torch.no_grad():
        assert torch.allclose(empirical_ntk(model, x, mode="batch", outputs="full"), expected, rtol=1e-10, atol=1e-12)
    with pytest.raises(TheoryError, match=r"vmap cannot run the model.*Use mode='batch'"):
        empirical_ntk(model, x)
    assert model.calls == calls
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("mode", ["per_sample", "batch"])
def test_one_number_per_sample(mode):
    model = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    assert torch.allclose(empirical_ntk(model, x, mode=mode), x @ x.T + 1, rtol=1e-10)


def test_both_sides_need_as_many_outputs():
    with pytest.raises(TheoryError, match="18 outputs on x and 32 on x2"):
        empirical_ntk(nn.Conv2d(1, 2, 3), torch.randn(2, 1, 5, 5), torch.randn(3, 1, 6, 6))


def test_batch_norm_in_train_mode_is_the_whole_batchs_kernel():
    model = convolutional().train()
    x = torch.randn(5, 2, 5, 5, dtype=torch.float64)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    got = empirical_ntk(model, x, mode="batch", outputs="full")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert model.training
    assert torch.allclose(got, explicit(model, x), rtol=1e-9, atol=1e-11)
    frozen = empirical_ntk(model.eval(), x, mode="batch", outputs="full")
    assert not torch.allclose(got, frozen, rtol=0.05)


@pytest.mark.parametrize("residual", [None, "sqrt"])
@pytest.mark.parametrize("kind", ["straight", "weight_mean"])
@pytest.mark.parametrize("activation", ["relu", "gelu", "tanh"])
def test_wide_networks_reach_the_closed_form(kind, activation, residual, inputs):
    x, t, first = inputs[1:4], Transition(kind, activation, 1.7, 0.2), {"first_w2": 1.3, "first_b2": 0.1}
    if residual is None:
        expected = kernels(x, 3, t, **first).ntk
    else:
        expected = residual_kernels(x, 3, t, layers_per_block=1, readout=True, **first).ntk
    nets = [
        FiniteNetwork(5, 256, 3, t, residual=residual, layers_per_block=1, outputs=4, seed=s, **first) for s in range(8)
    ]
    draws = torch.stack([empirical_ntk(net, x) for net in nets])
    error = draws.std(0) / 8**0.5
    assert float(((draws.mean(0) - expected).abs() / error).max()) < 6
    assert float((error / expected.abs()).max()) < 0.25
