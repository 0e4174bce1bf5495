from __future__ import annotations

import pytest
import torch
from torch import nn

from mimicnorm.deploy import affine as fold_affine
from mimicnorm.deploy.affine import Affine
from mimicnorm.errors import DeployError

LAYERS = {
    "linear": (nn.Linear(6, 4), (5, 6)),
    "no bias": (nn.Conv2d(6, 4, 3, bias=False), (2, 6, 5, 5)),
    "grouped": (nn.Conv1d(6, 4, 3, groups=2), (2, 6, 5)),
    "depthwise": (nn.Conv3d(6, 12, 1, groups=6), (2, 6, 2, 2, 2)),
    "transposed, grouped": (nn.ConvTranspose2d(6, 4, 3, stride=2, groups=2), (2, 6, 5, 5)),
}


def along(t, x):
    return t.reshape(1, -1, *[1] * (x.dim() - 2))


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_after_a_layer(name):
    layer, shape = LAYERS[name]
    layer, x = layer.double(), torch.randn(shape).double()
    y = layer(x)
    scale, shift = torch.randn(2, y.shape[1]).double()
    fold_affine.after(layer, Affine(scale, shift))
    torch.testing.assert_close(layer(x), y * along(scale, y) + along(shift, y))


@pytest.mark.parametrize("name", [n for n in LAYERS if "transposed" not in n])
@torch.no_grad()
def test_before_a_layer(name):
    layer, shape = LAYERS[name]
    layer, x = layer.double(), torch.randn(shape).double()
    scale, shift = torch.randn(2, 6).double()
    y = layer(x * along(scale, x) + along(shift, x))
    fold_affine.before(layer, Affine(scale, shift))
    torch.testing.assert_close(layer(x), y)


@pytest.mark.parametrize(("shape", "dim"), [((3, 6), 1), ((3, 6, 5), 1), ((3, 6, 5, 5), 1), ((3, 5, 6), -1)])
@pytest.mark.parametrize("scalar", [True, False])
@torch.no_grad()
def test_standalone(shape, dim, scalar):
    x, width = torch.randn(shape), 1 if scalar else 6
    scale, shift = torch.randn(2, width)
    layer = fold_affine.standalone(Affine(scale, shift, dim), torch.Size(shape), nn.Linear(1, 1), "bn")
    wide = [
        t.expand(6).reshape([-1 if d == dim % len(shape) else 1 for d in range(len(shape))]) for t in (scale, shift)
    ]
    torch.testing.assert_close(layer(x), x * wide[0] + wide[1])


def test_channels_in_the_middle_are_refused_by_name():
    with pytest.raises(DeployError, match=r"stem\.bn: no layer"):
        fold_affine.standalone(Affine(None, torch.ones(6), 2), torch.Size((2, 3, 6, 5)), nn.Linear(1, 1), "stem.bn")
