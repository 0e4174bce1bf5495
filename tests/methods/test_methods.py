from __future__ import annotations

import copy
import dataclasses
import pickle

import invariants
import nets
import pytest
import torch
from torch import nn

import mimicnorm as mn
from mimicnorm.errors import CheckError, ExampleError, InitError, MimicNormError, NameNotFoundError, RefusedError
from mimicnorm.methods import METHODS, BatchNorm, Fixup, GroupNormWS, LastBN, MimicNorm, ScaledWS, SkipInit, method


def test_methods_by_name_and_frozen():
    assert method("MimicNorm") == MimicNorm()
    assert method("weight_mean").name == "weight-mean"
    with pytest.raises(dataclasses.FrozenInstanceError):
        MimicNorm().residual = None
    assert set(METHODS) == {
        *("mimicnorm", "weight-mean", "last-bn", "nonorm", "batchnorm"),
        *("fixup", "skipinit", "groupnorm-ws", "scaled-ws"),
    }
    assert all(type(method(m.__name__)) is m for m in METHODS.values())


def test_wrong_names_and_fields_say_what_to_use():
    with pytest.raises(NameNotFoundError, match="mimicnorm"):
        method("mimik")
    with pytest.raises(MimicNormError, match='"sqrt"'):
        MimicNorm(residual="cube")
    for wrong in ("yes", None, 2.0):
        with pytest.raises(MimicNormError, match=r'logit_scale=.*use "auto", True or False'):
            LastBN(logit_scale=wrong)
    with pytest.raises(MimicNormError, match="min_fan_in=0"):
        MimicNorm(min_fan_in=0)
    for wrong in (lambda: SkipInit(alpha=float("nan")), lambda: ScaledWS(alpha=0), lambda: ScaledWS(skip_gain="no")):
        with pytest.raises(MimicNormError, match="use a "):
            wrong()
    with pytest.raises(MimicNormError, match="groups=0"):
        GroupNormWS(groups=0)


def test_branch_scale():
    assert MimicNorm().branch_scale(4.0) == 0.5
    assert MimicNorm(residual="linear").branch_scale(4.0) == 0.25
    assert MimicNorm(residual=None).branch_scale(4.0) is None
    assert (Fixup().branch_scale(4.0), SkipInit(alpha=0.5).branch_scale(4.0)) == (1.0, 0.5)
    assert GroupNormWS().branch_scale(4.0) is None


def test_the_papers_settings_do_not_follow_the_defaults():
    assert dataclasses.asdict(MimicNorm.paper()) == {
        "residual": "sqrt", "min_fan_in": 50, "last_norm": True, "logit_scale": False, "centre": "forward"
    }  # fmt: skip


OTHERS = [Fixup(), SkipInit(), GroupNormWS(), ScaledWS(), ScaledWS(skip_gain=1.0)]
IMAGES = torch.randn(4, 3, 8, 8)


@pytest.mark.parametrize("method", OTHERS, ids=str)
@pytest.mark.parametrize("make", [nets.resnet, nets.preact, nets.SqueezeExcite])
def test_other_methods_keep_what_every_conversion_keeps(method, make):
    model = make()
    converted = mn.convert(model, method, example=IMAGES)
    mn.check(converted)
    invariants.no_sample_sees_another(converted, IMAGES)
    invariants.nothing_is_lost(model, converted)
    invariants.every_gradient_is_finite(converted, IMAGES)
    shapes = {k: p.shape for k, p in converted.named_parameters()}
    report = mn.convert_(model, method, example=IMAGES)
    assert all(shapes[name] == p.shape for name, p in report.new_parameters)
    assert set(report.moved_parameters.values()) <= {*converted.state_dict()}
    assert {n.name for n in report.norms} == {n for n, m in make().named_modules() if isinstance(m, nn.BatchNorm2d)}


@pytest.mark.parametrize("method", OTHERS, ids=str)
def test_other_methods_copy_pickle_compile_and_load(method):
    converted = mn.convert(nets.resnet(), method, example=IMAGES)
    with torch.no_grad():
        for p in converted.parameters():
            p.add_(0.1 * torch.randn_like(p))  # away from the zeros of the start
        expected = converted(IMAGES)
        fresh = mn.convert(nets.resnet(), method, example=IMAGES, init=None)
        fresh.load_state_dict(converted.state_dict())
        twins = (copy.deepcopy(converted), pickle.loads(pickle.dumps(converted)), fresh)
        for twin in twins:
            torch.testing.assert_close(twin(IMAGES), expected)
    torch._dynamo.reset()
    compiled = torch.compile(converted, backend="aot_eager", fullgraph=True)
    grads = [torch.autograd.grad(f(IMAGES).square().sum(), [*converted.parameters()]) for f in (converted, compiled)]
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", OTHERS, ids=str)
def test_other_methods_prescribe_their_start(method):
    model = nets.resnet()
    assert mn.plan(model, method, example=IMAGES).init == "theory"
    with pytest.raises(RefusedError, match="nothing to calibrate"):
        mn.convert_(model, method, example=IMAGES, init="calibrate")
    mn.convert_(model, method, example=IMAGES)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(3.0)
    mn.init_(model)
    assert not any(p.any() for k, p in model.named_parameters() if k.endswith(("input_bias", "scalar_bias")))
    assert all(bool((p == 1).all()) for k, p in model.named_parameters() if k.endswith("gain"))
    assert model(IMAGES).isfinite().all()
    with pytest.raises(InitError, match="nothing to calibrate"):
        mn.init_(model, "calibrate", example=IMAGES)
    model.blocks[0].conv1 = nets.conv(8, 8)
    if method.weights != "keep":
        with pytest.raises(CheckError, match=r"blocks\.0\.conv1"):
            mn.check(model)


@pytest.mark.parametrize("method", OTHERS, ids=str)
def test_other_methods_leave_a_network_they_cannot_run_as_it_was(method):
    class Reads(nets.Residual):
        def forward(self, x):
            return super().forward(x) + self.stem[1].running_mean.sum()

    model = Reads([nets.Block(8, 8), nets.PreBlock(8)], 8)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    classes = [type(m) for m in model.modules()]
    with pytest.raises(RefusedError, match="does not run any more"):
        mn.convert_(model, method, example=IMAGES)
    assert [type(m) for m in model.modules()] == classes
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    with pytest.raises(RefusedError, match="has no BatchNorm"):
        mn.convert_(nn.Linear(2, 2), method, example=(2, 2))


def test_other_methods_in_one_pass_of_microbatches_and_in_the_memory_table():
    names = ["batchnorm", *(name for name in METHODS if name != "batchnorm")]
    table = mn.memory.compare(nets.resnet(), (8, 3, 32, 32), names)
    assert [*table.analyses] == names
    assert table.saved_ratio("scaled-ws") == pytest.approx(table.saved_ratio("nonorm"), rel=0.02)
    assert table.saved_ratio("groupnorm-ws") == pytest.approx(1.0, rel=0.05)
    labels = torch.tensor([0, 1, 2, 3])
    for each in OTHERS:
        whole = mn.convert(nets.resnet(), each, example=IMAGES)
        parts = copy.deepcopy(whole)
        nn.functional.cross_entropy(whole(IMAGES), labels).backward()
        mn.microbatch.backward(parts, nn.functional.cross_entropy, IMAGES, labels, micro_batch=1)
        for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)


def test_the_baseline_has_no_settings_and_checks_its_arguments():
    for setting in ({"last_norm": True}, {"min_fan_in": 3}, {"residual": "sqrt"}):
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            BatchNorm(**setting)
    with pytest.raises(ExampleError):
        mn.convert_(nets.plain(), BatchNorm(), example=(2, 5, 8, 8))
    with pytest.raises(RefusedError, match="nonsense: head= names no module"):
        mn.convert_(nets.plain(), BatchNorm(), example=(2, 6, 8, 8), head="nonsense")
    planned = mn.convert_(nets.plain(), BatchNorm(), example=(2, 6, 8, 8), head="8")
    assert planned.totals()["left"] == 2
    assert not planned.heads
