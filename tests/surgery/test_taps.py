"""Taps counted from shapes, against the convolution of ones by ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mimicnorm.surgery.record import record
from mimicnorm.surgery.taps import taps

LAYERS = {
    "ordinary": (nn.Conv2d(4, 6, 3, padding=1), (5, 7)),
    "no padding": (nn.Conv2d(4, 6, 3), (5, 7)),
    "larger than its map": (nn.Conv2d(4, 6, 5, padding=2), (2, 2)),
    "uneven": (nn.Conv2d(4, 6, (3, 5), stride=(2, 1), padding=(0, 2), dilation=(1, 2)), (6, 9)),
    "grouped": (nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), (4, 4)),
    "same, even": (nn.Conv2d(4, 6, 4, padding="same"), (3, 5)),
    "same, dilated": (nn.Conv1d(4, 6, 3, padding="same", dilation=2), (5,)),
    "three dimensions": (nn.Conv3d(4, 6, 3, padding=1), (2, 3, 4)),
    "transposed": (nn.ConvTranspose2d(4, 6, 4, stride=2, padding=1), (3, 5)),
    "transposed, gaps": (nn.ConvTranspose2d(4, 6, 2, stride=3, output_padding=1), (3, 4)),
    "transposed, uneven": (nn.ConvTranspose1d(4, 6, 5, stride=2, padding=1, dilation=2, groups=2), (4,)),
}


def of_layer(layer, size, before=None):
    net = nn.Sequential(*([before] if before is not None else []), layer)
    call = next(n for n in record(net, (2, 4, *size)).nodes if n.layer is not None)
    return taps(call, layer)


@pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel")
@pytest.mark.parametrize("name", LAYERS)
def test_acting_taps_are_what_ones_add_up_to(name):
    layer, size = LAYERS[name]
    ones = nn.utils.skip_init(type(layer), **arguments(layer)).requires_grad_(False)
    ones.weight.fill_(1.0)
    ones.bias.zero_()
    sums = ones(torch.ones(1, 4, *size))
    found = of_layer(layer, size)
    assert found.acting == pytest.approx(float(sums.mean()), rel=1e-6)
    per_output = layer.in_channels // layer.groups * layer.weight[0, 0].numel()
    assert found.kernel == per_output


def arguments(layer):
    names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups")
    extra = ("output_padding",) if layer.transposed else ()
    return {name: getattr(layer, name) for name in (*names, *extra)}


def test_zeros_put_around_the_input_before_count_as_padding():
    layer = nn.Conv2d(4, 6, 5)
    inside = of_layer(nn.Conv2d(4, 6, 5, padding=2), (2, 3))
    assert of_layer(layer, (2, 3), nn.ZeroPad2d(2)) == inside
    assert inside.geometry == "5x5 on 2x3"
    uneven = of_layer(nn.Conv2d(4, 6, 3), (4, 4), nn.ZeroPad2d((0, 1, 2, 0)))
    ones = F.conv2d(F.pad(torch.ones(1, 4, 4, 4), (0, 1, 2, 0)), torch.ones(1, 4, 3, 3))
    assert uneven.acting == pytest.approx(float(ones.mean()))
    cropped = of_layer(nn.Conv2d(4, 6, 3), (6, 6), nn.ZeroPad2d((-1, 0, -1, 1)))
    ones = F.conv2d(F.pad(torch.ones(1, 4, 6, 6), (-1, 0, -1, 1)), torch.ones(1, 4, 3, 3))
    assert cropped.acting == pytest.approx(float(ones.mean()))


@pytest.mark.parametrize("padding", [nn.ReflectionPad2d(1), nn.ReplicationPad2d(1), nn.CircularPad2d(1)])
def test_padding_with_data_acts(padding):
    found = of_layer(nn.Conv2d(4, 6, 3), (3, 3), padding)
    assert found.acting == found.kernel == found.counted == 36


def test_padding_modes_of_layers_act():
    found = of_layer(nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (3, 3))
    assert found.acting == found.kernel == 36


def test_linear_layers_have_no_taps_to_miss():
    layer = nn.Linear(7, 3)
    call = next(n for n in record(layer, (2, 5, 7)).nodes if n.layer is not None)
    assert taps(call, layer).acting == 7


def test_variance_is_that_of_drawn_weights():
    # a centred 5x5 layer on 3x3 maps behind a ReLU, and the same without centring
    torch.manual_seed(0)
    layer = nn.Conv2d(64, 64, 5, padding=2, bias=False)
    call = next(n for n in record(layer, (2, 64, 3, 3)).nodes if n.layer is not None)
    x = torch.randn(512, 64, 3, 3).relu()
    mean, second = float(x.mean()), float(x.square().mean())
    for centred in (True, False):
        power = second - mean**2 if centred else second
        weight = torch.randn(256, 64, 5, 5) * (power * 64 * 25) ** -0.5
        if centred:
            weight -= weight.mean((1, 2, 3), keepdim=True)
        found = float(F.conv2d(x, weight, padding=2).square().mean())
        assert taps(call, layer).variance(mean, second, centred) == pytest.approx(found, rel=0.05)
