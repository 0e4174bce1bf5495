from __future__ import annotations

import copy

import torch
from torch import nn

from mimicnorm.layers import Remains, Scale, Shift, scale_output_


def test_shift_is_a_fresh_tensor_even_without_beta():
    x = torch.randn(2, 3, 4)
    for shift in (Shift(None), Shift(nn.Parameter(torch.zeros(3)))):
        y = shift(x)
        assert torch.equal(y, x)
        assert y.data_ptr() != x.data_ptr()


def test_shift_saves_nothing_for_the_backward_pass():
    saved = []
    shift = Shift(nn.Parameter(torch.zeros(3)))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        shift(torch.randn(2, 3, 4, 4, requires_grad=True))
    assert not saved


def test_scale_multiplies_and_adds_per_channel():
    scale = Scale(torch.tensor(0.5), nn.Parameter(torch.tensor([1.0, 2.0])))
    x = torch.ones(1, 2, 2)
    assert torch.equal(scale(x), torch.tensor([[[1.5, 1.5], [2.5, 2.5]]]))
    assert scale.residual_scale.shape == (1,)


def test_remains_runs_children_in_order_under_their_names():
    rest = Remains(Shift(None), {"drop": nn.Dropout(0.0), "act": nn.PReLU(4)})
    assert list(rest.state_dict()) == ["act.weight"]
    assert torch.equal(rest(-torch.ones(1, 4, 2)), torch.full((1, 4, 2), -0.25))


def test_scaled_output_keeps_the_layer():
    layer = nn.Conv2d(2, 2, 1)
    plain = copy.deepcopy(layer)
    assert scale_output_(layer, nn.Parameter(torch.tensor([0.5]))) is layer
    x = torch.randn(1, 2, 3, 3)
    torch.testing.assert_close(layer(x), 0.5 * plain(x))
    assert isinstance(copy.deepcopy(layer), nn.Conv2d)
