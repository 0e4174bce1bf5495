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


class Tokens(nn.Module):
    """Patches of a picture as tokens: channels first, then last, then first again."""

    def __init__(self):
        super().__init__()
        self.patches, self.drop = nn.Conv2d(3, 6, 2, stride=2), nn.Identity()
        self.linear, self.norm, self.act = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh()

    def forward(self, x):
        x = self.drop(self.patches(x).flatten(2).transpose(1, 2))  # (batch, 9 positions, 6 channels)
        x = self.linear(x)
        return self.act(x + self.norm(x.transpose(1, 2)).transpose(1, 2))


def mean_share(y, positions):
    y = y.detach()
    return pytest.approx(float(y.mean(positions).square().mean() / y.square().mean()), rel=1e-4, abs=1e-9)


def test_channels_are_those_of_the_layer_that_made_the_output():
    torch.manual_seed(0)
    model, x = Tokens(), torch.randn(8, 3, 6, 6) + 1
    with torch.no_grad():
        patches = model.patches(x)
        tokens = patches.flatten(2).transpose(1, 2)
        h = model.linear(tokens)
        normed = model.norm(h.transpose(1, 2))
        out = torch.tanh(h + normed.transpose(1, 2))
    expected = {
        "patches": (patches, (0, 2, 3)),
        "drop": (tokens, (0, 1)),
        "linear": (h, (0, 1)),
        "norm": (normed, (0, 2)),
        "act": (out, (0, 1)),
    }
    for layer in propagate(model, x).layers:
        assert layer.channel_mean_share == mean_share(*expected[layer.name]), layer.name


def test_channels_of_an_earlier_layer_of_the_same_shape():
    # `norm` sees the shape of `embed`; the latest layer, `mix`, has its 5 positions where `embed` has its channels
    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.mix, self.norm = nn.Linear(3, 6), nn.Linear(5, 5), nn.LayerNorm(6)

        def forward(self, x):
            x = self.embed(x)
            return self.norm(x + self.mix(x.transpose(1, 2)).transpose(1, 2))

    torch.manual_seed(0)
    model, x = Mixer(), torch.randn(8, 5, 3) + 1
    assert propagate(model, x).layers[-1].channel_mean_share == mean_share(model(x), (0, 1))


def test_channels_of_sequences_and_single_pictures():
    torch.manual_seed(0)
    x, picture = torch.randn(4, 7, 3) + 1, torch.randn(3, 6, 6) + 1
    rnn, conv = nn.GRU(3, 5, batch_first=True), nn.Conv2d(3, 5, 3)
    assert propagate(rnn, x).layers[0].channel_mean_share == mean_share(rnn(x)[0], (0, 1))
    # no batch: channels come first
    assert propagate(conv, picture).layers[0].channel_mean_share == mean_share(conv(picture), (1, 2))


def test_gradients_survive_in_place_activations():
    # the same network with and without inplace must read the same, before and after the activation
    torch.manual_seed(0)
    make = lambda inplace: nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace), nn.Linear(8, 2))  # noqa: E731
    a, b = make(True), make(False)
    b.load_state_dict(a.state_dict())
    x = torch.randn(16, 8)
    for one, two in zip(propagate(a, x).layers, propagate(b, x).layers, strict=True):
        assert one == two


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


def test_checkpointed_layers_are_measured_once():
    class Checkpointed(nn.Sequential):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    model, x = Checkpointed(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)), torch.randn(4, 3)
    assert propagate(model, x).layers == propagate(nn.Sequential(*model), x).layers


def signal(variances=(1.0, 1.0), correlation=0.2, gradients=(1.0, 1.0)):
    rows = zip(variances, gradients, strict=True)
    return Signal(tuple(LayerSignal("fc", "Linear", 0.0, v, 0.1, correlation, g) for v, g in rows))


@pytest.mark.parametrize(
    ("measured", "says"),
    [
        (signal((0.5, 10.0)), "healthy: variance 0.5 to 10 (good: 0.0001 to 10000), correlation"),
        (signal((0.0, 10.0), gradients=(0.0, 1.0)), "healthy: variance 10 to 10"),  # a layer that starts at zero
        (signal((1.0, 1e5)), "unhealthy: variance 1 to 1e+05"),
        (signal((1.0, 1e5)), "The variance explodes: give weights the standard deviation"),
        (signal((1.0, math.inf)), "The variance explodes"),
        (signal((1.0, math.nan)), "The variance explodes"),
        (signal((1.0, 1e-8)), "The variance dies out: give weights the standard deviation"),
        (signal(correlation=0.99), "All inputs look alike: centre the weights"),
        (signal(gradients=(1e-3, 1e3)), "Gradients vanish or explode: use residual branches"),
    ],
)
def test_a_verdict_says_what_is_wrong_and_what_to_do(measured, says):
    assert says in measured.verdict()
    assert measured.verdict().startswith("unhealthy") == (len(measured.verdict().split(". ")) > 1)


def test_real_networks_are_judged():
    deep = [layer for _ in range(30) for layer in (nn.Linear(64, 64), nn.ReLU())]
    assert propagate(nn.Sequential(*deep), torch.randn(8, 64)).verdict().startswith("unhealthy")
    net = FiniteNetwork(64, 64, 6, Transition("weight_mean"), outputs=8)
    assert propagate(net, torch.randn(8, 64)).verdict().startswith("healthy")


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


def test_few_samples_are_compared_with_all_others():
    x = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    unit = x / x.norm(dim=1, keepdim=True)
    expected = float((unit @ unit.T).triu(1).sum() / 10)
    for pairs in (10, 200):
        assert propagate(nn.Identity(), x, pairs=pairs).layers[0].correlation == pytest.approx(expected, rel=1e-12)


def test_one_sample_has_no_pairs():
    layer = propagate(nn.Linear(3, 3), torch.ones(1, 3)).layers[0]
    assert math.isnan(layer.correlation)


def test_table_rows_and_plot(tmp_path):
    measured = propagate(Residual(), torch.randn(4, 3, 6, 6))
    lines = str(measured).splitlines()
    assert [line.split()[0] for line in lines] == ["layer", "conv", "norm", "act", "head", "verdict:"]
    assert [row["name"] for row in measured.as_dicts()] == ["conv", "norm", "act", "head"]
    assert [layer.name for layer in measured.weight_layers().layers] == ["conv", "head"]
    pytest.importorskip("matplotlib")
    doctor.plot({"before": measured, "after": measured}, tmp_path / "signal.png")
    assert (tmp_path / "signal.png").stat().st_size > 2000
