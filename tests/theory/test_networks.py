from __future__ import annotations

import pytest
import torch

from mimicnorm.theory import FiniteNetwork, Transition


def test_centring_weights_is_centring_the_layers_input():
    net = FiniteNetwork(6, 40, 3, Transition("weight_mean"), seed=1)
    layer = net.layers[1]
    a = torch.randn(5, 40, dtype=torch.float64)
    expected = layer.scale * ((a - a.mean(1, keepdim=True)) @ layer.weight.T)
    assert torch.allclose(layer(a), expected, atol=1e-12)


def test_plain_networks_have_one_yield_per_weight_layer():
    net = FiniteNetwork(6, 40, 4, Transition("straight", sigma_b2=0.1), outputs=3)
    shapes = [tuple(h.shape) for h in net.hidden(torch.ones(2, 6))]
    assert shapes == [(2, 40)] * 3 + [(2, 3)]
    assert net.layers[0].bias is None
    assert net.layers[1].bias is not None


def test_residual_networks_add_scaled_branches():
    net = FiniteNetwork(6, 40, 2, Transition("weight_mean"), residual=[0.0, 2.0], layers_per_block=1, outputs=3)
    x = torch.randn(4, 6, dtype=torch.float64)
    first, after_one, after_two, out = net.hidden(x)
    assert torch.equal(first, after_one)
    branch = net.layers[2](net.phi(after_one))
    assert torch.allclose(after_two, after_one + 2 * branch)
    assert out.shape == (4, 3)
    assert torch.equal(net(x), out)


@pytest.mark.parametrize("last", [False, True])
def test_batch_norm_normalises_all_layers_but_perhaps_the_last(last):
    net = FiniteNetwork(6, 40, 3, Transition("batch_norm"), outputs=40, last_norm=last)
    *_, before, out = net.hidden(torch.randn(64, 6, dtype=torch.float64))
    assert torch.allclose(before.var(0, correction=0), torch.ones(40, dtype=torch.float64), atol=1e-6)
    assert torch.allclose(out.mean(0), torch.zeros(40, dtype=torch.float64), atol=1e-9) == last


def test_the_seed_decides_the_weights():
    nets = [FiniteNetwork(4, 8, 2, Transition(), seed=s) for s in (0, 0, 1)]
    x = torch.ones(1, 4)
    assert torch.equal(nets[0](x), nets[1](x))
    assert not torch.equal(nets[0](x), nets[2](x))
