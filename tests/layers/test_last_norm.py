"""The logit scale of a LastNorm; what else it does is tested in tests/microbatch."""

from __future__ import annotations

import copy
import io
import math
import pickle

import pytest
import torch
from torch import Tensor, nn

from mimicnorm.layers import LastNorm
from mimicnorm.layers.param_groups import param_groups

SHAPES = [((32, 5), 1), ((32, 5), -1), ((6, 5, 4, 4), 1), ((6, 7, 5), -1), ((6, 5, 3), 1)]


def scaled(value: float = 1.7, **settings) -> LastNorm:
    norm = LastNorm(5, logit_scale=True, **settings).double()
    nn.init.constant_(norm.logit_scale, value)
    return norm


def results(norm: LastNorm, x: Tensor, factor: Tensor | None = None) -> list[Tensor]:
    """The output, and the gradients of an arbitrary function of it at the logits and at the factor."""
    x = x.clone().requires_grad_()
    y = norm(x) if factor is None else factor * norm(x)
    loss = (y.sin() * torch.arange(1.0, y.numel() + 1, dtype=y.dtype).reshape(y.shape)).sum()
    return [y, *torch.autograd.grad(loss, [x, norm.logit_scale if factor is None else factor])]


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("mode", ["training", "eval"])
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
@pytest.mark.parametrize("last", ["rows", "columns"])
def test_it_multiplies_what_would_be_the_output(shape, dim, mode, momentum, last):
    ours, plain = scaled(dim=dim, momentum=momentum), LastNorm(5, dim=dim, momentum=momentum).double()
    factor = torch.tensor([1.7], dtype=torch.float64, requires_grad=True)
    x = torch.randn(shape, dtype=torch.float64) * 3 + 1
    x = x if last == "rows" else x.transpose(0, -1).contiguous().transpose(0, -1)
    if mode == "eval":
        ours(x), plain(x), ours.eval(), plain.eval()
    for got, expected in zip(results(ours, x), results(plain, x, factor), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dict(ours.named_buffers()), dict(plain.named_buffers()))


def test_below_one_the_scale_falls_exponentially_and_never_below_zero():
    for value, expected in ((7.5, 7.5), (1.0, 1.0), (0.5, math.exp(-0.5)), (-8.0, math.exp(-9.0))):
        norm = scaled(value)
        assert norm.scale.item() == pytest.approx(expected, rel=1e-12)
        (slope,) = torch.autograd.grad(norm.scale, norm.logit_scale)
        assert slope.item() == pytest.approx(min(expected, 1.0), rel=1e-12)
    x, y = torch.randn(64, 5), torch.zeros(64, dtype=torch.long)  # nothing to learn but that one class is frequent
    norm = LastNorm(5, logit_scale=True)
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.5, momentum=0.9)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(norm(x), y).backward()
        optimizer.step()
    assert norm.logit_scale < 0 < norm.scale


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_nothing_more_is_saved_for_backward(shape, dim):
    def saved(norm: LastNorm) -> int:
        sizes: dict[int, int] = {}

        def pack(t: Tensor) -> Tensor:
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        x = torch.randn(shape, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = norm(x)
        assert y.requires_grad
        return sum(sizes.values())

    per_class, scalar = torch.empty(5).nbytes, torch.empty(1).nbytes
    assert saved(LastNorm(5, dim, logit_scale=True)) <= saved(LastNorm(5, dim)) + per_class + scalar


def test_a_state_dict_from_before_loads_as_1():
    old = LastNorm(5).double()
    old(torch.randn(8, 5, dtype=torch.float64))
    new = scaled(3.0)
    new.load_state_dict(old.state_dict())
    assert new.logit_scale.tolist() == [1.0]
    assert "logit_scale" not in old.state_dict()
    x = torch.randn(4, 5, dtype=torch.float64)
    torch.testing.assert_close(new.eval()(x), old.eval()(x))
    with torch.device("meta"):
        empty = LastNorm(5, logit_scale=True)
    empty.load_state_dict(old.state_dict(), assign=True)
    assert empty.logit_scale.tolist() == [1.0]
    assert empty.logit_scale.dtype == torch.float64


def test_a_state_dict_without_this_norm_leaves_the_scale_alone():
    net = nn.Sequential(nn.Linear(3, 5), scaled(3.0))
    with pytest.raises(RuntimeError, match="logit_scale"):
        net.load_state_dict(nn.Sequential(nn.Linear(3, 5)).state_dict())
    net.load_state_dict(nn.Sequential(nn.Linear(3, 5)).state_dict(), strict=False)
    assert net[1].logit_scale.tolist() == [3.0]
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"1.logit_scale"'):
        nn.Sequential(nn.Linear(3, 5), LastNorm(5)).load_state_dict(net.state_dict())


def test_copies_pickles_and_state_dicts_hold_it():
    norm = scaled()
    file = io.BytesIO()
    torch.save(norm.state_dict(), file)
    file.seek(0)
    loaded = scaled(1.0)
    loaded.load_state_dict(torch.load(file))
    for twin in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm)), loaded):
        assert twin.logit_scale.tolist() == [1.7]
        assert twin.logit_scale is not norm.logit_scale
    old = LastNorm(5)
    del old._parameters["logit_scale"]  # as pickled before it existed
    pickle.loads(pickle.dumps(old))(torch.randn(8, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_autocast(dtype):
    norm, x = scaled().float(), torch.randn(64, 5)
    got = norm(x.to(dtype))
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), scaled().float()(x), rtol=0.02, atol=0.02)


def test_compiled_and_exported():
    norm, x = scaled(), torch.randn(8, 5, dtype=torch.float64)
    expected = results(copy.deepcopy(norm), x)
    compiled = torch.compile(copy.deepcopy(norm), backend="aot_eager", fullgraph=True)
    for got, right in zip(results(compiled, x), expected, strict=True):
        torch.testing.assert_close(got, right)
    program = torch.export.export(copy.deepcopy(norm).eval(), (x,))
    torch.testing.assert_close(program.module()(x), copy.deepcopy(norm).eval()(x))


def test_its_repr_shows_it():
    assert "logit_scale=True" in repr(scaled())
    assert "logit_scale" not in repr(LastNorm(5))


def test_sgd_takes_it_where_rare_classes_need_it():
    """Four classes, one of 92 %: a cross entropy of 0.01 needs a scale of 9.5 (theory.last_norm_floor)."""
    torch.manual_seed(0)
    labels = torch.arange(4).repeat_interleave(torch.tensor([1840, 80, 40, 40]))
    features = torch.randn(4, 32)[labels] + 0.3 * torch.randn(2000, 32)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4), LastNorm(4, logit_scale=True))
    optimizer = torch.optim.SGD(param_groups(net, weight_decay=5e-4), lr=0.1, momentum=0.9)
    for _ in range(500):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(features), labels)
        loss.backward()
        optimizer.step()
    assert 9 < net[3].logit_scale.item() < 20
    assert loss.item() < 0.01
