"""Which modules make the outputs, and whether those can be class scores."""

from __future__ import annotations

import copy

import nets
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mimicnorm as mn
from mimicnorm.errors import RefusedError
from mimicnorm.surgery import flow
from mimicnorm.surgery.heads import find
from mimicnorm.surgery.record import record


def heads(model, shape=(2, 3, 8, 8)):
    found = find(record(model, shape))
    return sorted((h.module, h.outputs, h.dim) for h in found.heads), found.problems


def test_heads_of_every_shape():
    assert heads(nets.resnet()) == ([("fc", 5, -1)], [])
    assert heads(nets.Segmenter())[0] == [("aux", 4, 1), ("head", 4, 1)]
    assert heads(nets.Mlp(), (2, 6, 64))[0] == [("head", 3, -1), ("head_dist", 3, -1)]
    squeeze = nn.Sequential(nn.Conv2d(3, 7, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Softmax(1))
    assert heads(squeeze)[0] == [("0", 7, 1)]
    tokens = nn.Sequential(nn.Linear(3, 9))
    assert heads(tokens, (2, 6, 3))[0] == [("0", 9, -1)]


@pytest.mark.parametrize("last", [nn.BatchNorm2d(4), nn.ReLU(), nn.Tanh()])
def test_no_evident_head(last):
    found, problems = heads(nn.Sequential(nn.Conv2d(3, 4, 1), last))
    assert not found
    assert "output 0" in problems[0]


class Averages(nn.Module):
    """An average of two outputs that no head makes."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 4)

    def forward(self, x):
        return self.fc(x).cos() + self.fc(x + 1).cos()


def test_a_problem_is_told_once():
    found, problems = heads(Averages(), (2, 3))
    assert not found
    assert problems == ["output 0 (2, 4) is made by cos in the model's own forward, not by a layer"]


def test_a_layer_that_the_network_goes_on_reading_is_no_head():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn, self.fc = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)

        def forward(self, x):
            y = self.conv(x)
            return self.fc(self.bn(y)), y

    g = record(Net(), (2, 3, 4, 4))
    assert [h.module for h in find(g).heads] == ["fc"]
    assert "conv" in find(g).problems[0]
    assert flow.owner(g.calls("bn")[0]) is None


# -- what is not a class score -----------------------------------------------------------------------------------


def body(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())


class Heads(nn.Module):
    """A body and heads, and what is made of them."""

    def __init__(self, combine, **heads: nn.Module):
        super().__init__()
        self.body, self.combine = body(), combine
        for name, head in heads.items():
            self.add_module(name, head)

    def forward(self, x: Tensor):
        return self.combine(self, x, self.body(x))


def pooled(y: Tensor) -> Tensor:
    return y.mean((2, 3))


def pyramid(m, x, y):
    levels = [y, F.avg_pool2d(y, 2), F.avg_pool2d(y, 4)]
    return [m.get_submodule(f"level{i}")(level) for i, level in enumerate(levels)]


LEVELS = {f"level{i}": nn.Conv2d(8, 6, 1) for i in range(3)}
NOT_CLASSES = {
    "age": (Heads(lambda m, x, y: m.fc(pooled(y)), fc=nn.Linear(8, 1)), "'fc' has a single output"),
    "discriminator of patches": (Heads(lambda m, x, y: m.map(y), map=nn.Conv2d(8, 1, 1)), "'map' has a single output"),
    "boxes and classes": (
        Heads(lambda m, x, y: (m.cls(y), m.box(y)), cls=nn.Conv2d(8, 10, 1), box=nn.Conv2d(8, 4, 1)),
        r"different numbers of outputs \(.*cls: 10.*\)",
    ),
    "boxes and classes in one tensor": (
        Heads(lambda m, x, y: torch.cat([m.cls(y), m.box(y)], 1), cls=nn.Conv2d(8, 10, 1), box=nn.Conv2d(8, 4, 1)),
        "different numbers of outputs",
    ),
    "value and advantage": (
        Heads(lambda m, x, y: m.v(pooled(y)) + m.a(pooled(y)), v=nn.Linear(8, 1), a=nn.Linear(8, 4)),
        "different numbers of outputs",
    ),
    "mean and deviation": (
        Heads(lambda m, x, y: (m.mu(pooled(y)), m.sd(pooled(y)).exp()), mu=nn.Linear(8, 2), sd=nn.Linear(8, 2)),
        "output 1 is made by 'sd' through exp: another kind of output",
    ),
    "pyramid": (Heads(pyramid, **copy.deepcopy(LEVELS)), "maps of different sizes .8 x 8, 4 x 4, 2 x 2."),
    "autoencoder": (Heads(lambda m, x, y: m.out(y), out=nn.Conv2d(8, 3, 1)), r"is like its input \(4, 3, 8, 8\)"),
    "autoencoder of vectors": (
        Heads(lambda m, x, y: m.out(pooled(y)), out=nn.Linear(8, 3 * 64)),
        r"output 0 \(4, 192\) is like its input",
    ),
    "super-resolution": (
        Heads(lambda m, x, y: m.out(F.interpolate(y, scale_factor=2)), out=nn.Conv2d(8, 3, 1)),
        r"output 0 \(4, 3, 16, 16\) is like its input",
    ),
    "denoiser": (Heads(lambda m, x, y: x - m.out(y), out=nn.Conv2d(8, 3, 1)), "output 0 is added to the input"),
    "a score averaged over channels": (
        Heads(lambda m, x, y: m.map(y).flatten(1).mean(1), map=nn.Conv2d(8, 16, 1)),
        r"output 0 \(4,\) has fewer values than 'map' has outputs",
    ),
    "a sum with what has no head": (
        Heads(lambda m, x, y: m.out(y) + y, out=nn.Conv2d(8, 8, 1)),
        "only a part of output 0 is made by a head",
    ),
    "pyramid whose top is read on": (
        Heads(
            lambda m, x, y: ((t := m.top(F.avg_pool2d(y, 4))), m.out(F.avg_pool2d(y, 2) + F.interpolate(t, size=4))),
            **{"top": nn.Conv2d(8, 8, 1), "out": nn.Conv2d(8, 6, 1)},
        ),
        "maps of different sizes",
    ),
    "upsampled residual": (
        Heads(lambda m, x, y: F.interpolate(x, scale_factor=0.5) + m.out(F.avg_pool2d(y, 2)), out=nn.Conv2d(8, 3, 1)),
        "output 0 is added to the input",
    ),
}


@pytest.mark.parametrize("case", NOT_CLASSES)
def test_outputs_that_are_not_class_scores_are_refused_with_both_ways_out(case: str):
    model, why = NOT_CLASSES[case]
    for method in (mn.MimicNorm(), mn.LastBN()):
        with pytest.raises(RefusedError, match=f"a last BN belongs on class scores, and .*{why}") as refusal:
            mn.plan(model, method, example=(4, 3, 8, 8)).require()
        assert 'head="..."' in str(refusal.value)
        assert "last_norm=False" in str(refusal.value)
    assert not mn.plan(model, mn.MimicNorm(last_norm=False), example=(4, 3, 8, 8)).heads


def test_the_head_that_makes_class_scores_can_be_named():
    model, _ = NOT_CLASSES["boxes and classes"]
    planned = mn.plan(model, mn.MimicNorm(), example=(4, 3, 8, 8), head="cls")
    planned.require()
    assert [(h.name, h.outputs) for h in planned.heads] == [("cls", 10)]


def test_a_layer_that_makes_other_outputs_is_a_head_all_the_same():
    class Pre(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
            self.skip, self.cls, self.box = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 10, 1), nn.Conv2d(8, 4, 1)

        def forward(self, x):
            y = self.norm(self.conv(x) + self.skip(x)).relu()
            return self.cls(y), self.box(y)

    planned = mn.plan(Pre(), mn.MimicNorm(min_fan_in=1), example=(4, 3, 8, 8), head="cls")
    assert "box" not in [step.name for step in planned.layers]


SCORES = {
    "features beside logits": Heads(lambda m, x, y: (m.fc(pooled(y)), pooled(y)), fc=nn.Linear(8, 5)),
    "two heads of one width": Heads(
        lambda m, x, y: (m.fc(pooled(y)), m.aux(pooled(y))), fc=nn.Linear(8, 5), aux=nn.Linear(8, 5)
    ),
    "segmentation": Heads(lambda m, x, y: m.out(y), out=nn.Conv2d(8, 4, 1)),
    "coarse segmentation": Heads(
        lambda m, x, y: F.interpolate(m.out(F.avg_pool2d(y, 2)), size=8), out=nn.Conv2d(8, 4, 1)
    ),
    "a gate that is returned": Heads(
        lambda m, x, y: ((g := m.gate(y).sigmoid()), m.fc(pooled(g * y)))[::-1],
        fc=nn.Linear(8, 5),
        gate=nn.Conv2d(8, 1, 1),
    ),
    "two classes": Heads(lambda m, x, y: m.fc(pooled(y)), fc=nn.Linear(8, 2)),
}


@pytest.mark.parametrize("case", SCORES)
def test_what_may_be_class_scores_is_taken(case: str):
    planned = mn.plan(SCORES[case], mn.MimicNorm(), example=(4, 3, 8, 8))
    planned.require()
    assert planned.heads
    assert f"{planned.heads[0].outputs} outputs" in str(planned)
    assert "for class scores that a cross entropy is trained on" in str(planned)


def dense(classes: int) -> Heads:
    return Heads(lambda m, x, y: m.out(y), out=nn.Conv2d(8, classes, 1))


LOGIT_SCALES = {
    "few classes": (Heads(lambda m, x, y: m.fc(pooled(y)), fc=nn.Linear(8, 139)), True),
    "many classes": (Heads(lambda m, x, y: m.fc(pooled(y)), fc=nn.Linear(8, 140)), False),
    "pixels": (dense(200), True),
    "tokens": (Heads(lambda m, x, y: m.fc(y.flatten(2).mT), fc=nn.Linear(8, 200)), True),
    "pixels that are averaged": (Heads(lambda m, x, y: pooled(m.out(y)), out=nn.Conv2d(8, 200, 1)), False),
    "a convolution of one pixel": (
        Heads(lambda m, x, y: m.out(F.adaptive_avg_pool2d(y, 1)), out=nn.Conv2d(8, 200, 1)),
        False,
    ),
    "two heads side by side": (
        Heads(
            lambda m, x, y: torch.cat([m.fc(pooled(y)), m.aux(pooled(y))], 1),
            fc=nn.Linear(8, 200),
            aux=nn.Linear(8, 200),
        ),
        False,
    ),
}


@pytest.mark.parametrize("case", LOGIT_SCALES)
@pytest.mark.parametrize("setting", ["auto", True, False])
def test_which_heads_get_a_logit_scale(case: str, setting):
    model, automatic = LOGIT_SCALES[case]
    expected = automatic if setting == "auto" else setting
    planned = mn.plan(model, mn.MimicNorm(logit_scale=setting), example=(4, 3, 8, 8))
    assert {h.logit_scale for h in planned.heads} == {expected}
    assert ("logit scale: one learned scalar, from 1, multiplies" in str(planned)) == expected
    twin = copy.deepcopy(model)
    report = mn.convert_(twin, mn.LastBN(logit_scale=setting), example=(4, 3, 8, 8))
    keys = {f"{h.name}.last_norm.logit_scale" for h in planned.heads if expected}
    assert {name for name, _ in report.new_parameters} == keys
    assert {name for name in twin.state_dict() if name.endswith("logit_scale")} == keys
    assert all(p is twin.get_parameter(name) and p.tolist() == [1.0] for name, p in report.new_parameters)


def test_the_plan_says_why_there_is_a_logit_scale():
    by_classes = mn.plan(LOGIT_SCALES["few classes"][0], mn.MimicNorm(), example=(4, 3, 8, 8))
    assert "of fc (at unit variance, balanced classes reach a mean probability of at most 0.999)" in str(by_classes)
    by_pixels = mn.plan(dense(4), mn.MimicNorm(), example=(4, 3, 8, 8))
    assert "of out (pixels or tokens are rarely balanced" in str(by_pixels)
    assert by_classes.as_dict()["heads"][0]["logit_scale"] is True


def test_a_frozen_head_has_a_frozen_logit_scale():
    model = dense(4)
    model.out.requires_grad_(False)
    report = mn.convert_(model, mn.MimicNorm(), example=(4, 3, 8, 8))
    assert not model.out.last_norm.logit_scale.requires_grad
    assert not any(name.endswith("logit_scale") for name, _ in report.new_parameters)


class Beside(nn.Module):
    """Class scores beside inputs of their shape: one-hot targets, a condition; or made of as many tokens."""

    def __init__(self, tokens: bool):
        super().__init__()
        self.embed = nn.Embedding(50, 8) if tokens else nn.Linear(6, 8)
        self.norm, self.fc = nn.BatchNorm1d(8), nn.Linear(8, 5)

    def forward(self, x: Tensor, y: Tensor | None = None):
        h = self.embed(x)
        logits = self.fc(self.norm(h.mean(1) if h.dim() == 3 else h).relu())
        return logits if y is None else (logits, -(y * logits.log_softmax(1)).sum(1).mean())


def test_targets_conditions_and_tokens_are_not_what_is_reconstructed():
    one_hot = F.one_hot(torch.arange(4), 5).float()
    mn.plan(Beside(False), mn.MimicNorm(), example=(torch.randn(4, 6), one_hot)).require()
    mn.plan(Beside(True), mn.LastBN(), example=(torch.randint(50, (4, 5)),)).require()


def test_a_norm_on_the_outputs_may_stay_as_the_last_one():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5), nn.BatchNorm1d(5))
    (refusal,) = mn.plan(model, mn.MimicNorm(), example=(4, 6)).refusals
    assert "last_norm=False and where=lambda module, name: name != '4'" in refusal.remedy
    mn.plan(model, mn.MimicNorm(last_norm=False), example=(4, 6), where=lambda module, name: name != "4").require()
