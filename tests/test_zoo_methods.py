"""The other methods on networks nobody here wrote: no BatchNorm left, samples apart, every parameter learns."""

from __future__ import annotations

import invariants
import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import nn

import mimicnorm as mn
from mimicnorm.surgery.record import is_batch_norm

NAMES = ("resnet18", "vgg11_bn", "mobilenet_v2", "densenet121", "timm:resnet26", "timm:resnetv2_50")
NAMES += ("timm:efficientnet_b0", "timm:repvgg_a0")
METHODS = (mn.Fixup(), mn.SkipInit(), mn.GroupNormWS(), mn.ScaledWS())
LIGHT = ("mobilenet_v2", "timm:efficientnet_b0", "timm:repvgg_a0")
WITHOUT_BRANCHES = ("vgg11_bn", "densenet121")


def build(name: str):
    if name.startswith("timm:"):
        return zoo.timm().create_model(name.removeprefix("timm:"), num_classes=10)
    model = getattr(zoo.torchvision().models, name)(num_classes=10)
    if name == "vgg11_bn":  # its three classifier layers are most of it, and no matter of ours
        model.classifier = nn.Linear(512 * 7 * 7, 10)
    return model


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_converts_and_learns(name, method):
    torch.manual_seed(0)
    model, x = build(name), torch.randn(2, 3, 32, 32)
    if method.needs_branches and name in WITHOUT_BRANCHES:
        assert "residual branches" in str(mn.plan(model, method, example=x).refusals[0])
        return
    mn.convert_(model, method, example=x)
    assert not any(map(is_batch_norm, model.modules()))
    mn.check(model)
    invariants.no_sample_sees_another(model, x)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(3 if name in LIGHT else 1):  # what starts at zero wakes the rest, step by step
        optimizer.zero_grad()
        F.cross_entropy(model(x), torch.tensor([1, 2])).backward()
        optimizer.step()
    asleep = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert not asleep
    if name not in LIGHT:
        return
    still = [n for n, p in model.named_parameters() if n.endswith("weight") and not p.grad.any()]
    assert len(still) <= 2, still  # a layer may be cut off by dead ReLUs at this size
