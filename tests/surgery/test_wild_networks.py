"""Networks as people write them: modulated, patched, hooked, shared. Each of these once went wrong without a word."""

from __future__ import annotations

import copy
import functools

import invariants
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mimicnorm.errors import CheckError, ExampleError, MimicNormError, RefusedError
from mimicnorm.layers import LastNorm
from mimicnorm.methods import Fixup, GroupNormWS, LastBN, MimicNorm, NoNorm, ScaledWS, SkipInit
from mimicnorm.surgery.convert import check, convert, convert_, init_
from mimicnorm.surgery.example import tensors_in
from mimicnorm.surgery.planning import plan

SMALL = MimicNorm(min_fan_in=8)
IMAGE = (4, 3, 16, 16)


def tail(c: int = 8) -> list[nn.Module]:
    return [nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, 4)]


def plain(c: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, c, 3, padding=1), nn.BatchNorm2d(c), *tail(c))


# -- modulation --------------------------------------------------------------------------------------------------


class FiLM(nn.Module):
    """Blocks whose norm has its gamma and beta from a second input."""

    def __init__(self, blocks: int = 2, c: int = 16):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, c, 3, padding=1), nn.BatchNorm2d(c), nn.ReLU())
        self.convs = nn.ModuleList(nn.Conv2d(c, c, 3, padding=1) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.BatchNorm2d(c, affine=False) for _ in range(blocks))
        self.film, self.fc = nn.Linear(5, 2 * c), nn.Linear(c, 4)

    def forward(self, x, z):
        gamma, beta = self.film(z)[:, :, None, None].chunk(2, 1)
        x = self.stem(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu((1 + gamma) * norm(conv(x)) + beta)
        return self.fc(x.mean((2, 3)))


@pytest.mark.parametrize("method", [ScaledWS(), SMALL, MimicNorm(last_norm=False)])
def test_a_modulated_norm_is_no_residual_branch(method):
    model, x, z = FiLM(), torch.randn(IMAGE), torch.randn(4, 5)
    planned = plan(model, method, example=(x, z))
    assert all(step.scale is None for step in (*planned.norms, *planned.layers))
    convert_(model, method, example=(x, z))
    assert (model(x, z) - model(-3 * x, z)).abs().max() > 1e-3


@pytest.mark.parametrize("method", [Fixup(), SkipInit()])
def test_no_branches_are_found_in_a_modulated_network(method):
    with pytest.raises(RefusedError, match="made for residual branches, and this network has none"):
        convert_(FiLM(), method, example=(torch.randn(IMAGE), torch.randn(4, 5)))


class Spade(nn.Module):
    """Blocks whose norm has its gamma and beta from a map of labels, position by position."""

    def __init__(self, c: int = 16, trunk_from_labels: bool = False):
        super().__init__()
        self.trunk_from_labels = trunk_from_labels
        self.stem = nn.Conv2d(2 if trunk_from_labels else 3, c, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(c, affine=False) for _ in range(2))
        self.convs = nn.ModuleList(nn.Conv2d(c, c, 3, padding=1) for _ in range(2))
        self.shared = nn.ModuleList(nn.Conv2d(2, 8, 3, padding=1) for _ in range(2))
        self.gammas = nn.ModuleList(nn.Conv2d(8, c, 3, padding=1) for _ in range(2))
        self.betas = nn.ModuleList(nn.Conv2d(8, c, 3, padding=1) for _ in range(2))
        self.fc = nn.Linear(c, 4)

    def forward(self, x, labels):
        x = branch = self.stem(labels if self.trunk_from_labels else x)
        for norm, conv, shared, gamma, beta in zip(
            self.norms, self.convs, self.shared, self.gammas, self.betas, strict=True
        ):
            maps = F.relu(shared(labels))
            branch = conv(F.relu(norm(branch) * (1 + gamma(maps)) + beta(maps)))
        return self.fc((x + branch).mean((2, 3)))


@pytest.mark.parametrize("trunk_from_labels", [False, True])
def test_maps_that_modulate_each_position_are_converted_without_being_modelled(trunk_from_labels):
    example = (torch.randn(IMAGE), torch.randn(4, 2, 16, 16))
    model = Spade(trunk_from_labels=trunk_from_labels)
    report = convert_(model, SMALL, example=example)
    assert all(n.action != "leave" for n in report.norms)
    output, other = model(*example), model(example[0], -example[1])
    assert output.isfinite().all()
    assert (output - other).abs().max() > 1e-3


class TwoStreams(nn.Module):
    """One stream gates another and is added to it: both end in a norm, so it is a sum."""

    def __init__(self, c: int = 8):
        super().__init__()
        self.a, self.b, self.gate, self.c, self.out = (nn.Conv2d(i, c, 3, padding=1) for i in (3, 2, c, c, c))
        self.na, self.nb, self.nc, self.no = (nn.BatchNorm2d(c) for _ in range(4))
        self.tail = nn.Sequential(*tail(c))

    def forward(self, x, depth):
        other = F.relu(self.nb(self.b(depth)))
        x = self.na(self.a(x)) * torch.sigmoid(self.gate(other)) + self.nc(self.c(other))
        return self.tail(self.no(self.out(F.relu(x))))


def test_two_streams_are_a_sum():
    planned = plan(TwoStreams(), MimicNorm(residual=None), example=(torch.randn(IMAGE), torch.randn(4, 2, 16, 16)))
    assert {n.name: n.v for n in planned.norms}["no"] == pytest.approx(2.0)


class Highway(nn.Module):
    """A gate between a layer and the skip: not to be taken for a modulated norm."""

    def __init__(self, c: int = 8):
        super().__init__()
        self.stem, self.gate, self.conv = (nn.Conv2d(i, c, 3, padding=1) for i in (3, c, c))
        self.norm, self.tail = nn.BatchNorm2d(c), nn.Sequential(*tail(c))

    def forward(self, x):
        x = self.stem(x)
        gate = torch.sigmoid(self.gate(x))
        return self.tail(gate * self.norm(self.conv(x)) + (1 - gate) * x)


def test_a_highway_is_a_sum():
    planned = plan(Highway(), SMALL, example=IMAGE)
    assert [step.scale is not None for step in planned.layers if step.name == "conv"] == [True]


class BigGANBlock(nn.Module):
    """Conditional BatchNorms before the layers of a residual branch."""

    def __init__(self, c: int = 8):
        super().__init__()
        self.stem = nn.Conv2d(3, c, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(c, affine=False) for _ in range(2))
        self.convs = nn.ModuleList(nn.Conv2d(c, c, 3, padding=1) for _ in range(2))
        self.gammas = nn.ModuleList(nn.Linear(5, c) for _ in range(2))
        self.betas = nn.ModuleList(nn.Linear(5, c) for _ in range(2))
        self.fc = nn.Linear(c, 4)

    def forward(self, x, y):
        x = branch = self.stem(x)
        for norm, conv, gamma, beta in zip(self.norms, self.convs, self.gammas, self.betas, strict=True):
            branch = norm(branch) * gamma(y)[:, :, None, None] + beta(y)[:, :, None, None]
            branch = conv(F.relu(branch))
        return self.fc((x + branch).mean((2, 3)))


def test_a_conditional_norm_reaches_its_layers_and_the_real_branch_gets_the_scalar():
    planned = plan(BigGANBlock(), SMALL, example=(torch.randn(IMAGE), torch.randn(4, 5)))
    layers = {step.name: step for step in planned.layers}
    assert {name for name, step in layers.items() if step.action == "centre"} == {"convs.0", "convs.1"}
    assert [name for name, step in layers.items() if step.scale is not None] == ["convs.1"]
    assert all(step.scale is None for step in planned.norms)


# -- sharing -----------------------------------------------------------------------------------------------------


class Domains(nn.Module):
    """One BatchNorm per domain behind one layer; an example shows only one of them."""

    def __init__(self, c: int = 8):
        super().__init__()
        self.conv, self.tail = nn.Conv2d(3, c, 3), nn.Sequential(*tail(c))
        self.clean, self.adversarial = nn.BatchNorm2d(c), nn.BatchNorm2d(c)

    def forward(self, x, adversarial=False):
        return self.tail((self.adversarial if adversarial else self.clean)(self.conv(x)))


def as_identity(model: nn.Module) -> nn.Module:
    """BatchNorms that only add their betas."""
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.eval()
            m.running_var.fill_(1 - m.eps)
            nn.init.normal_(m.bias)
    return model


def test_nothing_is_folded_into_a_layer_that_an_unseen_norm_may_share():
    model, x = as_identity(Domains()), torch.randn(IMAGE)
    twin = convert(model, NoNorm(), example=x, init=None)
    torch.testing.assert_close(twin(x), model(x))
    torch.testing.assert_close(twin(x, True), model(x, True))


@pytest.mark.parametrize(("layer", "action"), [(nn.Conv2d(8, 8, 1), "remove"), (nn.ReLU(), "shift")])
def test_a_norm_that_never_runs_after_a_layer_of_its_own_changes_nothing(layer, action):
    model = nn.Sequential(plain())
    model[0].unused = nn.Sequential(layer, nn.BatchNorm2d(8))
    model[0].forward = model[0][:6].forward
    report = plan(model, SMALL, example=IMAGE)
    assert {n.name: n.action for n in report.norms} == {"0.1": action, "0.unused.1": "shift"}
    (step,) = [n for n in plan(Domains(), SMALL, example=IMAGE).norms if n.name == "clean"]
    assert step.why == "adversarial did not run and may share its layer"


class TiedBias(nn.Module):
    def __init__(self, c: int = 8):
        super().__init__()
        self.stem, self.a, self.b = nn.Conv2d(3, c, 3), nn.Conv2d(c, c, 3), nn.Conv2d(c, c, 3)
        self.b.weight, self.b.bias = self.a.weight, self.a.bias
        self.na, self.nb, self.tail = nn.BatchNorm2d(c), nn.BatchNorm2d(c), nn.Sequential(*tail(c))

    def forward(self, x):
        return self.tail(self.nb(self.b(F.relu(self.na(self.a(self.stem(x)))))))


def test_a_bias_that_two_layers_share_takes_no_beta():
    model, x = as_identity(TiedBias()), torch.randn(IMAGE)
    torch.testing.assert_close(convert(model, NoNorm(), example=x, init=None)(x), model(x))


# -- patches and hooks -------------------------------------------------------------------------------------------


def patch(module: nn.Module) -> None:
    module._old = module.forward
    module.forward = functools.partial(lambda m, *args: m._old(*args), module)


@pytest.mark.parametrize("name", ["0", "1", "5"])
def test_a_forward_replaced_on_the_instance_is_refused(name):
    model = plain()
    patch(model.get_submodule(name))
    invariants.refuses(model, SMALL, example=IMAGE, match=f"{name}: its forward was replaced on the instance")


def test_a_mask_that_a_hook_writes_into_the_weight_is_not_undone():
    model = plain()
    mask = (torch.arange(9).view(3, 3) < 4).float()
    model[0].register_forward_pre_hook(lambda m, args: (m.weight.data.mul_(mask), None)[1])
    invariants.refuses(model, SMALL, example=IMAGE, match="0: a hook writes into its weight")


def test_a_hook_that_only_looks_is_no_obstacle():
    model, seen = plain(), []

    def look(module, args):
        assert len(args[0]) == 4, "a hook may insist on its batch"
        seen.append(args)

    model[0].register_forward_pre_hook(look)
    convert_(model, SMALL, example=IMAGE, init=None)
    assert seen


def test_what_a_hook_sees_is_not_overwritten():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), *tail()[1:])
    seen = []
    model[0].register_forward_hook(lambda m, args, output: seen.append(output))
    report = convert_(model, SMALL, example=IMAGE)
    assert [step.action for step in report.norms] == ["shift"]
    model(torch.randn(IMAGE))
    assert seen[-1].min() < 0


class Tapping(nn.Module):
    def __init__(self, keep):
        super().__init__()
        self.conv, self.norm, self.tail = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Sequential(*tail()[1:])
        self.keep, self.loop = keep, []
        self.loop.append(self.loop)  # nothing to get lost in

    def forward(self, x):
        y = self.conv(x)
        self.feature = self.keep(y)
        return self.tail(F.relu_(self.norm(y)))


@pytest.mark.parametrize(
    "keep", [lambda y: y, lambda y: y.detach(), lambda y: y[0], lambda y: [y.flatten(2)], lambda y: Holder(y)]
)
def test_a_feature_that_is_kept_as_an_attribute_is_not_overwritten(keep):
    model = convert(Tapping(keep), SMALL, example=IMAGE)
    model(torch.randn(IMAGE))
    (kept,) = tensors_in(model.feature)
    assert kept.min() < 0


# -- heads -------------------------------------------------------------------------------------------------------


class Turned(nn.Module):
    """A head that moves its classes."""

    def __init__(self, classes: int = 4):
        super().__init__()
        self.layer = nn.Conv2d(8, classes, 1)

    def forward(self, x):
        return self.layer(x).permute(0, 2, 3, 1)


def test_a_container_as_head_is_normalised_along_its_classes():
    def net(classes: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), Turned(classes))

    model = net(4)
    head = convert_(model, SMALL, example=IMAGE, head="3").heads[0]
    assert (head.outputs, head.dim) == (4, 3)
    torch.testing.assert_close(model(torch.randn(IMAGE)).mean((0, 1, 2)), torch.zeros(4), atol=1e-5, rtol=0)
    with pytest.raises(RefusedError, match=r"along which dimension classes lie.*Name the layer inside it, '3.layer'"):
        plan(net(16), SMALL, example=IMAGE, head="3").require()


def test_a_head_named_twice_by_another_name_or_with_its_container():
    model = nn.Module()
    model.net = plain()
    model.alias = model.net[5]
    model.forward = model.net.forward
    assert [h.name for h in plan(model, SMALL, example=IMAGE, head=["net.5", "net.5", "alias"]).heads] == ["net.5"]
    with pytest.raises(RefusedError, match="5: is inside 'the model', and both are to be heads"):
        plan(plain(), SMALL, example=IMAGE, head=["5", ""]).require()
    with pytest.raises(RefusedError, match="1: head= names a BatchNorm"):
        plan(plain(), SMALL, example=IMAGE, head="1").require()
    with pytest.raises(RefusedError, match="2: head= names a module whose output goes into further layers"):
        plan(plain(), SMALL, example=IMAGE, head="2").require()


class Cropped(Turned):
    def forward(self, x):
        return F.interpolate(self.layer(x), scale_factor=2)[:, :, :4, :4]


def test_a_head_that_crops_turns_nothing():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), Cropped(4))
    assert [(h.outputs, h.dim) for h in plan(model, SMALL, example=IMAGE, head="3").heads] == [(4, 1)]


class Dueling(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.value, self.advantage = nn.Linear(32, 1), nn.Linear(32, 6)

    def forward(self, x):
        h = self.body(x)
        advantage = self.advantage(h)
        return self.value(h) + advantage - advantage.mean(1, keepdim=True)


def test_a_dueling_network_makes_values_and_not_class_scores():
    with pytest.raises(RefusedError, match="different numbers of outputs"):
        plan(Dueling(), SMALL, example=(4, 12)).require()
    named = plan(Dueling(), SMALL, example=(4, 12), head=["value", "advantage"])
    assert {h.name for h in named.heads} == {"value", "advantage"}


class Levels(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x)))
        return self.head(x), self.head(F.max_pool2d(x, 2))


def test_a_head_that_runs_several_times_is_noted():
    notes = plan(Levels(), SMALL, example=IMAGE, head="head").notes
    assert any("'head' runs 2 times" in note for note in notes)
    assert not any("times" in note for note in plan(plain(), SMALL, example=IMAGE).notes)


# -- weights and starts ------------------------------------------------------------------------------------------


class Einsum(nn.Module):
    def __init__(self, linear: bool = False):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(64, 64)) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(64) for _ in range(3))
        self.first = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)) if linear else nn.Identity()
        self.fc = nn.Linear(64, 3)

    def forward(self, x):
        x = self.first(x)
        for weight, norm in zip(self.weights, self.norms, strict=True):
            x = F.relu(norm(torch.einsum("bi,ij->bj", x, weight)))
        return self.fc(x)


def test_a_weight_that_no_layer_holds_is_said_and_alone_refused():
    notes = plan(Einsum(linear=True), SMALL, example=(4, 64)).notes
    assert sum("made by einsum in the model itself, not by a convolution or linear layer" in n for n in notes) == 3
    invariants.refuses(Einsum(), SMALL, example=(4, 64), match="norms.0: MimicNorm changes convolutions and linear lay")
    convert_(Einsum(), NoNorm(), example=(4, 64))
    convert_(Einsum(), GroupNormWS(), example=(4, 64))


def test_a_network_in_which_no_layer_is_changed_is_told_so():
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.BatchNorm1d(16), nn.Linear(16, 3))
    assert any("no layer is changed" in note for note in plan(model, SMALL, example=(4, 8)).notes)


class NoisyNorm(nn.BatchNorm2d):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.5, self.training)


class Neutral(nn.BatchNorm2d):
    def forward(self, x):
        return 1.0 * super().forward(x) + 0.0


class OtherView(nn.BatchNorm2d):
    """Nothing but a normalisation, whatever it does to shapes on the way."""

    def forward(self, x):
        return torch.cat([super(OtherView, self).forward(chunk) for chunk in x.chunk(2)])


def test_what_a_norm_does_in_training_only_is_not_lost():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), NoisyNorm(8), *tail())
    invariants.refuses(model, SMALL, example=IMAGE, match="1: NoisyNorm does more than normalise")
    for kind in (OtherView, Neutral):
        convert_(nn.Sequential(nn.Conv2d(3, 8, 3), kind(8), *tail()), SMALL, example=IMAGE)


class Holder:
    def __init__(self, x):
        self.x = x


class RawInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.net = nn.BatchNorm2d(3), plain()

    def forward(self, batch):
        return self.net(self.first(batch.x))


def test_a_norm_on_the_raw_input_is_refused_inside_an_object_too():
    for example in ({"batch": Holder(torch.randn(IMAGE))}, (Holder(torch.randn(IMAGE)),)):
        with pytest.raises(RefusedError, match="first: this BatchNorm normalises the model's own input"):
            plan(RawInput(), SMALL, example=example).require()


class Momentum(nn.Module):
    """A forward pass that writes into a parameter."""

    def __init__(self):
        super().__init__()
        self.net, self.target = plain(), nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x):
        y = self.net(x)
        with torch.no_grad():
            self.target.add_(1 + y.detach().mean(0))
        return y


def test_calibration_keeps_nothing_that_the_forward_pass_writes():
    model = Momentum()
    convert_(model, SMALL, example=IMAGE, init="calibrate")
    assert not model.target.any()


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.online, self.target = plain(), plain().requires_grad_(False)

    def forward(self, x):
        return self.online(x), self.target(x)


def test_frozen_layers_that_are_redrawn_are_noted():
    planned = plan(Both(), SMALL, example=IMAGE)
    assert any("1 frozen layer (target.0) will get new initial weights" in note for note in planned.notes)
    assert not plan(Both(), SMALL, example=IMAGE, init=None).notes


def test_a_trained_network_without_running_statistics_is_recognised():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, track_running_stats=False), *tail())
    plan(copy.deepcopy(model), SMALL, example=IMAGE).require()
    nn.init.normal_(model[1].bias)
    with pytest.raises(RefusedError, match="looks trained"):
        plan(model, SMALL, example=IMAGE).require()


def test_init_starts_the_last_norm_anew():
    model = plain()
    convert_(model, SMALL, example=IMAGE)
    model(torch.randn(IMAGE))
    last = next(m for m in model.modules() if isinstance(m, LastNorm))
    assert last.num_batches_tracked == 1
    init_(model)
    assert not last.num_batches_tracked.any()
    assert not last.running_mean.any()
    assert (last.running_var == 1).all()


class Residual(nn.Module):
    def __init__(self, join, c: int = 32, blocks: int = 6):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, c, 3, padding=1), nn.BatchNorm2d(c), nn.ReLU())
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(c, c, 3, padding=1), nn.BatchNorm2d(c)) for _ in range(blocks)
        )
        self.fc, self.join = nn.Linear(c, 4), join

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = self.join(x, block(x))
        return self.fc(x.mean((2, 3)))


def test_theory_knows_the_variance_of_a_weighted_sum():
    planned = plan(Residual(lambda x, y: F.relu(torch.add(x, y, alpha=0.1))), SMALL, example=IMAGE)
    assert planned.init == "theory"
    assert [step.v for step in planned.norms][-1] == pytest.approx(1 + 0.01 * 5, abs=1e-3)


def test_theory_is_not_claimed_for_a_saturating_activation_of_another_variance():
    planned = plan(Residual(lambda x, y: torch.tanh(x + y)), SMALL, example=IMAGE)
    assert planned.init == "calibrate"
    assert "tanh of a variance that is not 1" in planned.init_why
    assert plan(Residual(lambda x, y: F.relu(x + y)), SMALL, example=IMAGE).init == "theory"


class Renormed(nn.Module):
    def forward(self, x):
        return torch.renorm(x, 2, 1, 1.0)


def test_renorm_over_the_batch_is_seen():
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), Renormed(), nn.Linear(16, 3))
    invariants.refuses(model, SMALL, example=torch.randn(8, 16), match="'2' .Renormed. works across the batch")


# -- all or nothing, and what is said ----------------------------------------------------------------------------


def test_init_is_all_or_nothing():
    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.fails = plain(), False

        def forward(self, x):
            y = self.net(x)
            if self.fails:
                raise ValueError("late")
            return y

    model = Failing()
    convert_(model, SMALL, example=IMAGE)
    model.fails = True
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ExampleError, match="late"):
        init_(model, "calibrate", example=torch.randn(IMAGE))
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


@pytest.mark.parametrize(
    "where",
    [lambda m, name: m.no_such_thing, lambda m, name: {}[name], lambda m, name: torch.ones(2), lambda m, name: 1 + ""],
)
def test_a_where_that_raises_is_named(where):
    with pytest.raises(MimicNormError, match=r"where= raised on '1': "):
        plan(plain(), SMALL, example=IMAGE, where=where)


def test_a_where_of_other_arguments():
    with pytest.raises(MimicNormError, match=r"where must take \(module, qualified_name\)"):
        plan(plain(), SMALL, example=IMAGE, where=lambda m: True)


class ByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = plain()

    def forward(self, *, image):
        return self.net(image)


@pytest.mark.parametrize(
    ("model", "example", "words"),
    [
        (plain(), torch.zeros(0, 3, 16, 16), "has no elements"),
        (plain(), (2, 3, 10**6, 10**6), "does not fit into memory"),
        (ByName(), IMAGE, r"Arguments by name go in a dict: example=\{'image': tensor\}"),
        (
            nn.Sequential(nn.Embedding(5, 8), nn.Flatten(), nn.BatchNorm1d(24)),
            (2, 3),
            "A shape stands for one float tensor",
        ),
    ],
)
def test_examples_that_do_not_fit(model, example, words):
    with pytest.raises(MimicNormError, match=words):
        plan(model, SMALL, example=example)


def test_what_is_no_module():
    for call in (lambda: check("x"), lambda: init_("x")):
        with pytest.raises(MimicNormError, match=r"model must be a torch.nn.Module; got str"):
            call()
    outer = nn.ModuleDict({"body": convert(plain(), SMALL, example=IMAGE)})
    with pytest.raises(CheckError, match="call init_ on 'body'"):
        init_(outer, "calibrate", example=IMAGE)


def test_last_bn_alone_needs_no_layer():
    convert_(Einsum(), LastBN(), example=(4, 64))
