"""The recording: what read what, in models that trace badly, without a trace left."""

from __future__ import annotations

import random

import nets
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mimicnorm.errors import ExampleError
from mimicnorm.surgery.example import call_arguments
from mimicnorm.surgery.ops import Kind, canonical
from mimicnorm.surgery.record import is_batch_norm, record


def only(graph, **wanted):
    found = [n for n in graph.nodes if all(getattr(n, k) == v for k, v in wanted.items())]
    assert len(found) == 1, found
    return found[0]


class Functional(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)
        self.bn = nn.BatchNorm2d(4)
        self.run = run

    def forward(self, x):
        return self.run(self, x)


def graph_of(run):
    return record(Functional(run), (2, 3, 4, 4))


def test_a_batch_norm_reads_its_layer():
    graph = record(nets.resnet(), (2, 3, 8, 8))
    norm = only(graph, norm="blocks.0.bn1")
    assert norm.inputs[0].layer == "blocks.0.conv1"
    assert [n.op for n in norm.users] == ["relu"]
    assert graph.outputs[0].layer == "fc"


def test_layers_are_known_by_their_weight_not_by_hooks():
    graph = graph_of(lambda m, x: m.bn(F.conv2d(m.a.forward(x), m.b.weight, m.b.bias)))
    assert only(graph, layer="a").inside_module
    assert not only(graph, layer="b").inside_module


def test_inplace_operations_make_new_nodes_for_every_view():
    def run(m, x):
        y = m.a(x)
        flat, half = y.view(2, -1), y[:, :2]
        F.relu(y, inplace=True)
        return flat.sum() + half.sum()

    graph = graph_of(run)
    relu = only(graph, op="relu")
    total = graph.outputs[0]
    assert total.ancestors >> relu.index & 1
    sums = [n for n in graph.nodes if n.op == "sum"]
    assert all(n.ancestors >> relu.index & 1 for n in sums)


def test_inplace_on_one_chunk_leaves_the_other():
    def run(m, x):
        left, right = m.a(x).chunk(2, 1)
        F.relu(left, inplace=True)
        return m.b(torch.cat((left, right * 2), 1))

    graph = graph_of(run)
    doubled = only(graph, op="mul")
    assert not doubled.ancestors >> only(graph, op="relu").index & 1


def test_writing_a_slice_depends_on_both():
    def run(m, x):
        out = torch.zeros(2, 8, 4, 4)
        out[:, :4] = m.a(x)
        out[:, 4:] = m.b(m.a(x))
        return out

    graph = graph_of(run)
    layers = {n.layer for n in graph.nodes if n.layer and graph.outputs[0].ancestors >> n.index & 1}
    assert layers == {"a", "b"}


def test_shape_of_another_tensor_is_not_a_read():
    graph = graph_of(lambda m, x: m.a(x).flatten(1).view_as(x.new_empty(2, 64)).reshape_as(torch.empty(2, 64)))
    conv = only(graph, layer="a")
    assert len(conv.users) == 1


def test_factories_do_not_carry_data():
    graph = graph_of(lambda m, x: m.a(x) * x.new_empty(2, 1, 1, 1).bernoulli_(0.5))
    assert only(graph, op="mul").kind is Kind.CONSTANT


def test_unused_reads_are_forgotten():
    def run(m, x):
        y = m.a(x)
        y.mean()  # a statistic nobody looks at
        return m.bn(y)

    assert len(only(graph_of(run), layer="a").users) == 1


def test_operations_no_function_sees_are_bridged_by_their_module():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.ops.aten.mul.Tensor(x, x)

        @staticmethod
        def backward(ctx, g):
            return g

    class Wrap(nn.Module):
        def forward(self, x):
            return Square.apply(x)

    model = nn.Sequential(nn.Conv2d(3, 4, 1), Wrap(), nn.BatchNorm2d(4))
    graph = record(model, (2, 3, 4, 4))
    assert only(graph, norm="2").ancestors >> only(graph, layer="0").index & 1


def test_functional_batch_norm_on_data_is_noted_and_on_weights_is_not():
    graph = graph_of(lambda m, x: F.batch_norm(m.a(x), torch.zeros(4), torch.ones(4)))
    assert graph.functional_norms == [""]

    def standardised(m, x):
        w = F.batch_norm(m.a.weight.reshape(1, 4, -1), None, None, training=True).reshape_as(m.a.weight)
        return F.conv2d(x, w, m.a.bias)

    assert not graph_of(standardised).functional_norms


def test_frozen_batch_norm_is_one_node_before_its_activation():
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
                self.register_buffer(name, torch.full((4,), value))
            self.act = nn.ReLU()

        def forward(self, x):
            scale = (self.weight * (self.running_var + 1e-5).rsqrt()).view(1, -1, 1, 1)
            return self.act(x * scale + (self.bias - self.running_mean).view(1, -1, 1, 1))

    model = nn.Sequential(nn.Conv2d(3, 4, 1), Frozen())
    assert is_batch_norm(model[1])
    assert not is_batch_norm(nn.InstanceNorm2d(4, affine=True, track_running_stats=True))
    norm = only(record(model, (2, 3, 4, 4)), norm="1")
    assert norm.inputs[0].layer == "0"
    assert [u.op for u in norm.users] == ["relu"]


def test_control_flow_on_values_falls_back_to_values():
    def run(m, x):
        y = m.a(x)
        return m.b(y) if y.sum().item() > -1e9 else y

    assert only(graph_of(run), layer="b")
    assert only(graph_of(lambda m, x: m.b(m.a(torch.from_numpy(x.numpy())) if x.numpy().any() else m.a(x))), layer="b")


def test_outputs_of_any_structure():
    class Result:
        def __init__(self, a, b):
            self.a, self.b = a, b

    for wrap in (lambda a, b: (a, [b]), lambda a, b: {"a": a, "b": {"c": b}}, Result):
        graph = graph_of(lambda m, x, wrap=wrap: wrap(m.a(x), m.b(m.a(x))))
        assert [n.layer for n in graph.outputs] == ["a", "b"]


class Restless(nn.Module):
    """Changes everything it can on a forward pass."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
        self.cache, self.calls, self.log = None, 0, {}

    def forward(self, x):
        self.calls += 1
        self.cache = self.bn(self.conv(x))
        self.log["last"] = self.cache
        self.register_buffer("late", self.cache.mean())
        random.random()
        return F.dropout(self.cache, 0.5)


@pytest.mark.parametrize("example", [(2, 3, 4, 4), (2, 5, 4, 4)])
def test_the_model_and_the_generators_are_left_as_they_were(example):
    model = Restless()
    model.bn.eval()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    rng, python_rng = torch.get_rng_state(), random.getstate()
    parameters = [id(p) for p in model.parameters()]
    if example[1] == 3:
        record(model, example)
    else:
        with pytest.raises(ExampleError, match="inside 'conv'"):
            record(model, example)
    assert (model.cache, model.calls, model.log) == (None, 0, {})
    assert model.training
    assert not model.bn.training
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.equal(rng, torch.get_rng_state())
    assert python_rng == random.getstate()
    assert parameters == [id(p) for p in model.parameters()]


def test_a_batch_of_one_records():
    record(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), (1, 4))


@pytest.mark.parametrize("example", [torch.ones(2, 3, 4, 4, dtype=torch.int64), torch.ones(2, 3, 4, 4).double()])
def test_wrong_types_are_told_by_layer(example):
    with pytest.raises(ExampleError, match=r"layer 'a'.*own type"):
        record(Functional(lambda m, x: m.a(x)), example)


@pytest.mark.parametrize("example", [None, "image", 3, (), (0, 3, 4, 4), [1.0, 2.0]])
def test_examples_that_are_none(example):
    with pytest.raises(ExampleError, match="example"):
        call_arguments(nn.Linear(2, 2), example)


def test_examples_of_every_form():
    x = torch.ones(2, 3)
    assert call_arguments(nn.Linear(3, 1), x) == ((x,), {})
    assert call_arguments(nn.Linear(3, 1), {"input": x}) == ((), {"input": x})
    assert call_arguments(nn.Linear(3, 1), (x, 1)) == ((x, 1), {})
    args, _ = call_arguments(nn.Linear(3, 1).double(), torch.Size([2, 3]))
    assert args[0].dtype == torch.float64


def test_meta_and_shared_modules():
    shared = nn.Conv2d(4, 4, 1)
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    assert record(model, (2, 3, 4, 4)).outputs
    twice = nn.Sequential(shared, nn.ReLU(), shared)
    assert len(record(twice, (2, 4, 4, 4)).calls("0")) == 2


@pytest.mark.parametrize(
    ("name", "plain"),
    [("__iadd__", "add"), ("__rsub__", "sub"), ("__truediv__", "div"), ("relu_", "relu"), ("add", "add")],
)
def test_names(name, plain):
    assert canonical(name) == plain


def test_a_nested_tensor_is_refused_in_words():
    rows = torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(5, 4)], layout=torch.jagged)
    with pytest.raises(ExampleError, match="nested tensor, which cannot be recorded: give a padded one"):
        record(nn.Linear(4, 4), (rows,))
