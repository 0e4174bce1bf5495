from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from mimicnorm.theory import FiniteNetwork, LayerSignal, Signal, Transition, doctor, propagate


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(3, 4)

    def forward(self, x):
        return self.head(self.act(x + self.norm(self.conv(x))).mean((2, 3)))


def test_each_leaf_call_is_measured_in_order():
    torch.manual_seed(0)
    model, x = Residual(), torch.randn(8, 3, 6, 6)
    signal = propagate(model, x)
    assert [layer.name for layer in signal.layers] == ["conv", "norm", "act", "head"]
    conv, norm, act, head = signal.layers
    with torch.no_grad():
        out = model.conv(x).double()
    assert conv.mean == pytest.approx(float(out.mean()), abs=1e-6)
    assert conv.variance == pytest.approx(float(out.var(correction=0)), rel=1e-5)
    assert norm.variance == pytest.approx(1, abs=1e-3)
    assert norm.channel_mean_share == pytest.approx(0, abs=1e-9)
    assert act.mean > 0
    assert head.gradient == pytest.approx(1, rel=1e-5)
    assert all(layer.gradient > 0 for layer in signal.layers)


def test_channels_are_those_of_the_layer_that_made_the_output():
    class Tokens(nn.Module):
        """Patches of a picture as tokens: channels first, then last, then first, then last again."""

        def __init__(self):
            super().__init__()
            self.patches, self.linear = nn.Conv2d(3, 6, 2, stride=2), nn.Linear(6, 5)
            self.norm, self.act = nn.BatchNorm1d(5), nn.Tanh()

        def forward(self, x):
            x = self.linear(self.patches(x).flatten(2).transpose(1, 2))  # (batch, 9 positions, 5 channels)
            return self.act(x + self.norm(x.transpose(1, 2)).transpose(1, 2))

    torch.manual_seed(0)
    model, x = Tokens(), torch.randn(8, 3, 6, 6) + 1
    outputs = {}
    for name, module in model.named_children():
        module.register_forward_hook(lambda _module, _args, y, name=name: outputs.update({name: y.detach()}))
    layers = propagate(model, x).layers
    model(x)
    positions = {"patches": (0, 2, 3), "linear": (0, 1), "norm": (0, 2), "act": (0, 1)}
    for layer in layers:
        y = outputs[layer.name]
        expected = float(y.mean(positions[layer.name]).square().mean() / y.square().mean())
        assert layer.channel_mean_share == pytest.approx(expected, rel=1e-4, abs=1e-9), layer.name


def test_the_network_is_left_as_it_was():
    torch.manual_seed(0)
    model, x = Residual(), torch.randn(8, 3, 6, 6)
    state, data = {k: v.clone() for k, v in model.state_dict().items()}, x.clone()
    generator = torch.random.get_rng_state()
    propagate(model, x)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert all(not m._forward_hooks for m in model.modules())
    assert torch.equal(x, data)
    assert not x.requires_grad
    assert model.training
    assert torch.equal(torch.random.get_rng_state(), generator)


def test_parametrised_and_attention_layers_are_leaves():
    layers = propagate(nn.Sequential(weight_norm(nn.Linear(8, 8)), nn.ReLU()), torch.randn(4, 8)).layers
    assert [(x.name, x.kind) for x in layers] == [("0", "Linear"), ("1", "ReLU")]
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    first = propagate(encoder, torch.randn(4, 3, 8)).layers[0]
    assert (first.name, first.kind) == ("self_attn", "MultiheadAttention")
    assert first.gradient > 0


class Checkpointed(nn.Sequential):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def test_in_place_activations_and_checkpoints_do_not_show():
    layers, x = (nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 2)), torch.randn(4, 3)
    plain = propagate(nn.Sequential(layers[0], nn.ReLU(), layers[2]), x).layers
    assert propagate(nn.Sequential(*layers), x).layers == propagate(Checkpointed(*layers), x).layers == plain


def signal(variances=(1.0, 1.0), correlation=0.2, gradients=(1.0, 1.0)):
    rows = zip(variances, gradients, strict=True)
    return Signal(tuple(LayerSignal("fc", "Linear", 0.0, v, 0.1, correlation, g) for v, g in rows))


@pytest.mark.parametrize(
    ("measured", "says"),
    [
        (signal((0.5, 10.0)), "healthy: variance 0.5 to 10 (good: 0.0001 to 10000), correlation"),
        (signal((0.0, 10.0), gradients=(0.0, 1.0)), "healthy: variance 10 to 10"),  # a layer that starts at zero
        (signal((1.0, 1e5)), "The variance explodes: give weights the standard deviation"),
        (signal((1.0, math.nan)), "The variance explodes"),
        (signal((1.0, 1e-8)), "The variance dies out: give weights the standard deviation"),
        (signal(correlation=0.99), "All inputs look alike: centre the weights"),
        (signal(gradients=(1e-3, 1e3)), "Gradients vanish or explode: use residual branches"),
    ],
)
def test_a_verdict_says_what_is_wrong_and_what_to_do(measured, says):
    assert says in measured.verdict()
    assert measured.verdict().startswith("unhealthy") == (len(measured.verdict().split(". ")) > 1)


def test_cuda_generators_are_not_seeded(monkeypatch):
    # where CUDA is not in use, torch.manual_seed queues a seed for its first use
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("CUDA was seeded"))
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout())
    x = torch.randn(4, 3)
    assert propagate(model, x).layers == propagate(model, x).layers
    assert propagate(model, x).layers != propagate(model, x, seed=1).layers


def test_inference_mode_does_not_hide_gradients():
    with torch.inference_mode():
        x = torch.randn(4, 3)
        model = torch.inference_mode(False)(lambda: nn.Linear(3, 3))()
        assert propagate(model, x).layers[0].gradient > 0


def test_readings_follow_the_theory():
    t = Transition("weight_mean")
    x = torch.randn(64, 100, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1.0
    x = x / x.norm(dim=1, keepdim=True) * 10
    net = FiniteNetwork(100, 1000, 6, t, outputs=1000)
    layers = [layer for layer in propagate(net, x).layers if layer.kind == "NtkLinear"]
    rho = t.iterate(layers[0].correlation, 5)
    for depth, layer in enumerate(layers):
        assert layer.variance == pytest.approx(1, abs=0.2)
        assert layer.correlation == pytest.approx(float(rho[depth]), abs=0.06)
    growth = (layers[0].gradient / layers[-1].gradient) ** (2 / 5)
    assert growth == pytest.approx(t.chi1, rel=0.06)


def test_call_arguments_tokens_losses_and_dicts():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Embedding(11, 4), nn.Linear(4, 3)

        def forward(self, ids, scale=1.0):
            return {"logits": scale * self.out(self.embed(ids))}

    ids = torch.randint(11, (5, 7))
    for call in (ids, (ids,), {"ids": ids, "scale": 2.0}):
        layers = propagate(Tokens(), call).layers
        assert [layer.kind for layer in layers] == ["Embedding", "Linear"]
        assert all(layer.gradient > 0 for layer in layers)
    quiet = propagate(Tokens(), ids, loss=lambda out: out["logits"].sum() * 0)
    assert all(layer.gradient == 0 for layer in quiet.layers)


def test_the_correlation_is_the_mean_over_all_pairs():
    x = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    unit = x / x.norm(dim=1, keepdim=True)
    expected = float((unit @ unit.T).triu(1).sum() / 10)
    assert propagate(nn.Identity(), x).layers[0].correlation == pytest.approx(expected, rel=1e-12)
    assert math.isnan(propagate(nn.Identity(), x[:1]).layers[0].correlation)


def test_table_rows_and_plot(tmp_path):
    measured = propagate(Residual(), torch.randn(4, 3, 6, 6))
    lines = str(measured).splitlines()
    assert [line.split()[0] for line in lines] == ["layer", "conv", "norm", "act", "head", "verdict:"]
    assert [row["name"] for row in measured.as_dicts()] == ["conv", "norm", "act", "head"]
    assert [layer.name for layer in measured.weight_layers().layers] == ["conv", "head"]
    pytest.importorskip("matplotlib")
    doctor.plot({"before": measured, "after": measured}, tmp_path / "signal.png")
    assert (tmp_path / "signal.png").stat().st_size > 2000
