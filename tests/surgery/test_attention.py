"""Products of queries and keys: found, started small, and named in the plan."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from signals import variances
from torch import nn

from mimicnorm.methods import GroupNormWS, LastBN, MimicNorm
from mimicnorm.surgery.attention import VARIANCE, unbounded_products
from mimicnorm.surgery.convert import convert_
from mimicnorm.surgery.planning import plan
from mimicnorm.surgery.record import record

SHAPE = (8, 16, 4)


class Projection(nn.Module):
    def __init__(self, inputs, outputs, norm=True):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)
        self.norm = nn.BatchNorm1d(outputs) if norm else None

    def forward(self, x):
        y = self.linear(x)
        return y if self.norm is None else self.norm(y.flatten(0, 1)).reshape_as(y)


def by_matmul(q, k, v):
    return (q @ k.transpose(1, 2) / 8 + 0.5).softmax(-1) @ v


def by_einsum(q, k, v):
    return torch.bmm(torch.einsum("bid,bjd->bij", q, 0.1 * k).softmax(-1), v)


def by_one_call(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def linear_attention(q, k, v):
    q, k = q.relu(), k.relu()
    return q @ (k.transpose(1, 2) @ v) / 1024


def of_unit_length(q, k, v):
    return (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(1, 2)).softmax(-1) @ v


def of_bounded_values(q, k, v):
    return (q.tanh() @ k.sigmoid().transpose(1, 2) / 8).softmax(-1) @ v


class Block(nn.Module):
    def __init__(self, width, mix, norm):
        super().__init__()
        self.q, self.k = Projection(width, width, norm), Projection(width, width, norm)
        self.v, self.out = Projection(width, width), Projection(width, width)
        self.mix, self.a, self.b = mix, Projection(width, 2 * width), Projection(2 * width, width)

    def forward(self, x):
        x = x + self.out(F.hardswish(self.mix(self.q(x), self.k(x), self.v(x))))
        return x + self.b(F.hardswish(self.a(x)))


class Net(nn.Module):
    def __init__(self, mix=by_matmul, blocks=2, norm=True, width=64):
        super().__init__()
        self.embed, self.head = Projection(4, width), nn.Linear(width, 10)
        self.positions = nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks = nn.ModuleList(Block(width, mix, norm) for _ in range(blocks))

    def forward(self, x):
        x = self.embed(x) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def attention_notes(made):
    return [note for note in made.notes if note.startswith("attention")]


@pytest.mark.parametrize("mix", [by_matmul, by_einsum, by_one_call])
def test_products_of_queries_and_keys_are_found(mix):
    net = Net(mix)
    norms = {name for name, m in net.named_modules() if isinstance(m, nn.BatchNorm1d)}
    products = unbounded_products(record(net, SHAPE), norms)
    assert [p.makers for p in products] == [(f"blocks.{i}.q.norm", f"blocks.{i}.k.norm") for i in range(2)]
    note = attention_notes(plan(net, MimicNorm(), example=SHAPE))
    assert len(note) == 1
    assert "blocks.0.q.norm with blocks.0.k.norm, blocks.1.q.norm with blocks.1.k.norm)" in note[0]
    assert "where=" in note[0]


def test_linear_attention_multiplies_keys_and_values():
    net = Net(linear_attention)
    note = attention_notes(plan(net, MimicNorm(), example=SHAPE))
    assert "blocks.0.k.norm with blocks.0.v.norm" in note[0]


@pytest.mark.parametrize("mix", [of_unit_length, of_bounded_values])
def test_what_is_bounded_otherwise_is_not_named(mix):
    made = plan(Net(mix), MimicNorm(), example=SHAPE)
    assert not attention_notes(made)
    assert next(s for s in made.layers if s.name == "blocks.0.out.linear").scale == pytest.approx(1)


def test_batch_norms_that_stay_or_become_another_norm_bound_their_products():
    made = plan(Net(), MimicNorm(), example=SHAPE, where=lambda module, name: not name.endswith(("q.norm", "k.norm")))
    assert not attention_notes(made)
    assert not attention_notes(plan(Net(), GroupNormWS(), example=SHAPE))
    assert not attention_notes(plan(Net(norm=False), MimicNorm(), example=SHAPE))  # the model's own choice


def test_without_residual_scalars_there_is_the_note_alone():
    note = attention_notes(plan(Net(), LastBN(), example=SHAPE))
    assert len(note) == 1
    assert "start with a variance" not in note[0]


class BeforeProjections(nn.Module):
    """One BatchNorm before queries and keys, as in a pre-norm transformer."""

    def __init__(self):
        super().__init__()
        self.norm, self.q, self.k = nn.BatchNorm1d(16), nn.Linear(64, 64), nn.Linear(64, 64)
        self.embed, self.head = nn.Linear(4, 64), nn.Linear(64, 10)

    def forward(self, x):
        x = self.embed(x)
        y = self.norm(x)
        x = x + (self.q(y) @ self.k(y).transpose(1, 2)).softmax(-1) @ x
        return self.head(x.mean(1))


def test_projections_behind_a_batch_norm_are_named():
    assert "(q with k)" in attention_notes(plan(BeforeProjections(), MimicNorm(), example=SHAPE))[0]


def test_attention_branches_start_small_and_others_do_not():
    torch.manual_seed(0)
    net, x = Net(), torch.randn(64, 16, 4)
    report = convert_(net, MimicNorm(), example=x)
    assert report.init == "calibrate"
    steps = {step.name: step for step in report.layers}
    # the stream: 1, and 0.1 from attention, 1 from the MLP of each block
    expected = {"blocks.0.out": 1.0, "blocks.0.b": 1.1, "blocks.1.out": 2.1, "blocks.1.b": 2.2}
    for name, v in expected.items():
        step, share = steps[f"{name}.linear"], VARIANCE if name.endswith("out") else 1.0
        assert step.v == pytest.approx(v)
        assert step.scale == pytest.approx(math.sqrt(share / v))
        assert net.get_submodule(step.name).residual_scale.item() == pytest.approx(step.scale)
        found = variances(net, [step.name], x)[step.name]
        assert found == pytest.approx(share, rel=1e-3), name
    why = {step.name: step.why for step in report.norms}
    assert "times sqrt(0.1)" in why["blocks.0.out.norm"]
    assert "times" not in why["blocks.0.b.norm"]


def test_only_the_innermost_branch_starts_small():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.block, self.last = Projection(4, 64), Block(64, by_matmul, True), Projection(64, 64)
            self.head = nn.Linear(64, 10)

        def forward(self, x):
            x = self.first(x)
            return self.head((x + self.last(self.block(x).relu())).mean(1))

    steps = {step.name: step for step in plan(Outer(), MimicNorm(), example=SHAPE).layers}
    assert steps["block.out.linear"].scale == pytest.approx(math.sqrt(VARIANCE))
    assert steps["last.linear"].scale == pytest.approx(steps["last.linear"].v ** -0.5)


def test_linear_residual_scalars_are_calibrated_to_what_the_theory_makes():
    torch.manual_seed(0)
    net, x = Net(norm=False), torch.randn(64, 16, 4)
    report = convert_(net, MimicNorm(residual="linear"), example=x)
    end = next(step for step in report.layers if step.name == "blocks.1.b.linear")
    assert end.v == pytest.approx(4)
    assert variances(net, [end.name], x)[end.name] == pytest.approx(1 / end.v, rel=1e-3)


def test_attention_trains_where_its_batch_norm_network_does():
    datasets = pytest.importorskip("sklearn.datasets")
    digits = datasets.load_digits()
    images, classes = torch.tensor(digits.images, dtype=torch.float32), torch.tensor(digits.target)
    tokens = (images / 6 - 1).reshape(-1, 4, 2, 4, 2).transpose(2, 3).reshape(-1, 16, 4)
    for converted in (False, True):
        torch.manual_seed(0)
        net = Net(blocks=4)
        if converted:
            convert_(net, MimicNorm(), example=tokens[:256])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
        losses = []
        for step in range(60):
            batch = torch.arange(64 * step, 64 * (step + 1)) % len(tokens)
            loss = F.cross_entropy(net(tokens[batch]), classes[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert sum(losses[-10:]) / 10 < 1.7, (converted, losses)
