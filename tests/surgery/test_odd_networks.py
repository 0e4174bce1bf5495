"""Networks written in ways that a converter must not trip over silently. Beta is never zero here."""

from __future__ import annotations

import copy
import os
import random
import subprocess
import sys
from pathlib import Path

import invariants
import nets
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mimicnorm.deploy import fold
from mimicnorm.errors import ExampleError, MimicNormError, RefusedError
from mimicnorm.layers import LastNormed, Shift, WeightMean
from mimicnorm.methods import Fixup, GroupNormWS, LastBN, MimicNorm, NoNorm, ScaledWS
from mimicnorm.surgery.convert import convert, convert_
from mimicnorm.surgery.init import initialise
from mimicnorm.surgery.planning import plan

SMALL = MimicNorm(min_fan_in=8)


class Pair(nn.Module):
    """Two convolutions with BatchNorm; the wiring is given."""

    def __init__(self, run, c: int = 8):
        super().__init__()
        self.a, self.b = nets.conv(3, c), nets.conv(c, c)
        self.na, self.nb = nn.BatchNorm2d(c), nn.BatchNorm2d(c)
        self.fc = nn.Conv2d(c, 4, 1)
        self.run = run

    def forward(self, x):
        return self.fc(self.run(self, x))


@torch.jit.script
def scripted_swish(x):
    return x * torch.sigmoid(x)


def through_scripted_function(m, x):
    return F.relu(m.nb(m.b(scripted_swish(m.na(m.a(x))))), inplace=True)


def into_a_buffer(m, x):
    y = m.na(m.a(x))
    buffer = y.new_zeros(y.shape)
    buffer.narrow(1, 0, 4).copy_(y[:, :4])
    buffer.narrow(1, 4, 4).copy_(y[:, 4:])
    return F.relu(m.nb(m.b(buffer)))


def evaluation_only_path(m, x):
    y = F.relu(m.na(m.a(x)))
    return y if m.training else y + m.b(F.relu(m.nb(y), inplace=True))


def borrowed_weight(m, x):
    return m.nb(F.conv2d(F.relu(m.na(m.a(x))), m.b.weight, padding=1))


def from_a_list(m, x):
    for layer in [m.a, m.na, torch.relu, m.b, m.nb]:
        x = layer(x)
    return x


def two_norms_on_one_output(m, x):
    y = m.a(x)
    return F.relu(m.na(y), inplace=True) + F.relu(m.nb(y), inplace=True)


def ghost_batches(m, x):
    y = torch.cat([m.na(part) for part in m.a(x).chunk(3)])
    return F.relu(m.nb(m.b(F.relu(y, inplace=True))))


def the_same_pair_twice(m, x):
    y = F.relu(m.na(m.a(x)), inplace=True) + F.relu(m.na(m.a(x.flip(3))), inplace=True)
    return F.relu(m.nb(m.b(y)))


WIRINGS = [
    through_scripted_function,
    into_a_buffer,
    evaluation_only_path,
    borrowed_weight,
    from_a_list,
    two_norms_on_one_output,
    ghost_batches,
    the_same_pair_twice,
]


@pytest.mark.parametrize("run", WIRINGS)
def test_surgery_removes_normalisation_and_nothing_else(run):
    model, x = Pair(run), torch.randn(3, 3, 8, 8)
    invariants.surgery_removes_normalisation_and_nothing_else(model, x)
    invariants.identity_norms_(model)
    model.eval()
    converted = convert(model, NoNorm(), example=x, init=None)
    torch.testing.assert_close(converted(x), model(x), rtol=1e-4, atol=1e-4)


def test_layers_behind_a_scripted_function_are_converted():
    model = convert(Pair(through_scripted_function), SMALL, example=(2, 3, 8, 8))
    assert isinstance(model.a, WeightMean)
    assert isinstance(model.b, WeightMean)


def test_a_layer_whose_output_only_batch_norms_read_is_theirs():
    for run in (two_norms_on_one_output, ghost_batches):
        model = convert(Pair(run), SMALL, example=(3, 3, 8, 8))
        assert isinstance(model.a, WeightMean)
        assert isinstance(model.na, Shift)


def test_a_pair_used_twice_is_folded_once():
    report = convert_(Pair(the_same_pair_twice), SMALL, example=(3, 3, 8, 8))
    assert report.moved_parameters["na.bias"] == "a.bias"


class FromAConstant(nn.Module):
    def __init__(self):
        super().__init__()
        self.constant = nn.Parameter(torch.randn(1, 8, 4, 4))
        self.conv, self.bn, self.mix, self.bn2 = nets.conv(8, 8), nn.BatchNorm2d(8), nets.conv(16, 8), nn.BatchNorm2d(8)
        self.fc = nn.Conv2d(8, 3, 1)

    def forward(self, x):
        y = F.relu(self.bn(self.conv(self.constant)), inplace=True).expand(len(x), -1, -1, -1)
        return self.fc(F.relu(self.bn2(self.mix(torch.cat((x, y), 1)))))


def test_a_learned_constant_is_followed_too():
    model, x = FromAConstant(), torch.randn(3, 8, 4, 4)
    invariants.surgery_removes_normalisation_and_nothing_else(model, x)
    assert isinstance(convert(model, SMALL, example=x).conv, WeightMean)


class Sequence(nn.Module):
    """BatchNorm1d straight after a Linear on (batch, time, channels): it normalises over time steps."""

    def __init__(self, time: int, bias: bool):
        super().__init__()
        self.fc1, self.bn, self.fc2 = nn.Linear(6, 6, bias=bias), nn.BatchNorm1d(time), nn.Linear(6, 2)

    def forward(self, x):
        return self.fc2(F.relu(self.bn(self.fc1(x))))


@pytest.mark.parametrize("time", [5, 6])
@pytest.mark.parametrize("bias", [True, False])
def test_beta_stays_on_its_own_axis(time, bias):
    model, x = Sequence(time, bias), torch.randn(3, time, 6)
    invariants.surgery_removes_normalisation_and_nothing_else(model, x)
    assert isinstance(convert(model, NoNorm(), example=x).bn, Shift)


def test_frozen_batch_norm_that_calls_the_function_itself():
    class Frozen(nn.Module):
        def __init__(self, n):
            super().__init__()
            for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
                self.register_buffer(name, torch.full((n,), value))

        def forward(self, x):
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, training=False)

    model = nn.Sequential(nets.conv(3, 8), Frozen(8), nn.ReLU(), nn.Conv2d(8, 2, 1))
    report = convert_(model, SMALL, example=(2, 3, 8, 8))
    assert [(n.role, n.action) for n in report.norms] == [("post", "remove")]
    assert isinstance(model[0], WeightMean)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nets.conv(8, 8), nets.conv(8, 8)
        self.b.weight = self.a.weight
        self.na, self.nb, self.fc = nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1)

    def forward(self, x):
        return self.fc(self.nb(self.b(F.relu(self.na(self.a(x))))))


def test_tied_weights_are_centred_in_both_places():
    x = torch.randn(4, 8, 8, 8)
    for init in ("theory", "calibrate"):
        model = convert(Tied(), SMALL, example=x, init=init)
        assert isinstance(model.a, WeightMean)
        assert isinstance(model.b, WeightMean)
        assert model.a.weight is model.b.weight


def test_the_plan_does_not_depend_on_the_hash_seed_or_the_random_state():
    code = (
        f"import sys; sys.path[:0] = [{str(Path(__file__).parents[1])!r}, {str(Path(__file__).parent)!r}]\n"
        "import test_odd_networks as t\n"
        "print(t.plan(t.Tied(), t.SMALL, example=(2, 8, 8, 8)).as_dict())"
    )
    out = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": s},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for s in "12"
    ]
    assert out[0] == out[1]


class RandomDepth(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.stem, self.draw = nets.conv(3, 8), draw
        self.blocks, self.fc = nn.ModuleList(nets.Block(8, 8) for _ in range(5)), nn.Linear(8, 3)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            if not self.training or self.draw() < 0.5:
                x = block(x)
        return self.fc(x.mean((2, 3)))


@pytest.mark.parametrize("draw", [random.random, lambda: torch.rand(1).item()])
def test_blocks_dropped_at_random_are_all_planned_whatever_the_seed(draw):
    plans = []
    for seed in range(2):
        random.seed(seed)
        torch.manual_seed(seed)
        plans.append(plan(RandomDepth(draw), SMALL, example=(2, 3, 8, 8)))
    assert plans[0].totals() == plans[1].totals()
    assert plans[0].totals()["centred"] == 10
    assert not plans[0].notes


def test_calibrate_sets_even_what_did_not_run():
    model = RandomDepth(random.random)
    report = convert_(model, SMALL, example=(2, 3, 8, 8), init=None)
    with torch.no_grad():
        for block in model.blocks:
            block.conv1.weight.mul_(100)
    initialise(model, report, "calibrate", torch.randn(4, 3, 8, 8))
    assert all(block.conv1.weight.std() < 2 for block in model.blocks)


def test_frozen_and_mixed_types():
    frozen = Pair(lambda m, x: m.na(m.a(x)) + m.nb(m.b(m.a(x)))).requires_grad_(False)
    converted = convert(frozen, MimicNorm(), example=(2, 3, 8, 8))
    assert not any(p.requires_grad for p in converted.parameters())
    mixed = Pair(lambda m, x: m.na(m.a(x).float()).bfloat16()).bfloat16()
    mixed.na.float()
    convert(mixed, NoNorm(), example=(2, 3, 8, 8))
    half_frozen = Pair(lambda m, x: m.na(m.a(x)))
    half_frozen.a = nn.Conv2d(3, 8, 1)
    half_frozen.a.bias.requires_grad_(False)
    assert convert(half_frozen, NoNorm(), example=(2, 3, 8, 8)).na.bias.requires_grad


def test_a_named_container_head_is_not_centred_inside():
    model = nn.Sequential(
        nets.conv(3, 8), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Sequential(nn.Dropout(), nn.Linear(512, 3))
    )
    report = convert_(model, SMALL, example=(2, 3, 8, 8), head="4")
    assert [s.name for s in report.layers] == ["0"]
    assert isinstance(model[4], LastNormed)


def test_attributes_and_examples_are_left_alone():
    class Keeps(Pair):
        def __init__(self):
            super().__init__(lambda m, x: m.na(m.a(x.mul_(2))))
            self.seen, self.total = [], torch.zeros(1)

        def forward(self, x):
            self.seen.append(x)
            self.total += 1
            return super().forward(x)

    model, x = Keeps(), torch.ones(2, 3, 8, 8) + torch.randn(2, 3, 8, 8)
    before = x.clone()
    convert_(model, SMALL, example=x, init="calibrate")
    assert model.seen == []
    assert model.total.item() == 0
    assert torch.equal(x, before)


def test_weight_norm_is_fine_where_no_weight_is_touched():
    model = Pair(lambda m, x: m.na(m.a(x)))
    model.a = nn.utils.parametrizations.weight_norm(model.a)
    invariants.surgery_removes_normalisation_and_nothing_else(model, torch.randn(2, 3, 8, 8))
    with pytest.raises(RefusedError, match="a: its weight is computed"):
        convert(model, SMALL, example=(2, 3, 8, 8))


def test_code_that_asks_a_batch_norm_for_its_width_goes_on():
    model = Pair(lambda m, x: m.na(m.a(x)) * m.na.num_features)
    model.na.mine = "yes"
    assert convert(model, SMALL, example=(2, 3, 8, 8)).na.mine == "yes"


def test_a_trunk_is_no_branch():
    class Gated(Pair):
        def __init__(self):
            super().__init__(self.wire)

        @staticmethod
        def wire(m, x):
            y = F.relu(m.na(m.a(x)))
            return y + y * torch.sigmoid(m.b(y))

    assert all(s.scale is None for s in plan(Gated(), SMALL, example=(2, 3, 8, 8)).layers)


def test_types_are_checked_by_the_layers_themselves():
    layer = convert(nn.Sequential(nets.conv(8, 8), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1)), SMALL, example=(2, 8, 4, 4))
    for wrong in (torch.ones(2, 8, 4, 4, dtype=torch.int64), torch.ones(2, 8, 4, 4).double()):
        with pytest.raises(RuntimeError, match="type"):
            layer(wrong)


def test_siamese_use():
    class Siamese(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.fc = nets.resnet(8), nn.Linear(8, 2)

        def forward(self, x, y):
            return self.fc((self.body(x) - self.body(y)).abs())

    x, y = torch.randn(3, 3, 8, 8), torch.randn(3, 3, 8, 8)
    model = Siamese()
    invariants.identity_norms_(model)
    converted = convert(model, NoNorm(), example=(x, y), init=None)
    torch.testing.assert_close(converted(x, y), model(x, y), rtol=1e-4, atol=1e-4)
    assert copy.deepcopy(converted) is not converted


class PointNet(nn.Module):
    """A small network makes a matrix for the large one; the matrix is an output, too."""

    def __init__(self):
        super().__init__()
        self.small = nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU())
        self.matrix = nn.Linear(16, 9)
        self.large = nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        turn = self.matrix(self.small(x).amax(2)).view(-1, 3, 3) + torch.eye(3)
        return self.head(self.large(turn @ x).amax(2)), turn


def test_an_output_that_the_network_reads_on_is_no_head():
    x = torch.randn(3, 3, 7)
    invariants.surgery_removes_normalisation_and_nothing_else(PointNet(), x)
    p = plan(PointNet(), SMALL, example=x)
    assert [h.name for h in p.heads] == ["head"]
    assert "the rest of the network reads it, too" in p.notes[0]


class WithLoss(nn.Module):
    """Computes its own loss, as models that take labels do."""

    def __init__(self, also_logits: bool):
        super().__init__()
        self.body, self.fc, self.also_logits = (
            nn.Sequential(nets.conv(3, 8), nn.BatchNorm2d(8)),
            nn.Linear(8, 3),
            also_logits,
        )

    def forward(self, x, labels):
        scores = self.fc(F.relu(self.body(x)).mean((2, 3)))
        loss = F.cross_entropy(scores, labels)
        return {"logits": scores, "loss": loss} if self.also_logits else loss


@pytest.mark.parametrize("also_logits", [True, False])
def test_logits_that_a_loss_reads_are_logits(also_logits):
    example = (torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 0]))
    model = convert(WithLoss(also_logits), SMALL, example=example)
    assert isinstance(model.fc, LastNormed)
    output = model(*example)
    (output["loss"] if also_logits else output).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


class TiedAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.na = nets.conv(3, 8), nn.BatchNorm2d(8)

    def forward(self, x):
        return F.conv_transpose2d(F.relu(self.na(self.a(x))), self.a.weight, padding=1)


def test_a_decoder_that_borrows_the_encoders_weight():
    invariants.surgery_removes_normalisation_and_nothing_else(TiedAutoencoder(), torch.randn(2, 3, 8, 8))
    with pytest.raises(RefusedError, match=r"a: is the head, yet a BatchNorm follows it.*last_norm=False"):
        convert(TiedAutoencoder(), SMALL, example=(2, 3, 8, 8))


def test_looking_at_a_spectral_norm_does_not_turn_its_wheel():
    model = Pair(lambda m, x: m.na(m.a(x)))
    model.a = nn.utils.parametrizations.spectral_norm(model.a)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(RefusedError, match="a: its weight is computed"):
        convert_(model, SMALL, example=(2, 3, 8, 8))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_what_cannot_be_copied_is_converted_in_place():
    model = Pair(lambda m, x: m.na(m.a(x)))
    model.b = nn.utils.weight_norm(model.b)
    with pytest.raises(MimicNormError, match=r"Pair cannot be copied.*convert_"):
        convert(model, SMALL, example=(2, 3, 8, 8), where=lambda m, name: name != "nb")
    convert_(model, SMALL, example=(2, 3, 8, 8), where=lambda m, name: name != "nb")


def test_logits_of_a_bare_weight_are_named_for_what_they_are():
    class Cosine(Pair):
        def forward(self, x):
            features = F.normalize(self.na(self.a(x)).mean((2, 3)))
            return 16 * F.linear(features, F.normalize(self.fc.weight.flatten(1)))

    with pytest.raises(RefusedError, match=r"is made by linear .* with a weight that no layer holds.*head="):
        convert(Cosine(lambda m, x: x), SMALL, example=(2, 3, 8, 8))


def test_a_model_that_takes_a_dict_or_a_list_is_told_how_to_pass_it():
    class Batch(Pair):
        def forward(self, batch):
            return super().forward(batch["image"] if isinstance(batch, dict) else torch.stack(batch))

    model, image = Batch(lambda m, x: m.na(m.a(x))), torch.randn(2, 3, 8, 8)
    for example in ({"image": image}, list(image)):
        with pytest.raises(ExampleError, match=r"write \(example,\) to pass it as one"):
            plan(model, SMALL, example=example)
        assert plan(model, SMALL, example=(example,)).ok


class Viewed(nn.Module):
    """A norm without affine behind a view, and an activation that writes into what it is given."""

    def __init__(self, view):
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8, affine=False), nn.ReLU(inplace=True)
        self.view, self.fc = view, nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(self.act(self.norm(self.view(self.conv(x)))).mean((2, 3)))


VIEWS = {
    "expand": lambda y: y.mean((2, 3), keepdim=True).expand(-1, -1, 4, 4),
    "expanded layer": lambda y: y[:, :, :1, :1].expand(-1, -1, 4, 4),
    "split": lambda y: y.split(8, 1)[0],
    "chunk": lambda y: y.chunk(1)[0],
    "unbind": lambda y: y[None].unbind(0)[0],
    "view": lambda y: y.view(y.shape),
}


@pytest.mark.parametrize("method", [MimicNorm(min_fan_in=1), NoNorm()], ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_before_a_norm_without_affine_is_not_written_into(view, method):
    invariants.hold(Viewed(VIEWS[view]), torch.randn(3, 3, 8, 8), method)


class ViewedAtASum(nn.Module):
    """The same where no activation follows at once: the sum writes into what the norm hands on."""

    def __init__(self, view):
        super().__init__()
        self.a, self.b, self.view, self.fc = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1), view, nn.Linear(8, 4)
        self.conv, self.norm, self.short = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.BatchNorm2d(8, affine=False)

    def forward(self, x):
        y = self.short(self.view(self.b(x)))
        y += self.norm(self.conv(self.a(x).relu()))
        return self.fc(y.relu().mean((2, 3)))


@pytest.mark.parametrize("view", [lambda y: y.split(8, 1)[0], lambda y: y[None].unbind(0)[0]])
def test_a_shortcut_through_a_view_is_not_written_into(view):
    for method in (Fixup(), SMALL):
        model = convert(ViewedAtASum(view), method, example=(3, 3, 8, 8))
        model(torch.randn(3, 3, 8, 8)).square().mean().backward()
        assert model.b.weight.grad.isfinite().all()


def test_a_norm_without_affine_directly_behind_its_layer_costs_nothing():
    assert isinstance(convert(Viewed(lambda y: y), SMALL, example=(3, 3, 8, 8)).norm, nn.Identity)


class Droops(nn.BatchNorm2d):
    """A norm that runs a child."""

    def __init__(self, width):
        super().__init__(width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return self.drop(super().forward(x))


class ScaledEnd(nn.Module):
    """A branch that ends in such a norm, where the scalar cannot be folded into a layer."""

    def __init__(self):
        super().__init__()
        self.stem, self.conv, self.norm = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1, groups=8), Droops(8)
        self.norm0, self.fc = nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x):
        x = self.norm0(self.stem(x)).relu()
        return self.fc((x + self.norm(self.conv(x).relu())).relu().mean((2, 3)))


def test_a_beta_that_moves_beside_a_scalar_is_reported():
    model = ScaledEnd()
    keys = set(model.state_dict())
    report = convert_(model, SMALL, example=(3, 3, 8, 8))
    assert report.moved_parameters["norm.bias"] == "norm.instead.bias"
    assert set(model.state_dict()) - keys <= {*report.moved_parameters.values(), *dict(report.new_parameters)} | {
        f"fc.last_norm.{k}" for k in ("running_mean", "running_var", "num_batches_tracked")
    }


class ViewedBehind(nn.Module):
    """A BatchNorm gives contiguous tensors, of whatever strides: code relies on it."""

    def __init__(self, way: str, affine: bool):
        super().__init__()
        self.way = way
        norm = nn.BatchNorm2d if way == "columns" else nn.BatchNorm1d
        self.layer, self.norm, self.fc = nn.Linear(16, 32), norm(32, affine=affine), nn.Linear(32 * 6, 4)

    def forward(self, x):
        x = self.layer(x)
        x = x.transpose(1, 2) if self.way == "tokens" else x.unflatten(1, (2, 3)).permute(0, 3, 2, 1)
        return self.fc(self.norm(x).view(len(x), -1))


@pytest.mark.parametrize("way", ["tokens", "columns"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("method", [MimicNorm(), NoNorm(), GroupNormWS(), ScaledWS()], ids=lambda m: m.name)
def test_views_of_what_a_batch_norm_made_of_a_permuted_tensor(method, affine, way):
    model, x = ViewedBehind(way, affine), torch.randn(3, 6, 16)
    convert_(model, method, example=x)
    assert model(x).shape == (3, 4)
    torch.testing.assert_close(fold(model.eval())(x), model(x), rtol=1e-5, atol=1e-5)


class Complex(nn.Module):
    """A layer with complex weights, whose real and imaginary part have a BatchNorm each; its head may be complex."""

    def __init__(self, complex_head: bool):
        super().__init__()
        self.layer = nn.Linear(24, 32, dtype=torch.complex64)
        self.real, self.imaginary = nn.BatchNorm1d(32), nn.BatchNorm1d(32)
        self.fc = nn.Linear(32, 4, dtype=torch.complex64 if complex_head else torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        x = torch.complex(self.real(x.real).relu(), self.imaginary(x.imag).relu())
        return self.fc(x).real if self.fc.weight.is_complex() else self.fc(x.abs())


def test_complex_layers_are_not_changed():
    x = torch.randn(5, 24, dtype=torch.complex64)
    invariants.refuses(Complex(False), MimicNorm(), example=x, match="layer: its weight is complex")
    invariants.refuses(Complex(True), LastBN(), example=x, match="fc: makes complex numbers")
    assert type(convert(Complex(True), NoNorm(), example=x).layer) is nn.Linear
    trained = Complex(False)
    for _ in range(3):
        trained(torch.randn(5, 24, dtype=torch.complex64))
    kept = convert(trained, MimicNorm(), example=x, init="keep")
    torch.testing.assert_close(kept(x), trained.eval()(x))
