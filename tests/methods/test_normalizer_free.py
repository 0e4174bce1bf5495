"""GroupNormWS and ScaledWS against their papers: formulas, variances, what stands where."""

from __future__ import annotations

import nets
import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import nn

import mimicnorm as mn
from mimicnorm.layers import GroupNorm, Standardised

IMAGES = torch.randn(4, 3, 8, 8)


class Residual(nn.Module):
    """Wide pre-activation blocks on vectors; the one in the middle has a projection shortcut."""

    def __init__(self, width: int = 512, blocks: int = 8):
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(2 * blocks))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2 * blocks))
        self.down, self.middle = nn.Linear(width, width), blocks // 2
        self.fc = nn.Linear(width, 3)

    def forward(self, x):
        x, trunk = self.stem(x), []
        for i in range(len(self.layers) // 2):
            z = F.relu(self.norms[2 * i](x))
            skip = self.down(z) if i == self.middle else x
            z = self.layers[2 * i + 1](F.relu(self.norms[2 * i + 1](self.layers[2 * i](z))))
            x = skip + z
            trunk.append(x)
        self.trunk = trunk
        return self.fc(x)


def test_scaled_ws_keeps_the_variance_it_predicts():
    torch.manual_seed(0)
    model = Residual()
    report = mn.convert_(model, mn.ScaledWS(skip_gain=1.0), example=(2, 512))
    with torch.no_grad():
        nn.init.normal_(model.stem.weight, 0, 512**-0.5)  # no BatchNorm touched it
        model(torch.randn(256, 512))
    expected = [1.04, 1.08, 1.12, 1.16, 1.04, 1.08, 1.12, 1.16]
    found = [float(t.var()) for t in model.trunk]
    assert found == pytest.approx(expected, rel=0.1)
    v = {step.name: step.v for step in report.layers}
    assert [v[f"layers.{2 * i}"] for i in range(8)] == pytest.approx([1, *expected[:-1]])
    assert v["down"] == pytest.approx(1.16)


def test_scaled_ws_block_is_its_papers_formula():
    model = mn.convert(nets.preact(), mn.ScaledWS(), example=IMAGES)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("bias", "gain", "scale")):
                p.normal_(0.5, 0.5)
    scaled = zoo.timm().layers.ScaledStdConv2d
    block, gamma, seen = model.blocks[1], (2 / (1 - 1 / torch.pi)) ** 0.5, []
    block.register_forward_hook(lambda m, args, y: seen.append((args[0], y)))
    model(IMAGES)
    ((h, y),) = seen
    theirs = []
    for ours in (block.conv1, block.conv2):
        conv = scaled(16, 16, 3, gamma=gamma, bias=ours.bias is not None)
        state = {k: v for k, v in ours.state_dict().items() if k in ("weight", "bias")}
        conv.load_state_dict(state | {"gain": ours.gain.detach().reshape(-1, 1, 1, 1)})
        theirs.append(conv)
    z = F.relu(h + block.bn1.bias.reshape(-1, 1, 1)) / 1.04**0.5
    z = theirs[1](F.relu(theirs[0](z)))
    torch.testing.assert_close(y, h + 0.2 * block.conv2.residual_scale * z, rtol=1e-4, atol=1e-4)


def test_depthwise_layers_are_standardised_but_not_gates_nor_single_weights():
    model = nn.Sequential(
        nets.conv(3, 16), nn.BatchNorm2d(16), nn.ReLU(), nets.conv(16, 16, groups=16), nn.BatchNorm2d(16), nn.ReLU(),
        nets.conv(16, 16, 1, groups=16), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 3),
    )  # fmt: skip
    for method in (mn.ScaledWS(), mn.GroupNormWS()):
        actions = {s.name: s.action for s in mn.plan(model, method, example=IMAGES).layers}
        assert actions == {"0": "standardise", "3": "standardise", "6": "keep"}
        actions = {s.name: s.action for s in mn.plan(nets.SqueezeExcite(), method, example=IMAGES).layers}
        assert actions["fc1"] == "keep"


def test_group_norm_takes_the_parameters_of_the_norm_it_replaces():
    model = nets.resnet()
    nn.init.zeros_(model.blocks[0].bn2.weight)
    gammas, betas = model.blocks[0].bn2.weight, model.blocks[0].bn2.bias
    report = mn.convert_(model, mn.GroupNormWS(groups=4), example=IMAGES)
    norm = model.blocks[0].bn2
    assert norm.weight is gammas
    assert norm.bias is betas
    assert not gammas.any()
    assert isinstance(norm, nn.GroupNorm)
    assert norm.num_groups == 4
    assert not report.new_parameters
    x = torch.randn(2, 8, 8, 8)
    z = model.blocks[0].conv1(x)
    w = model.blocks[0].conv1.weight
    flat = w.flatten(1)
    hat = ((flat - flat.mean(1, True)) / (flat.var(1, correction=0, keepdim=True) + 1e-6).sqrt()).view_as(w)
    torch.testing.assert_close(z, F.conv2d(x, hat, padding=1), rtol=1e-4, atol=1e-4)


def test_group_norm_on_vectors_sequences_unused_norms_and_children():
    mlp = mn.convert(nets.Mlp(), mn.GroupNormWS(), example=(2, 3, 64))
    assert (mlp.bn1.num_groups, mlp.bn2.num_groups) == (4, 4)  # 16 values to a group of a vector
    extra = nets.resnet()
    extra.spare = nn.BatchNorm2d(12, affine=False)
    report = mn.convert_(extra, mn.GroupNormWS(), example=IMAGES)
    assert isinstance(extra.spare, GroupNorm)
    assert extra.spare.num_groups == 12
    assert any("spare" in note for note in report.notes)
    act = zoo.timm().layers.BatchNormAct2d
    model = nn.Sequential(nets.conv(3, 16), act(16), nn.Flatten(), nn.Linear(1024, 3))
    gamma = model[1].weight
    report = mn.convert_(model, mn.GroupNormWS(), example=IMAGES)
    assert model[1].instead.weight is gamma
    assert report.moved_parameters["1.weight"] == "1.instead.weight"
    assert (model[1](torch.randn(2, 16, 8, 8)) >= 0).all()


def test_where_leaves_a_norm_and_its_layer():
    plan = mn.plan(nets.resnet(), mn.GroupNormWS(), example=IMAGES, where=lambda m, n: n != "blocks.0.bn1")
    assert {n.name: n.action for n in plan.norms}["blocks.0.bn1"] == "leave"
    model = mn.convert(nets.resnet(), mn.ScaledWS(), example=IMAGES, where=lambda m, n: n != "blocks.0.bn1")
    assert not isinstance(model.blocks[0].conv1, Standardised)
    mn.check(model)


@pytest.mark.parametrize("make", [nets.plain, nets.Dense, nets.Segmenter, nets.Mlp])
@pytest.mark.parametrize("method", [mn.GroupNormWS(), mn.ScaledWS()], ids=str)
def test_networks_without_residual_branches(make, method):
    example = {nets.plain: (2, 6, 8, 8), nets.Mlp: (2, 3, 64)}.get(make, (2, 3, 8, 8))
    model = mn.convert(make(), method, example=example)
    out = model(torch.randn(example))
    out = out["out"] if isinstance(out, dict) else out
    out.square().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_scaled_ws_makes_up_for_a_gates_half_but_not_for_silu():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nets.conv(3, 16), nets.conv(16, 16)
            self.bn_a, self.bn_b = nn.BatchNorm2d(16), nn.BatchNorm2d(16)
            self.gate, self.fc = nn.Conv2d(16, 16, 1), nn.Linear(16, 3)

        def forward(self, x, gated=True):
            x = self.bn_a(self.a(x))
            x = x * self.gate(x.mean((2, 3), keepdim=True)).sigmoid() if gated else x * x.sigmoid()
            return self.fc(self.bn_b(self.b(x)).mean((2, 3)))

    for gated, v in ((True, 0.25), (False, 1.0)):
        steps = mn.plan(Gated(), mn.ScaledWS(), example=(IMAGES, gated)).layers
        assert {s.name: s.v for s in steps}["b"] == v
