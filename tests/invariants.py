"""What must hold of any converted network, whoever wrote it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from mimicnorm.errors import RefusedError
from mimicnorm.layers import LastNorm
from mimicnorm.methods import Method, MimicNorm, NoNorm
from mimicnorm.surgery.convert import Report, convert, convert_
from mimicnorm.surgery.record import is_batch_norm


def leaves(output) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]


def without_dropout(model: nn.Module) -> nn.Module:
    for m in model.modules():
        name = type(m).__name__.lower()
        if "drop" in name or "stochasticdepth" in name:
            m.eval()
    return model


def identity_norms_(model: nn.Module) -> None:
    """Set every BatchNorm to statistics 0 and 1 - eps, weight 1, in eval mode: exactly x + beta, beta random."""
    for m in model.modules():
        if is_batch_norm(m):
            m.eval()
            with torch.no_grad():
                m.running_mean.zero_()
                m.running_var.fill_(1.0 - float(getattr(m, "eps", 1e-5)))
                if m.weight is not None:
                    m.weight.fill_(1.0)
                    m.bias.normal_()


def surgery_removes_normalisation_and_nothing_else(model: nn.Module, x: torch.Tensor, **kw) -> None:
    """NoNorm's output equals the original's with its BatchNorms as identities: in-place traps included."""
    original = without_dropout(copy.deepcopy(model).train())
    identity_norms_(original)
    converted = without_dropout(convert(original, NoNorm(), example=x, init=None, **kw).train())
    torch.manual_seed(3)
    with torch.no_grad():
        expected = leaves(original(x.clone()))
    torch.manual_seed(3)
    with torch.no_grad():
        got = leaves(converted(x.clone()))
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * (1 + float(b.abs().max())))


def no_sample_sees_another(converted: nn.Module, x: torch.Tensor) -> None:
    """With last_norm=False, row 0 does not change when the other rows do; in training mode."""
    without_dropout(converted.train())
    other = x.clone()
    other[1:] = torch.randn_like(other[1:])
    outputs = []
    for batch in (x, other):
        torch.manual_seed(5)  # functional dropout draws the same mask
        with torch.no_grad():
            outputs.append(leaves(converted(batch)))
    for a, b in zip(*outputs, strict=True):
        if a.dim() and len(a) == len(x):
            scale = 1 + float(a[0].abs().max())
            torch.testing.assert_close(a[0], b[0], rtol=1e-5, atol=1e-6 * scale)


def nothing_is_lost(original: nn.Module, converted: nn.Module, report: Report | None = None) -> None:
    """No BatchNorm left but LastNorm; surviving keys, types, flags and classes as they were."""
    for name, m in converted.named_modules():
        assert not is_batch_norm(m) or isinstance(m, LastNorm), name
    before, after = original.state_dict(), converted.state_dict()
    gone = {k for k in before if k not in after}
    norms = tuple(n for n, m in original.named_modules(remove_duplicate=False) if is_batch_norm(m))
    assert all(k.rpartition(".")[0] in norms for k in gone), gone
    for key in before.keys() & after.keys():
        assert before[key].shape == after[key].shape, key
        assert before[key].dtype == after[key].dtype, key
        assert before[key].device == after[key].device, key
    modules = dict(converted.named_modules())
    for name, m in original.named_modules():
        if name not in norms:
            assert isinstance(modules[name], type(m)), name
        assert modules[name].training == m.training, name
    flags = {k: p.requires_grad for k, p in original.named_parameters()}
    for key, p in converted.named_parameters():
        assert flags.get(key, p.requires_grad) == p.requires_grad, key


def every_gradient_is_finite(converted: nn.Module, x: torch.Tensor, but: set[str] = frozenset()) -> None:
    converted.train()
    converted.zero_grad()
    sum(t.float().square().mean() for t in leaves(converted(x))).backward()
    bad = [
        n for n, p in converted.named_parameters() if n not in but and (p.grad is None or not p.grad.isfinite().all())
    ]
    assert not bad, bad


def hold(model: nn.Module, x: torch.Tensor, method=None, **kw) -> nn.Module:
    """All of the above; returns the network converted with the method."""
    method = method or MimicNorm()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    surgery_removes_normalisation_and_nothing_else(model, x, **kw)
    plain = type(method)(**{**method.__dict__, "last_norm": False})
    no_sample_sees_another(convert(model, plain, example=x, **kw), x)
    converted = convert(model, method, example=x, **kw)
    nothing_is_lost(model, converted)
    every_gradient_is_finite(converted, x)
    after = model.state_dict()
    assert all(torch.equal(after[k], v) for k, v in before.items())
    return converted


def refuses(model: nn.Module, method: Method, *, example, match: str, **kw) -> None:
    """``convert_`` raises these words, and the model and the random numbers are as they were, bit for bit."""
    state, classes = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    random = torch.get_rng_state()
    with pytest.raises(RefusedError, match=match):
        convert_(model, method, example=example, **kw)
    assert torch.equal(torch.get_rng_state(), random)
    assert [type(m) for m in model.modules()] == classes
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert list(model.state_dict()) == list(state)
