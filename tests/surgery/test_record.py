"""The recording: what read what, in models that trace badly, without a trace left."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace

import nets
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mimicnorm as mn
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


def test_an_average_over_all_batches_is_recorded_on_fake_tensors():
    norm = nn.BatchNorm1d(4, momentum=None)
    assert record(norm, (3, 4)).fake
    assert norm.momentum is None


@pytest.mark.parametrize("reads_values", [True, False])
def test_a_batch_norm_gives_its_memory_format(reads_values):
    def run(model, x):
        y = model.bn(model.a(x).transpose(2, 3))
        assert not reads_values or y.mean().item() < 1
        return model.b(y).flatten(1) + y.view(len(x), -1)

    assert graph_of(run).fake is not reads_values


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


class Result:
    def __init__(self, a, b):
        self.a, self.b = a, b


class Slots:
    __slots__ = ("a", "b")

    def __init__(self, a, b):
        self.a, self.b = a, b


class Outputs(OrderedDict):
    """As the outputs of other packages: a dict of a class of its own."""


@dataclass
class Attributes(OrderedDict):
    """A dict by class alone: what it has is in its attributes."""

    a: torch.Tensor
    b: torch.Tensor


OUTPUTS = {
    "tuple": lambda a, b: (a, [b]),
    "dict": lambda a, b: {"a": a, "b": {"c": b}},
    "object": Result,
    "slots": Slots,
    "subclass of dict": lambda a, b: Outputs(a=a, b=Outputs(c=b)),
    "attributes": Attributes,
    "namespace": lambda a, b: SimpleNamespace(a=a, b=SimpleNamespace(c=[b])),
    "nested": lambda a, b: {"a": [SimpleNamespace(a=a)], "b": Result(None, Outputs(b=b))},
}


@pytest.mark.parametrize("wrap", OUTPUTS)
def test_outputs_of_any_structure(wrap):
    graph = graph_of(lambda m, x: OUTPUTS[wrap](m.a(x), m.b(m.a(x))))
    assert [n.layer for n in graph.outputs] == ["a", "b"]


def test_an_output_that_holds_itself_and_far_too_much():
    def run(m, x):
        result = SimpleNamespace(a=m.a(x), model=m, run=run)
        result.me, result.far = result, SimpleNamespace(a=SimpleNamespace(a=SimpleNamespace(a=m.b(result.a))))
        return result

    assert [n.layer for n in graph_of(run).outputs] == ["a"]


class OnlyInTraining(nn.Module):
    """Has a BatchNorm that never runs, and cannot run in evaluation mode."""

    def __init__(self, error: Exception, reads_values: bool):
        super().__init__()
        self.conv, self.bn, self.idle = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.error, self.reads_values = error, reads_values

    def forward(self, x):
        if not self.training and (not self.reads_values or x.sum() < 1e9):
            raise self.error
        return self.bn(self.conv(x))


@pytest.mark.parametrize("reads_values", [True, False])
@pytest.mark.parametrize("error", [ValueError("no evaluation"), RuntimeError("no numpy"), ExampleError("of a model")])
def test_a_second_recording_that_raises_leaves_the_first(error, reads_values):
    assert record(OnlyInTraining(error, reads_values), (2, 3, 4, 4)).norms() == {"bn"}


class DropsBlocks(nn.Module):
    """Leaves its block out, in training mode."""

    def __init__(self):
        super().__init__()
        self.stem, self.block = nn.Conv2d(3, 4, 1), nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))

    def forward(self, x):
        x = self.stem(x)
        return x if self.training else x + self.block(x)


def test_norms_that_only_evaluation_mode_shows_are_recorded_there():
    graph = record(DropsBlocks(), (2, 3, 4, 4))
    assert graph.norms() == {"block.1"}
    assert not graph.training
    assert graph.other_mode is not None
    assert graph.other_mode.training


class Foreign(nn.Module):
    """A linear layer of another package: a class of its own with a matrix as weight."""

    def __init__(self, i: int, o: int):
        super().__init__()
        self.in_channels, self.out_channels = i, o
        self.weight, self.bias = nn.Parameter(torch.randn(o, i) / i**0.5), nn.Parameter(torch.zeros(o))

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


def test_a_linear_layer_of_any_class_is_one():
    def model():
        return nn.Sequential(Foreign(6, 8), nn.BatchNorm1d(8), nn.ReLU(), Foreign(8, 4))

    graph = record(model(), (4, 6))
    assert [n.layer for n in graph.nodes if n.layer] == ["0", "3"]
    tied = Functional(lambda m, x: F.linear(m.table(x), m.table.weight))
    tied.table = nn.Embedding(5, 4)
    assert not [n for n in record(tied, torch.zeros(2, 3, dtype=torch.long)).nodes if n.layer]
    for init in ("theory", "calibrate"):
        report = mn.convert_(model(), mn.MimicNorm(min_fan_in=1), example=torch.randn(8, 6), init=init)
        assert [(step.name, step.action) for step in report.layers] == [("0", "centre")]


def test_all_samples_as_channels_of_one_is_an_instance_norm():
    def run(m, x):
        y = m.bn(m.a(x))
        y = F.batch_norm(y.reshape(1, -1, *y.shape[2:]), None, None, training=True).reshape(y.shape)
        return m.b(y).mean((2, 3))

    graph = graph_of(run)
    assert only(graph, kind=Kind.OTHER_NORM).op == "instance_norm"
    assert not graph.functional_norms
    mn.plan(Functional(run), mn.NoNorm(), example=(2, 3, 4, 4)).require()


def test_a_concat_of_nothing():
    def run(m, x):
        y = m.bn(m.a(x))
        return m.b(torch.cat((y, torch.cat((y[:, :0], y[:, 4:]), 1)), 1)).mean((2, 3))

    mn.plan(Functional(run), mn.NoNorm(), example=(2, 3, 4, 4)).require()


@pytest.mark.parametrize("init", ["theory", "calibrate"])
def test_another_default_device(init):
    model, example = nets.resnet(), torch.randn(4, 3, 8, 8)
    model.blocks.append(Functional(lambda m, x: torch.cat([half.relu() for half in x.chunk(2)])))  # tried on values
    torch.set_default_device("meta")
    try:
        report = mn.convert_(model, mn.MimicNorm(min_fan_in=1), example=example, init=init)
    finally:
        torch.set_default_device(None)
    assert all(not p.is_meta for p in model.parameters())
    assert not [note for note in report.notes if "could not be tried" in note]


@pytest.mark.parametrize("reads_values", [True, False])
@pytest.mark.parametrize("init", ["theory", "calibrate"])
def test_a_tensor_that_was_made_in_inference_mode(init, reads_values):
    model = Functional(lambda m, x: (m.bn(m.a(x)) * m.kept).mean((2, 3)) if not reads_values or x.sum() < 1e9 else x)
    with torch.inference_mode():
        model.kept = torch.full((4, 1, 1), 2.0)
    mn.convert_(model, mn.NoNorm(), example=torch.randn(4, 3, 4, 4), init=init)
    assert model.kept.is_inference()


@pytest.mark.parametrize("example", [(2, 3, 4, 4), (2, 5, 4, 4)])
def test_the_model_is_left_as_it_was(example):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout())
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with contextlib.nullcontext() if example[1] == 3 else pytest.raises(ExampleError, match="inside '0'"):
        record(model, example)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert not any("forward" in m.__dict__ for m in model.modules())


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
