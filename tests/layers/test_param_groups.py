from __future__ import annotations

import nets
import pytest
import torch
from torch import nn

import mimicnorm as mn
from mimicnorm.microbatch import LastNormCrossEntropy


def converted(**method) -> nn.Module:
    model = nets.resnet()
    mn.convert_(model, mn.MimicNorm(**method), example=(2, 3, 8, 8))
    return model


def names(model: nn.Module, group: dict) -> set[str]:
    return {n for n, p in model.named_parameters() if any(p is q for q in group["params"])}


def test_logit_scales_alone_are_not_decayed():
    model = converted()
    decayed, free = mn.param_groups(model, weight_decay=0.1)
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
    assert names(model, free) == {"fc.last_norm.logit_scale"}
    assert names(model, decayed) | names(model, free) == {n for n, _ in model.named_parameters()}
    assert any(n.endswith("residual_scale") for n in names(model, decayed))
    optimizer = torch.optim.SGD(mn.param_groups(model, weight_decay=0.1), lr=1.0)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    before = model.fc.weight.detach().clone()
    optimizer.step()
    torch.testing.assert_close(model.fc.weight.detach(), 0.9 * before)
    assert model.fc.last_norm.logit_scale.tolist() == [1.0]


def test_biases_and_scalars_stay_undecayed_if_asked():
    model = converted()
    decayed, free = mn.param_groups(model, weight_decay=0.1, decay_scalars=False)
    assert {p.dim() for p in free["params"]} == {1}
    assert min(p.dim() for p in decayed["params"]) == 2


def test_a_rate_for_the_scale():
    model = converted()
    decayed, own = mn.param_groups(model, weight_decay=0.1, logit_scale_lr=0.05)
    assert (own["lr"], own["weight_decay"], len(own["params"])) == (0.05, 0.0, 1)
    assert len(mn.param_groups(model, weight_decay=0.1, decay_scalars=False, logit_scale_lr=0.05)) == 3
    optimizer = torch.optim.AdamW([decayed, own], lr=1e-3)
    assert [g["lr"] for g in optimizer.param_groups] == [1e-3, 0.05]


def test_what_does_not_train_and_what_is_shared():
    model = converted(logit_scale=False)
    assert len(mn.param_groups(model, weight_decay=0.1)) == 1, "an empty group is left out"
    frozen = model.fc.weight.requires_grad_(False)
    loss_fn = LastNormCrossEntropy(5)
    decayed, free = mn.param_groups(model, model, loss_fn, weight_decay=0.1)
    assert not any(p is frozen for p in decayed["params"])
    assert len({id(p) for p in decayed["params"]}) == len(decayed["params"]) == len(list(model.parameters())) - 1
    assert free["params"] == [loss_fn.last_norm.logit_scale]


def test_weight_decay_has_no_default():
    with pytest.raises(TypeError, match="weight_decay"):
        mn.param_groups(converted())
