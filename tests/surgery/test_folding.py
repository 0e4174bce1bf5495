"""Residual scalars go into weights, so that a converted network saves what a network without norms saves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mimicnorm import memory
from mimicnorm.methods import MimicNorm, NoNorm, SkipInit
from mimicnorm.surgery.convert import convert, convert_
from mimicnorm.surgery.planning import plan

IMAGES = (2, 16, 16, 16)


class Bottleneck(nn.Module):
    """16-4-16: the last layer's fan-in is below MimicNorm's threshold, so it is not centred."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Conv2d(16, 4, 1, bias=False), nn.Conv2d(4, 16, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(4), nn.BatchNorm2d(16)

    def forward(self, x):
        return F.relu(x + self.norm2(self.up(F.relu(self.norm1(self.down(x))))))


class Concatenated(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(16, 8, 1, bias=False), nn.Conv2d(16, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)

    def forward(self, x):
        return F.relu(x + self.norm(torch.cat((self.a(x), self.b(x)), 1)))


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)

    def forward(self, x):
        return F.relu(x + self.norm(F.avg_pool2d(self.conv(x), 3, 1, 1)))


class Shared(nn.Module):
    """Two norms on one layer: no weight can hold both scalars."""

    def __init__(self):
        super().__init__()
        self.conv, self.a, self.b = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.BatchNorm2d(16)

    def forward(self, x):
        x = F.relu(x + self.a(self.conv(x)))
        return F.relu(x + self.b(self.conv(x)))


class Activated(nn.Module):
    """The norm follows an activation, as in ConvMixer."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)

    def forward(self, x):
        return x + self.norm(F.gelu(self.conv(x)))


def network(block):
    return nn.Sequential(*(block() for _ in range(3)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))


@pytest.mark.parametrize("method", [MimicNorm(), MimicNorm(min_fan_in=2), SkipInit(alpha=0.5)], ids=str)
@pytest.mark.parametrize("block", [Bottleneck, Concatenated, Pooled])
def test_a_converted_network_saves_no_more_than_one_without_norms(block, method):
    shape = (16, *IMAGES[1:])
    saved = [
        memory.measure(convert(network(block), m, example=shape, init=None), shape).saved_bytes
        for m in (method, NoNorm())
    ]
    assert saved[0] <= 1.005 * saved[1]


@pytest.mark.parametrize("block", [Bottleneck, Concatenated, Pooled])
def test_a_folded_scalar_multiplies_its_branch(block):
    model = network(block)
    report = convert_(model, MimicNorm(last_norm=False), example=torch.randn(IMAGES))
    scalars = {name: p for name, p in report.new_parameters if name.endswith("residual_scale")}
    expected = {"Bottleneck": ["up"], "Concatenated": ["a", "b"], "Pooled": ["conv"]}[block.__name__]
    assert [*scalars] == [f"{i}.{name}.residual_scale" for i in range(3) for name in expected]
    x = torch.randn(IMAGES)
    with torch.no_grad():
        whole = model[0](x) if block is not Bottleneck else None
        for p in scalars.values():
            p.zero_()
        torch.testing.assert_close(model[0](x), F.relu(x))  # nothing is left of a branch whose scalar is zero
    assert whole is None or not torch.allclose(whole, F.relu(x))


@pytest.mark.parametrize(("block", "names"), [(Shared, "0.b, 1.a, 1.b"), (Activated, "0.norm, 1.norm, 2.norm")])
def test_what_cannot_be_folded_is_noted_with_its_cost(block, names):
    planned = plan(network(block), MimicNorm(), example=IMAGES)
    count = planned.totals()["scales"]
    (note,) = [n for n in planned.notes if "saved for backward" in n]
    assert note.startswith(f"{count} residual scalars (")
    assert f"{count * 16 * 16 * 16 * 4 / 2**20:.2f} MiB per sample" in note
    assert set(names.split(", ")) <= {n.name for n in planned.norms if n.action == "scale"}
