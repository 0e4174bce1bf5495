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
    nets = [FiniteNetwork(6, 40, 4, Transition("straight", sigma_b2=0.1), outputs=3, seed=s) for s in (0, 0, 1)]
    steps, same, others = (list(net.hidden(torch.ones(2, 6))) for net in nets)
    assert [tuple(h.shape) for h in steps] == [(2, 40)] * 3 + [(2, 3)]
    assert torch.equal(steps[-1], same[-1])
    assert not torch.equal(steps[-1], others[-1])
    assert [layer.bias is None for layer in nets[0].layers] == [True, False, False, False]


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
