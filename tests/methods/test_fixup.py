"""Fixup and SkipInit against their papers: what starts at zero, what is scaled by what, where the scalars stand."""

from __future__ import annotations

import nets
import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import nn

import mimicnorm as mn
from mimicnorm.errors import RefusedError

IMAGES = torch.randn(4, 3, 8, 8)


def deep(make, blocks: int) -> nn.Module:
    return nets.Residual([make(16, 16) if make is nets.Block else make(16) for _ in range(blocks)], 16)


def outputs_of(model: nn.Module, kind: type) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(input, output) of every module of a class."""
    seen: list = []
    for m in model.modules():
        if isinstance(m, kind):
            m.register_forward_hook(lambda m, args, y: seen.append((args[0].clone(), y.clone())))
    model(IMAGES)
    return seen


@pytest.mark.parametrize("method", [mn.Fixup(), mn.SkipInit(), mn.ScaledWS()], ids=str)
def test_every_block_starts_as_its_shortcut(method):
    model = mn.convert(nets.resnet(), method, example=IMAGES)
    for block, (x, y) in zip(model.blocks, outputs_of(model, nets.Block), strict=True):
        skip = x if block.down is None else block.down(x)
        torch.testing.assert_close(y, F.relu(skip))
    preact = mn.convert(nets.preact(), method, example=IMAGES)
    for x, y in outputs_of(preact, nets.PreBlock):
        torch.testing.assert_close(y, x)


@pytest.mark.parametrize("make", [nets.Block, nets.PreBlock])
def test_fixups_zeros_and_its_scaling_by_depth(make):
    torch.manual_seed(0)
    model = mn.convert(deep(make, 9), mn.Fixup(), example=IMAGES)
    assert not model(IMAGES).any()
    assert not model.fc.weight.any()
    for block in model.blocks:
        assert not block.conv2.weight.any()
        he = (2 / (16 * 9)) ** 0.5
        assert float(block.conv1.weight.detach().std()) == pytest.approx(he * 9**-0.5, rel=0.1)
    plan = mn.plan(zoo.torchvision().models.resnet50(), mn.Fixup(), example=(2, 3, 64, 64))
    gains = {step.name: step.gain for step in plan.layers}
    assert gains["layer1.1.conv1"] == gains["layer3.2.conv2"] == pytest.approx(2**0.5 * 16**-0.25)
    assert gains["layer1.0.conv3"] == gains["fc"] == 0
    assert gains["layer2.0.downsample.0"] == pytest.approx(2**0.5)


def test_fixups_block_is_its_papers_formula():
    model = mn.convert(nets.resnet(), mn.Fixup(), example=IMAGES)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0.3, 0.3)
    (x, y), *_ = outputs_of(model, nets.Block)
    block = model.blocks[0]
    z = F.conv2d(x + block.conv1.input_bias, block.conv1.weight, padding=1)
    z = F.relu(z + block.bn1.scalar_bias)
    z = F.conv2d(z + block.conv2.input_bias, block.conv2.weight, padding=1)
    z = z * block.bn2.residual_scale + block.bn2.scalar_bias
    torch.testing.assert_close(y, F.relu(z + x))
    scalars = [p for n, p in model.named_parameters() if n.endswith(("_bias", "_scale"))]
    assert all(p.shape == (1,) for p in scalars)
    assert model.stem[0].input_bias is None  # the network's input is left alone, as in the authors' code
    assert model.fc.input_bias is not None
    assert isinstance(model.blocks[1].down[1], nn.Identity)


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_skipinits_branch_is_alpha_times_all_of_it(alpha):
    model = mn.convert(nets.resnet(), mn.SkipInit(alpha=alpha), example=IMAGES)
    block = model.blocks[0]
    with torch.no_grad():
        block.conv1.bias.normal_()
        block.conv2.bias.normal_()
    (x, y), *_ = outputs_of(model, nets.Block)
    z = F.conv2d(F.relu(block.conv1(x)), block.conv2.weight, block.conv2.bias, padding=1)
    torch.testing.assert_close(y, F.relu(x + alpha * z))
    assert list(block.conv2.state_dict()) == ["weight", "bias", "residual_scale"]
    assert isinstance(block.bn2, nn.Identity)


class ReluAtTheEnd(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.conv, self.bn, self.fc = (
            nets.conv(3, 16),
            nets.conv(16, 16),
            nn.BatchNorm2d(16),
            nn.Linear(16, 5),
        )

    def forward(self, x):
        x = self.stem(x)
        return self.fc((x + F.relu(self.bn(self.conv(x)))).mean((2, 3)))


class WithoutSkip(nn.Module):
    """As RepVGG's first blocks: two branches and no skip beside them."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nets.conv(3, 16), nets.conv(3, 16, 1)
        self.bn_a, self.bn_b, self.fc = nn.BatchNorm2d(16), nn.BatchNorm2d(16), nn.Linear(16, 5)

    def forward(self, x):
        return self.fc(F.relu(self.bn_a(self.a(x)) + self.bn_b(self.b(x))).mean((2, 3)))


@pytest.mark.parametrize("method", [mn.Fixup(), mn.SkipInit()], ids=str)
@pytest.mark.parametrize("make", [nets.plain, nets.Dense, ReluAtTheEnd, WithoutSkip])
def test_a_network_without_residual_branches_is_refused_by_name(method, make):
    channels = 6 if make is nets.plain else 3
    with pytest.raises(RefusedError, match=f"{type(method).__name__} is made for residual branches") as caught:
        mn.convert(make(), method, example=(2, channels, 8, 8))
    assert len(caught.value.refusals) == 1


def test_a_branch_behind_a_relu_is_told_and_not_zeroed():
    plan = mn.plan(ReluAtTheEnd(), mn.ScaledWS(), example=IMAGES)
    assert any("bn" in note and "ReLU" in note for note in plan.notes)
    assert plan.totals()["residual_scalars"] == 0
    assert mn.plan(ReluAtTheEnd(), mn.ScaledWS(skip_gain=1.0), example=IMAGES).totals()["residual_scalars"] == 1


def test_gates_and_inner_branches():
    plan = mn.plan(nets.SqueezeExcite(), mn.Fixup(), example=IMAGES)
    steps = {step.name: step for step in plan.layers}
    assert (steps["fc1"].action, steps["conv1"].gain, steps["head"].gain) == ("keep", 0.0, 0.0)
    # A block within a block: the layer goes by the innermost branch, and all three are counted.
    inner = nn.Sequential(nets.PreBlock(16), nets.PreBlock(16))

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.inner, self.last = nets.conv(3, 16), inner, nets.conv(16, 16)
            self.bn, self.fc = nn.BatchNorm2d(16), nn.Linear(16, 5)

        def forward(self, x):
            x = self.stem(x)
            return self.fc((x + self.bn(self.last(self.inner(x)))).mean((2, 3)))

    steps = {step.name: step for step in mn.plan(Outer(), mn.Fixup(), example=IMAGES).layers}
    assert steps["inner.0.conv1"].gain == pytest.approx(2**0.5 * 3**-0.5)
    assert steps["inner.1.conv2"].gain == steps["last"].gain == 0
