"""Owners, sums, carriers and heads, each pattern by hand."""

from __future__ import annotations

import nets
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mimicnorm as mn
from mimicnorm.surgery import flow
from mimicnorm.surgery.ops import Kind
from mimicnorm.surgery.record import record


class Net(nn.Module):
    """Six convolutions and norms of 8 channels; the wiring is given."""

    def __init__(self, run):
        super().__init__()
        self.c = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(6))
        self.n = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(6))
        self.run = run

    def forward(self, x):
        return self.run(self.c, self.n, x)


def graph(run):
    return record(Net(run), (2, 8, 4, 4))


def owner_of(g, name="n.0"):
    found = flow.owner(g.calls(name)[0])
    return found.layer if found is not None else None


@pytest.mark.parametrize(
    ("between", "owned"),
    [
        (lambda y: y, True),
        (lambda y: F.pad(y, (1, 1)), True),
        (lambda y: F.dropout(y), True),
        (lambda y: y.flatten(2).unflatten(2, (4, 4)), True),
        (lambda y: F.max_pool2d(y, 2), False),
        (lambda y: F.relu(y), False),
        (lambda y: y + 1, False),
    ],
)
def test_an_owner_feeds_its_norm_through_views_padding_and_dropout_only(between, owned):
    assert owner_of(graph(lambda c, n, x: n[0](between(c[0](x))))) == ("c.0" if owned else None)


@pytest.mark.parametrize(
    ("choose", "owned"),
    [
        (lambda y, x: y.masked_fill(x > 0, 0), True),
        (lambda y, x: torch.masked_fill(y, mask=x > 0, value=0.0), True),
        (lambda y, x: y.masked_fill(x > 0, -1), False),
        (lambda y, x: y.masked_fill(y > 0, 0), False),
        (lambda y, x: y[x.flatten(1).argmax(0)[:2]], True),
        (lambda y, x: torch.zeros(9, 8, 4, 4)[y.flatten(1).argmax(0)[:2]], False),
    ],
)
def test_an_owner_may_be_masked_and_chosen_from_by_others(choose, owned):
    g = graph(lambda c, n, x: n[0](choose(c[0](x), x)))
    assert owner_of(g) == ("c.0" if owned else None)
    assert not flow.on_raw_input(g.calls("n.0")[0])


def test_an_owner_has_no_other_reader():
    def run(c, n, x):
        y = c[0](x)
        return n[0](y) + y

    assert owner_of(graph(run)) is None


def test_a_norm_on_the_input():
    assert flow.on_raw_input(graph(lambda c, n, x: c[0](n[0](F.avg_pool2d(x, 2)))).calls("n.0")[0])
    assert not flow.on_raw_input(graph(lambda c, n, x: n[0](c[0](x))).calls("n.0")[0])


def test_reached_layers_stop_at_the_first():
    g = graph(lambda c, n, x: c[2](c[1](F.avg_pool2d(F.relu(n[0](x)), 1))) + c[3](n[0](x)))
    assert [r.layer for r in flow.reached_layers(g.calls("n.0")[0])] == ["c.1"]
    assert [r.layer for r in flow.reached_layers(g.calls("n.0")[1])] == ["c.3"]


def test_reached_layers_see_through_a_written_out_swish_but_not_a_gate():
    g = graph(lambda c, n, x: c[0](swish(n[0](x))))
    assert [r.layer for r in flow.reached_layers(g.calls("n.0")[0])] == ["c.0"]


def swish(y):
    return y * torch.sigmoid(y)


def single_sum(run):
    (s,) = flow.sums(graph(run))
    return s


def ends(s):
    return [e.norm or e.layer or e.kind for b in s.branches for e in flow.ends(b)]


def test_the_skip_carries():
    s = single_sum(lambda c, n, x: x + n[0](c[0](x)))
    assert s.carrier.kind is Kind.INPUT
    assert ends(s) == ["n.0"]


def test_the_projection_carries_by_fewest_layers():
    s = single_sum(lambda c, n, x: n[0](c[0](x)) + n[1](c[1](F.relu(c[2](x)))))
    assert [e.norm for e in flow.ends(s.carrier)] == ["n.0"]
    assert ends(s) == ["n.1"]


def test_a_pooled_shortcut_carries_without_a_layer():
    def run(c, n, x):
        y = F.relu(c[5](x))
        return F.avg_pool2d(y, 2) + n[0](F.avg_pool2d(c[0](y), 2))

    s = single_sum(run)
    assert s.carrier.op == "avg_pool2d"
    assert ends(s) == ["n.0"]


def test_a_tie_has_no_carrier():
    s = single_sum(lambda c, n, x: n[0](c[0](x)) + n[1](c[1](x)))
    assert s.carrier is None
    assert ends(s) == ["n.0", "n.1"]


def test_nested_sums_with_one_reader_are_one():
    s = single_sum(lambda c, n, x: n[0](c[0](x)) + n[1](c[1](x)) + x)
    assert len(s.operands) == 3
    assert s.carrier.kind is Kind.INPUT


def test_more_nested_sums_than_python_has_stack_for():
    def run(c, n, x):
        total = n[0](c[0](x))
        for _ in range(1200):
            total = total + x
        return total

    s = single_sum(run)
    assert len(s.operands) == 1201
    assert ends(s) == ["n.0"]
    planned = mn.plan(Net(run), mn.MimicNorm(last_norm=False), example=(2, 8, 4, 4))
    assert planned.ok


def test_an_addition_that_spreads_over_positions_is_a_shift():
    g = graph(lambda c, n, x: n[0](c[0](x)) + c[1](x).mean((2, 3), keepdim=True))
    assert not flow.sums(g)
    assert [n.norm for n in g.outputs[0].inputs] == ["n.0", None]


def test_inplace_and_scaled_sums():
    def run(c, n, x):
        y = n[0](c[0](x))
        y += x
        return y - 1

    s = single_sum(run)
    assert s.carrier.kind is Kind.INPUT
    assert ends(s) == ["n.0"]


@pytest.mark.parametrize(
    "after",
    [
        F.relu,
        lambda y: F.dropout(y, 0.1),
        lambda y: y * torch.ones(8, 1, 1),
        lambda y: y * y.new_empty(2, 1, 1, 1).bernoulli_(0.5).div_(0.5),
        lambda y: y * y.mean((2, 3), keepdim=True).sigmoid(),
        lambda y: y * y.mean((2, 3), keepdim=True).sigmoid().expand_as(y),
        lambda y: F.interpolate(F.max_pool2d(y, 2), size=(4, 4)),
        swish,
    ],
)
def test_an_end_is_found_behind_what_follows_it(after):
    assert ends(single_sum(lambda c, n, x: x + after(n[0](c[0](x))))) == ["n.0"]


def test_gate_layers_are_told_from_the_gated():
    g = record(nets.SqueezeExcite(), (2, 3, 8, 8))
    assert flow.gate_layers(g) == {"fc1", "fc2"}


def test_the_larger_of_two_and_a_stack_that_is_summed():
    s = single_sum(lambda c, n, x: x + torch.maximum(n[0](c[0](x)), n[1](c[1](x))))
    assert ends(s) == ["n.0", "n.1"]
    s = single_sum(lambda c, n, x: torch.stack([x, n[0](c[0](x)), n[1](c[1](x))]).sum(0))
    assert s.carrier.kind is Kind.INPUT
    assert ends(s) == ["n.0", "n.1"]


def test_only_what_a_gate_alone_needs_is_a_gate():
    def attention(c, n, x):  # the gate comes from deeper layers that also feed the output
        deep = F.relu(n[1](c[1](F.relu(n[0](c[0](x))))))
        skip = x * torch.sigmoid(c[2](deep))
        return c[3](skip + deep)

    assert flow.gate_layers(graph(attention)) == {"c.2"}
