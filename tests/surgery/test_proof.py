"""A plan without refusals can be carried out, and what it makes is the network as it was, without its norms."""

from __future__ import annotations

import copy

import invariants
import nets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mimicnorm as mn
from mimicnorm.methods import METHODS

IMAGE = (4, 3, 8, 8)


class Stack(nn.Module):
    """A network that decides by the class of a layer what to do with it."""

    def __init__(self, step, norm: type[nn.Module] = nn.BatchNorm2d):
        super().__init__()
        self.body = nn.ModuleList([nn.Conv2d(3, 8, 3, padding=1), norm(8), nn.ReLU(), nn.Conv2d(8, 8, 1), norm(8)])
        self.fc = nn.Linear(8, 5)
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.body:
            x = self.step(layer, x)
        return self.fc(x.mean((2, 3)))


class Embedded(nn.Module):
    """Adds an embedding of time after each norm, as diffusion networks do."""

    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8)])
        self.time, self.fc = nn.Linear(2, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        for layer in self.body:
            x = layer(x)
            if isinstance(layer, nn.BatchNorm1d):
                x = x + self.time(t)
        return self.fc(x)


class Collects(nn.Module):
    """Returns, or keeps, what comes out of its norms."""

    def __init__(self, keeps: bool):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1))
        self.fc, self.keeps = nn.Linear(8, 5), keeps

    def forward(self, x: Tensor) -> Tensor | tuple:
        self.seen = []
        for layer in self.body:
            x = layer(x)
            if isinstance(layer, nn.BatchNorm2d):
                self.seen.append(x)
        x = self.fc(x.mean((2, 3)))
        return x if self.keeps else (x, *[t.mean((2, 3)) for t in self.seen])


def turned(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x.transpose(2, 3)).transpose(2, 3) if isinstance(layer, nn.BatchNorm2d) else layer(x)


def doubled(layer: nn.Module, x: Tensor) -> Tensor:
    return 2 * layer(x) if type(layer) is nn.Conv2d else layer(x)


def by_attribute(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x) + 1 if hasattr(layer, "running_var") else layer(x)


def activated(layer: nn.Module, x: Tensor) -> Tensor:
    x = layer(x)
    return F.gelu(x) if "BatchNorm" in type(layer).__name__ else x


@pytest.mark.parametrize("method", ["mimicnorm", "nonorm", "groupnorm-ws"])
@pytest.mark.parametrize("step", [turned, by_attribute, activated])
def test_a_path_that_depends_on_the_norms_class_is_refused(step, method: str):
    model = Stack(step)
    planned = mn.plan(model, METHODS[method](), example=IMAGE)
    assert "takes another path" in str(planned.refusals[0])
    invariants.refuses(model, METHODS[method](), example=IMAGE, match="the network takes another path")


def test_a_path_that_depends_on_the_layers_class_is_refused():
    invariants.refuses(
        Stack(doubled), mn.MimicNorm(min_fan_in=1), example=IMAGE, match="'mul' in the model's own forward"
    )
    mn.convert(Stack(doubled), mn.NoNorm(), example=IMAGE)  # its layers keep their classes


def test_an_embedding_that_would_not_be_added_any_more_is_refused():
    example = (torch.randn(4, 6), torch.randn(4, 2))
    invariants.refuses(Embedded(), mn.MimicNorm(), example=example, match="'linear' in 'time' is not as before")


@pytest.mark.parametrize("keeps", [True, False])
def test_features_that_would_not_be_collected_any_more_are_missed(keeps: bool):
    invariants.refuses(Collects(keeps), mn.MimicNorm(last_norm=False), example=IMAGE, match="takes another path")


def test_the_refusal_names_the_module_whose_code_asks():
    model = nn.Sequential(nn.Conv2d(3, 3, 1), Stack(turned))
    assert [r.name for r in mn.plan(model, mn.MimicNorm(), example=IMAGE).refusals] == ["1"]


def test_code_that_reads_statistics_is_refused_in_the_plan():
    model = Stack(lambda layer, x: layer(x))
    model.step = lambda layer, x: layer(x) if layer is not model.body[1] else layer(x) * layer.running_var.mean()
    planned = mn.plan(model, mn.MimicNorm(), example=IMAGE)
    assert "does not run any more (AttributeError" in str(planned.refusals[0])


NUMBERS = {
    "factor": lambda x, hit: x * (0.1 if hit else 1.0),
    "shift": lambda x, hit: x + (1.0 if hit else 0.0),
    "roll": lambda x, hit: x.roll(int(hit), 2),
    "slice": lambda x, hit: x[..., int(hit) :],
    "slope": lambda x, hit: F.leaky_relu(x, 0.3 if hit else 0.1),
}


@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_that_depends_on_the_class_is_refused(number: str):
    model = Stack(lambda layer, x: NUMBERS[number](layer(x), isinstance(layer, nn.BatchNorm2d)))
    invariants.refuses(model, mn.NoNorm(), example=IMAGE, match="takes another path")
    exact = Stack(lambda layer, x: NUMBERS[number](layer(x), type(layer) is nn.Conv2d))
    invariants.refuses(exact, mn.MimicNorm(min_fan_in=1), example=IMAGE, match="takes another path")


class Penalised(Stack):
    """Returns a penalty beside its output."""

    def __init__(self, penalty):
        super().__init__(lambda layer, x: layer(x))
        self.penalty = penalty

    def forward(self, x):
        return super().forward(x), self.penalty(self)


def test_a_penalty_that_would_be_lost_is_refused():
    gammas = Penalised(lambda m: sum(n.weight.abs().sum() for n in m.modules() if isinstance(n, nn.BatchNorm2d)))
    invariants.refuses(gammas, mn.NoNorm(), example=IMAGE, match="a penalty on weights, or another constant' in the")
    assert mn.plan(Penalised(lambda m: m.body[0].weight.abs().sum()), mn.NoNorm(), example=IMAGE).ok


class InEvaluation(nn.Sequential):
    def forward(self, x):
        for layer in self:
            x = layer(x)
            if not self.training and isinstance(layer, nn.BatchNorm2d):
                x = x * 5
        return x


class Fuses(nn.Module):
    """Folds its norm into its layer in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x):
        y = self.norm(self.conv(x)) if self.training else fused(self.conv, self.norm, x)
        return self.fc(F.relu(y).mean((2, 3)))


def fused(conv: nn.Module, norm: nn.Module, x: Tensor) -> Tensor:
    gain = norm.weight / (norm.running_var + norm.eps).sqrt()
    return F.conv2d(x, conv.weight * gain[:, None, None, None], norm.bias - norm.running_mean * gain)


class Functions:
    """Functions that a network finds by this class, not by their names."""

    fuse = staticmethod(fused)


class FusesElsewhere(Fuses):
    def forward(self, x):
        y = self.norm(self.conv(x)) if self.training else Functions.fuse(self.conv, self.norm, x)
        return self.fc(F.relu(y).mean((2, 3)))


def test_what_happens_in_evaluation_mode_only_is_proved_too():
    tail = (nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
    model = InEvaluation(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), *tail)
    invariants.refuses(model, mn.MimicNorm(), example=IMAGE, match="takes another path")
    for fuses in (Fuses(), FusesElsewhere()):
        invariants.refuses(fuses, mn.NoNorm(), example=IMAGE, match="does not run any more .AttributeError")


class ReturnsFunction(Stack):
    def forward(self, x):
        y = super().forward(x)
        return lambda: y


def test_outputs_that_cannot_be_seen_are_noted():
    model = ReturnsFunction(lambda layer, x: layer(x))
    assert any("no tensor is seen" in note for note in mn.plan(model, mn.NoNorm(), example=IMAGE).notes)


class ByForward(nn.Module):
    """Calls its layers past their hooks."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu_(self.norm.forward(self.conv.forward(x))).mean((2, 3)))


class OneByOne(nn.Module):
    """Does as many operations as there are samples, or as many as fit a batch of its own."""

    def __init__(self):
        super().__init__()
        self.net = Stack(lambda layer, x: layer(x))

    def forward(self, x: Tensor) -> Tensor:
        rows = [row * 2 for row in self.net(x)]
        return torch.stack(rows) if len(rows) < 100 else torch.cat([r[None] for r in rows])


class Recurrent(nn.Module):
    """A layer that reads its own normalised output; without the norms between, its calls follow each other."""

    def __init__(self):
        super().__init__()
        self.stem, self.conv, self.fc = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 5)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8, affine=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for norm in self.norms:
            x = norm(self.conv(x))
        return self.fc(x.relu().mean((2, 3)))


@pytest.mark.parametrize("model", [ByForward(), OneByOne(), Recurrent(), Stack(lambda layer, x: layer(x))])
def test_other_code_is_not_refused(model: nn.Module):
    invariants.hold(copy.deepcopy(model), torch.randn(IMAGE), mn.MimicNorm(min_fan_in=8))


class ReadsValues(nn.Module):
    """Takes an early exit if it is sure, which depends on the values."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(100 * x))
        return self.fc((y.tanh() if y.abs().mean() > 1 else y.relu()).mean((2, 3)))


def test_where_values_decide_the_path_a_note_says_so():
    planned = mn.plan(ReadsValues(), mn.MimicNorm(), example=IMAGE)
    assert planned.ok
    assert any("control flow reads values" in note for note in planned.notes)


class Routes(nn.Module):
    """Sends each sample to the expert that its values choose."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.gate = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norms, self.fc = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(3)), nn.Linear(8, 4)

    def forward(self, x):
        h = self.norm(self.stem(x)).relu()
        choice = self.gate(h).argmax(1)
        y = torch.zeros_like(h)
        for i, (expert, norm) in enumerate(zip(self.experts, self.norms, strict=True)):
            rows = (choice == i).nonzero()[:, 0]
            if len(rows):
                y = y.index_add(0, rows, norm(expert(h[rows])))
        return self.fc(h + y)


def test_a_mixture_of_experts_is_not_refused_for_its_routes():
    for seed in range(5):
        torch.manual_seed(seed)
        model = Routes()
        for m in model.modules():
            if isinstance(m, nn.BatchNorm1d):
                nn.init.normal_(m.bias, std=2.0)
        for method in (mn.NoNorm(), mn.MimicNorm(min_fan_in=1, last_norm=False)):
            planned = mn.plan(model, method, example=torch.randn(12, 6), init=None)
            assert not [r for r in planned.refusals if "another path" in r.reason], planned.refusals


class ReadsValuesInVain(Stack):
    """Values are read, but it is the class that decides."""

    def forward(self, x):
        if float(x.abs().max()) > 1e6:
            raise ValueError("not normalised")
        return super().forward(x)


def test_values_that_decide_nothing_excuse_nothing():
    invariants.refuses(ReadsValuesInVain(turned), mn.NoNorm(), example=IMAGE, match="takes another path")
    mn.convert(ReadsValuesInVain(lambda layer, x: layer(x)), mn.NoNorm(), example=IMAGE)


def test_random_numbers_without_a_seed_are_not_taken_for_the_class():
    generator = np.random.default_rng()
    model = Stack(lambda layer, x: layer(x) * float(generator.uniform(0.9, 1.1)))
    planned = mn.plan(model, mn.NoNorm(), example=IMAGE)
    assert planned.ok
    assert any("does not do the same twice" in note for note in planned.notes)


def test_the_state_of_a_spectral_norm_does_not_move():
    model = Stack(lambda layer, x: layer(x))
    nn.utils.parametrizations.spectral_norm(model.body[0])
    before = copy.deepcopy(model.state_dict())
    mn.plan(model, mn.NoNorm(), example=IMAGE, init=None).require()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_rehearsal_leaves_no_trace():
    model = Stack(lambda layer, x: layer(x))
    with torch.no_grad():
        model.body[1].bias.normal_()
    before, random = copy.deepcopy(model), torch.get_rng_state()
    objects = [(id(m), type(m), m.training, sorted(m.__dict__)) for m in model.modules()]
    versions = [p._version for p in model.parameters()]
    mn.plan(model, mn.MimicNorm(), example=IMAGE)
    assert objects == [(id(m), type(m), m.training, sorted(m.__dict__)) for m in model.modules()]
    assert versions == [p._version for p in model.parameters()]
    assert torch.equal(random, torch.get_rng_state())
    for (name, one), (_, other) in zip(model.state_dict().items(), before.state_dict().items(), strict=True):
        assert torch.equal(one, other), name


# -- how often a network runs ------------------------------------------------------------------------------------


class Counted(nn.Module):
    """Counts the passes that run to their end, on the class: attributes are put back."""

    passes = 0

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        output = self.net(x)
        Counted.passes += 1
        return output


class Halves(nn.Module):
    """Takes the batch apart and puts it together again."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([half.relu() for half in x.chunk(2)])


class IdleInTraining(nn.Sequential):
    """Has a BatchNorm that runs in evaluation mode only."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if not self.training else nn.Sequential(*self[:3], *self[5:])(x)


class OnValues(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.mean() < 1e9 else x


class AsksInEvaluation(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.training or isinstance(self[0], nn.Conv2d) else x * 2)


def body(*middle: nn.Module) -> list[nn.Module]:
    head = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU())
    return [*head, *middle, nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 5)]


PASSES = {
    "ReLU": (lambda: nets.resnet(), 2),  # recorded, rehearsed
    "calibrated": (lambda: nn.Sequential(*body()), 3),
    "a norm that is idle in training": (lambda: IdleInTraining(*body(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))), 4),
    "samples seem to meet": (lambda: nn.Sequential(*body(Halves())), 5),  # with two batches
    "values steer": (lambda: OnValues(*body()), 5),  # with two batches, as nothing else tells whether samples meet
    "asks for mode and class": (lambda: AsksInEvaluation(*body()), 5),  # recorded and rehearsed in both modes
}


@pytest.mark.parametrize("kind", PASSES)
def test_how_often_a_network_runs(kind: str):
    net, most = PASSES[kind]
    Counted.passes = 0
    report = mn.convert_(Counted(net()), mn.MimicNorm(min_fan_in=1), example=IMAGE)
    assert report.init == ("theory" if kind == "ReLU" else "calibrate")
    assert Counted.passes == most


def test_a_network_that_was_defined_by_exec_is_converted():
    """Its functions belong to no module: ``__module__`` is None, as in notebooks and generated code."""
    namespace = {"nn": nn}
    exec(
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        nn.Module.__init__(self)\n"
        "        self.conv, self.norm, self.fc = nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)\n"
        "    def forward(self, x):\n"
        "        return self.fc(self.norm(self.conv(x)).relu().mean((2, 3)))\n",
        namespace,
    )
    assert namespace["Net"].forward.__module__ is None
    assert mn.plan(namespace["Net"](), mn.MimicNorm(), example=(2, 8, 6, 6)).ok
