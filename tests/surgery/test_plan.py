"""The plan: every BatchNorm accounted for, every refusal by name with a way out."""

from __future__ import annotations

import json
import warnings

import nets
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mimicnorm.errors import ExampleError, MimicNormError, RefusedError
from mimicnorm.methods import BatchNorm, Fixup, LastBN, MimicNorm, NoNorm, WeightMean
from mimicnorm.surgery.convert import convert_
from mimicnorm.surgery.planning import plan

SMALL = {"min_fan_in": 8}
IMAGE = (2, 3, 8, 8)


def norms(p):
    return {n.name: n for n in p.norms}


def layers(p):
    return {step.name: step for step in p.layers}


def test_residual_network_follows_the_papers_rule():
    p = plan(nets.resnet(), MimicNorm(**SMALL), example=IMAGE)
    assert p.ok
    steps = layers(p)
    assert [steps[f"blocks.{i}.conv2"].scale for i in range(3)] == pytest.approx([1, 2**-0.5, 3**-0.5])
    assert steps["blocks.1.down.0"].scale is None
    assert [steps[f"blocks.{i}.conv1"].v for i in range(3)] == [1, 2, 3]
    assert {n.action for n in p.norms} == {"remove"}
    assert [(h.name, h.outputs) for h in p.heads] == [("fc", 5)]
    assert steps["stem.0"].gain == pytest.approx((27 / 26) ** 0.5)
    assert steps["blocks.0.conv1"].gain == pytest.approx((2 / (1 - 1 / torch.pi) * 72 / 71) ** 0.5)


def test_linear_and_no_scalars():
    steps = layers(plan(nets.resnet(), MimicNorm(residual="linear", **SMALL), example=IMAGE))
    assert steps["blocks.2.conv2"].scale == pytest.approx(1 / 3)
    assert all(s.scale is None for s in layers(plan(nets.resnet(), MimicNorm(residual=None), example=IMAGE)).values())


def test_small_fan_in_and_depthwise_are_not_centred():
    net = nn.Sequential(
        nn.Conv2d(3, 64, 1),
        nn.BatchNorm2d(64),
        nn.Conv2d(64, 64, 9, groups=64),
        nn.BatchNorm2d(64),
        nn.Conv2d(64, 4, 1),
    )
    steps = layers(plan(net, MimicNorm(last_norm=False), example=(2, 3, 9, 9)))
    assert (steps["0"].action, steps["2"].action) == ("keep", "keep")
    assert (steps["0"].why, steps["2"].why) == ("fan-in of at most 16", "depthwise")


def test_pre_activation_becomes_shifts_and_its_last_layers_end_branches():
    p = plan(nets.preact(), MimicNorm(**SMALL), example=IMAGE)
    assert {norms(p)[f"blocks.{i}.bn1"].action for i in range(2)} == {"shift"}
    assert norms(p)["blocks.0.bn2"].action == "remove"
    ends = {n: s.scale for n, s in layers(p).items() if s.role == "branch end"}
    assert ends == pytest.approx({"blocks.0.conv2": 1.0, "blocks.1.conv2": 2**-0.5})


def test_pre_activation_with_a_projected_shortcut():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(3, 8, 1)
            self.bn1, self.bn2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
            self.conv1, self.conv2, self.down = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
            self.fc = nn.Conv2d(8, 2, 1)

        def forward(self, x):
            y = F.relu(self.bn1(self.stem(x)))
            return self.fc(F.relu(self.down(y) + self.conv2(F.relu(self.bn2(self.conv1(y))))))

    steps = layers(plan(Net(), MimicNorm(min_fan_in=2), example=IMAGE))
    assert steps["conv2"].scale == 1.0
    assert "down" not in steps or steps["down"].scale is None


def test_dense_network_converts_the_layers_its_norms_reach():
    p = plan(nets.Dense(), MimicNorm(**SMALL), example=IMAGE)
    assert set(layers(p)) == {"layers.0.2", "layers.1.2"}
    assert [n.action for n in p.norms] == ["shift"] * 3
    assert "fc" not in layers(p)


def test_gates_and_heads_are_never_centred():
    p = plan(nets.SqueezeExcite(), MimicNorm(min_fan_in=2), example=IMAGE)
    assert layers(p)["fc1"].action == "keep"
    assert layers(p)["fc1"].why == "part of a gate"
    assert "fc2" not in layers(p)
    assert "head" not in layers(p)
    assert layers(p)["conv1"].scale == 1.0


def test_concats_average_and_mix_what_feeds():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Conv2d(i, o, 1) for i, o in ((3, 8), (3, 8), (16, 4)))
            self.na, self.nb, self.nc = nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.BatchNorm2d(4)
            self.fc = nn.Conv2d(4, 2, 1)

        def forward(self, x):
            joined = torch.cat((F.relu(self.na(self.a(x))), self.nb(self.b(x))), 1)
            return self.fc(self.nc(self.c(joined)))

    step = layers(plan(Net(), MimicNorm(min_fan_in=8), example=IMAGE))["c"]
    assert step.fed_by == "relu+identity"
    mean, second = 0.5 / (2 * torch.pi) ** 0.5, 0.5 * 0.5 + 0.5
    assert step.gain == pytest.approx((16 / 15) ** 0.5 / (second - mean**2) ** 0.5)


def test_where_leaves_and_the_rest_converts():
    p = plan(nets.plain(), MimicNorm(**SMALL), example=(2, 6, 8, 8), where=lambda m, n: n != "1")
    assert norms(p)["1"].action == "leave"
    assert set(layers(p)) == {"3"}


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.SyncBatchNorm])
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}])
def test_kinds_of_batch_norm(kind, options):
    net = nn.Sequential(nets.conv(3, 8), kind(8, **options), nn.ReLU(), nn.Conv2d(8, 2, 1))
    p = plan(net, NoNorm(), example=IMAGE)
    assert norms(p)["1"].action == "remove"
    assert layers(p)["0"].beta_from == ("1" if options != {"affine": False} else None)


def test_never_called_and_shared_norms():
    net = nn.Sequential(nets.conv(3, 8), nn.BatchNorm2d(8), nets.conv(8, 8))
    net.append(net[1])
    net.append(nn.Conv2d(8, 2, 1))
    net[0].spare = nn.BatchNorm2d(8)
    p = plan(net, NoNorm(), example=IMAGE)
    assert (norms(p)["0.spare"].role, norms(p)["0.spare"].action) == ("unused", "shift")
    assert "0.spare never ran" in p.notes[0]
    assert norms(p)["1"].action == "shift"
    assert set(norms(p)) == {"1", "0.spare"}


def test_a_layer_used_twice_keeps_its_norms_as_shifts():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.a, self.b = nets.conv(8, 8), nn.BatchNorm2d(8), nn.BatchNorm2d(8)
            self.fc = nn.Conv2d(8, 2, 1)

        def forward(self, x):
            return self.fc(self.b(self.conv(F.relu(self.a(self.conv(x))))))

    p = plan(Net(), MimicNorm(), example=(2, 8, 4, 4))
    assert {n.action for n in p.norms} == {"shift"}
    assert layers(p)["conv"].action == "centre"


def test_auto_takes_theory_or_says_why_not():
    assert plan(nets.resnet(), MimicNorm(), example=IMAGE).init == "theory"
    gated = plan(nets.SqueezeExcite(), MimicNorm(), example=IMAGE)
    assert gated.init == "calibrate"
    assert "mean" in gated.init_why
    drifting = nn.Sequential(
        nets.conv(3, 8), nn.BatchNorm2d(8), nn.SiLU(), nets.conv(8, 8), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1)
    )
    assert "silu" in plan(drifting, MimicNorm(), example=IMAGE).init_why


# -- refusals ------------------------------------------------------------------------------------


def refusal(model, method=None, example=IMAGE, **kw):
    with pytest.raises(MimicNormError) as caught:
        plan(model, method or MimicNorm(), example=example, **kw).require()
    return str(caught.value)


class FunctionalNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.fc = nets.conv(3, 8), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1)

    def forward(self, x):
        x = F.batch_norm(self.conv(x), torch.zeros(8), torch.ones(8), training=True)
        return self.fc(self.bn(x))


class TorchNorm(FunctionalNorm):
    def forward(self, x):
        mean, var = torch.zeros(8), torch.ones(8)
        y = torch.batch_norm(self.conv(x), None, None, mean, var, True, 0.1, 1e-5, False)
        return self.fc(self.bn(y))


class BorrowedWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.fc = nets.conv(8, 8), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1)

    def forward(self, x):
        return self.fc(self.bn(F.conv2d(x, self.conv.weight)))


class Doubling(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) * 2


class TwiceConv(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(x, self.weight * self.weight, self.bias)


def with_norm(norm, layer=None):
    return nn.Sequential(layer or nets.conv(3, 8), norm, nn.ReLU(), nn.Conv2d(8, 2, 1))


def trained():
    net = nets.resnet()
    torch.nn.functional.cross_entropy(net(torch.randn(4, 3, 8, 8)), torch.tensor([0, 1, 2, 3])).backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    return net


def loaded():
    net = nets.resnet()
    net.stem[1].running_mean.normal_()  # statistics without a count of batches: from a checkpoint
    return net


def normed_head():
    return nn.Sequential(nets.conv(3, 8), nets.conv(8, 8), nn.BatchNorm2d(8))


REFUSED = {
    "no batch norm": (lambda: nn.Conv2d(3, 2, 1), {}, "nothing to convert"),
    "functional": (FunctionalNorm, {}, "F.batch_norm"),
    "raw input": (lambda: nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 2, 1)), {}, r"0: .*own input.*where="),
    "root": (lambda: nn.BatchNorm2d(3), {}, r"\(root\)"),
    "lazy": (lambda: with_norm(nn.LazyBatchNorm2d()), {}, r"1 is lazy.*Run the model once"),
    "data parallel": (lambda: nn.DataParallel(nets.resnet()), {}, "DataParallel.*inside"),
    "compiled": (lambda: torch.compile(nets.resnet()), {}, "compiled.*Convert the plain module"),
    "borrowed weight": (BorrowedWeight, {"example": (2, 8, 8, 8)}, r"conv: .*outside its own forward"),
    "unknown norm": (lambda: with_norm(Doubling(8)), {}, "1: Doubling does more"),
    "unknown conv": (
        lambda: with_norm(nn.BatchNorm2d(8), TwiceConv(64, 8, 1)),
        {"example": (2, 64, 4, 4)},
        "0: TwiceConv has a forward of its own",
    ),
    "weight norm": (
        lambda: with_norm(nn.BatchNorm2d(8), nn.utils.parametrizations.weight_norm(nets.conv(8, 8))),
        {"example": (2, 8, 8, 8)},
        "0: its weight is computed.*remove_parametrizations",
    ),
    "no head": (
        lambda: nn.Sequential(nets.conv(3, 8), nn.BatchNorm2d(8)),
        {},
        r"no evident head.*head=.*last_norm=False",
    ),
    "unknown head": (nets.resnet, {"head": "classifier"}, "classifier: head= names no module"),
    "normed head": (normed_head, {"head": "1"}, "1: is the head, yet a BatchNorm follows it"),
    "inner head": (nets.resnet, {"head": "blocks.0.conv1"}, "blocks.0.conv1: head= names .* goes into further layers"),
    "trained": (trained, {}, r"stem.1: .*looks trained.*init="),
    "loaded": (loaded, {}, r"stem.1: .*looks trained.*init="),
    "where leaves all": (nets.resnet, {"where": lambda m, n: False}, "nothing to convert"),
    "forward raises": (nets.resnet, {"example": (2, 4, 8, 8)}, "inside 'stem.0'"),
    "not a module": (lambda: "resnet", {}, "torch.nn.Module"),
    "unknown init": (nets.resnet, {"init": "kaiming"}, "init='kaiming'"),
    "method class": (nets.resnet, {"method": MimicNorm}, r"pass an object: MimicNorm\(\)"),
    "head thing": (nets.resnet, {"head": 5}, "head=5"),
    "no head named": (nets.resnet, {"head": []}, r"head=\[\]"),
    "where of one": (nets.resnet, {"where": lambda m: True}, "where must take"),
    "torch.batch_norm": (TorchNorm, {}, "F.batch_norm"),
    "method thing": (nets.resnet, {"method": 3}, "method must be one of"),
    "where thing": (nets.resnet, {"where": "bn"}, "where must be a function"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_with_the_reason_and_the_way_out(case):
    make, kw, pattern = REFUSED[case]
    model = make()
    message = refusal(model, kw.get("method"), **{k: v for k, v in kw.items() if k != "method"})
    import re

    assert re.search(pattern, message, re.DOTALL), message


def test_every_refusal_is_told_at_once():
    net = nn.Sequential(nn.BatchNorm2d(3), nets.conv(3, 8), Doubling(8))
    with pytest.raises(RefusedError) as caught:
        plan(net, MimicNorm(), example=IMAGE).require()
    assert len(caught.value.refusals) == 3


def test_last_norm_off_needs_no_head():
    assert plan(nn.Sequential(nets.conv(3, 8), nn.BatchNorm2d(8)), WeightMean(), example=IMAGE).ok


def test_wrong_examples_are_example_errors():
    with pytest.raises(ExampleError):
        plan(nets.resnet(), MimicNorm(), example=torch.ones(2, 3, 8, 8, dtype=torch.int32))


def test_small_layers_are_noted():
    from mimicnorm.models import build

    narrow = build("resnet18", num_classes=10, input="cifar", width=0.25)
    (note,) = plan(narrow, MimicNorm(min_fan_in=50), example=IMAGE).notes
    layers = "3 layers (conv1, layer2.0.downsample.0, layer3.0.downsample.0)"
    assert note == f"{layers} not centred: fan-in of at most min_fan_in=50"
    (note,) = plan(narrow, MimicNorm(), example=IMAGE).notes
    assert note == "1 layer (layer2.0.downsample.0) not centred: fan-in of at most min_fan_in=16"
    assert not plan(narrow, MimicNorm(min_fan_in=12), example=IMAGE).notes
    assert not plan(narrow, NoNorm(), example=IMAGE).notes
    assert not plan(build("resnet18", num_classes=10), MimicNorm(), example=(2, 3, 64, 64)).notes


def test_prints_as_a_table_and_as_json():
    p = plan(nets.resnet(), MimicNorm(**SMALL), example=IMAGE)
    text = str(p)
    for name in (*norms(p), *layers(p), "fc"):
        assert f"\n{name} " in text
    assert "v: predicted variance of the input" in text  # the legend of the columns
    assert json.loads(json.dumps(p.as_dict()))["totals"]["batch_norms"] == len(p.norms)


def test_methods_differ_only_in_what_they_say():
    by = {
        type(m).__name__: plan(nets.resnet(), m, example=IMAGE).totals()
        for m in (MimicNorm(**SMALL), WeightMean(**SMALL), LastBN(), NoNorm(), BatchNorm())
    }
    assert [by[n]["centred"] for n in by] == [7, 7, 0, 0, 0]  # the projection has a fan-in of 8
    assert [by[n]["last_norms"] for n in by] == [1, 0, 1, 0, 0]
    assert by["BatchNorm"]["left"] == 8


def test_a_network_prepared_for_quantisation_is_to_be_converted_before():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)).train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
        torch.ao.quantization.prepare_qat(model, inplace=True)
    with pytest.raises(RefusedError, match="Convert first, then prepare_qat"):
        plan(model, MimicNorm(), example=(4, 3, 8, 8))


class EndsInReLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4), nn.Linear(32, 4)

    def forward(self, x):
        return self.fc((x + self.norm(self.conv(x)).relu()).relu().flatten(1))


def test_fixup_says_why_branches_do_not_count():
    (refusal,) = plan(EndsInReLU(), Fixup(), example=(4, 4, 8)).refusals
    assert "this network has no residual branch without a ReLU after it" in refusal.reason


def test_a_network_that_ran_a_few_batches_is_not_trained():
    net = nets.resnet()
    net(torch.randn(4, 3, 8, 8))  # as a constructor does to find shapes, or a lazy network
    assert plan(net, MimicNorm(), example=IMAGE).ok


@pytest.mark.parametrize("init", ["auto", "calibrate", "theory", None])
@pytest.mark.parametrize("method", [NoNorm(), MimicNorm(min_fan_in=50)], ids=str)
def test_a_parametrized_layer_that_is_not_centred_keeps_its_weights(method, init):
    conv = nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 8, 3))  # fan-in 27: not centred
    model = nn.Sequential(conv, nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    before = conv.parametrizations.weight.original.clone()
    report = convert_(model, method, example=torch.randn(4, 3, 8, 8), init=init)
    assert report.init == ("calibrate" if init == "auto" else init)
    assert torch.equal(conv.parametrizations.weight.original, before)
    assert any("computed from other parameters" in note for note in report.notes) == (init is not None)


def test_layers_that_never_run_are_noted():
    net = nn.Sequential(nets.conv(3, 8), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 1))
    assert not [n for n in plan(net, NoNorm(), example=IMAGE).notes if "never ran" in n]
    net[3].other_heads = nn.ModuleList([nn.Conv2d(8, 2, 1), nn.Conv2d(8, 2, 1)])
    assert any(
        "2 layers (3.other_heads.0, 3.other_heads.1) never ran" in n for n in plan(net, NoNorm(), example=IMAGE).notes
    )
