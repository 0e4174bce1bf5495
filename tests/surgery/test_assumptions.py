"""Where the theory's assumptions do not hold, weights are calibrated; variances say that this is where."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from signals import variances
from torch import nn

from mimicnorm.methods import MimicNorm, NoNorm
from mimicnorm.surgery.convert import convert_
from mimicnorm.surgery.planning import plan

PLAIN = MimicNorm(last_norm=False)


def chain(layer, shape):
    """Three layers with BatchNorm and ReLU behind a first one that is pointwise."""
    norm = {3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)]
    first = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}[len(shape)]
    layers = [first(64, 64, 1), norm(64), nn.ReLU()]
    for _ in range(3):
        layers += [layer(), norm(64), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(2), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(64, 5))


CONV, UP = functools.partial(nn.Conv2d, 64, 64), functools.partial(nn.ConvTranspose2d, 64, 64)
COVERED = {
    "3x3 on 8x8": (functools.partial(CONV, 3, padding=1), (2, 64, 8, 8)),
    "3x3 on 4x4": (functools.partial(CONV, 3, padding=1), (2, 64, 4, 4)),
    "3x3 on 2x2": (functools.partial(CONV, 3, padding=1), (2, 64, 2, 2)),
    "5x5 on 3x3, reflected": (functools.partial(CONV, 5, padding=2, padding_mode="reflect"), (2, 64, 3, 3)),
    "transposed 4x4 by 2": (functools.partial(UP, 4, stride=2, padding=1), (2, 64, 4, 4)),
    "transposed 2x2 by 2": (functools.partial(UP, 2, stride=2), (2, 64, 4, 4)),
}
NOT_COVERED = {
    "3x3 on 1x1": (functools.partial(CONV, 3, padding=1), (2, 64, 1, 1)),
    "5x5 on 2x2": (functools.partial(CONV, 5, padding=2), (2, 64, 2, 2)),
    "5x5 on 2x2, padded before": (lambda: nn.Sequential(nn.ZeroPad2d(2), CONV(5)), (2, 64, 2, 2)),
    "transposed 1x1 by 2": (functools.partial(UP, 1, stride=2), (2, 64, 4, 4)),
    "transposed 2x2 by 4": (functools.partial(UP, 2, stride=4, output_padding=2), (2, 64, 2, 2)),
    "transposed 3x3x3 by 2": (
        lambda: nn.ConvTranspose3d(64, 64, 3, stride=2, padding=1, output_padding=1),
        (2, 64, 1, 1, 1),
    ),
}


@pytest.mark.parametrize("name", COVERED)
def test_what_stays_theory_keeps_variances_within_a_factor_of_two_per_layer(name):
    layer, shape = COVERED[name]
    torch.manual_seed(0)
    model = chain(layer, shape)
    report = convert_(model, PLAIN, example=shape)
    assert report.init == "theory", report.init_why
    found = list(variances(model, [s.name for s in report.layers], torch.randn(256, *shape[1:])).values())
    for before, after in itertools.pairwise(found):
        assert 0.45 < after / before < 2.2, found


@pytest.mark.parametrize("name", NOT_COVERED)
def test_where_most_taps_meet_nothing_weights_are_calibrated(name):
    layer, shape = NOT_COVERED[name]
    torch.manual_seed(0)
    model = chain(layer, shape)
    x = torch.randn(64, *shape[1:])
    drawn = copy.deepcopy(model)
    names = [s.name for s in convert_(drawn, PLAIN, example=shape, init="theory").layers]
    by_theory = list(variances(drawn, names, x).values())
    assert min(by_theory) < 0.2  # what the theory's weights would start with
    report = convert_(model, PLAIN, example=x)
    assert report.init == "calibrate"
    assert "of the taps of 3" in report.init_why
    assert "meet its input" in report.init_why
    assert all(v == pytest.approx(1, rel=1e-3) for v in variances(model, names, x).values())


class Shifted(nn.Module):
    """conv, BatchNorm, a shift, and on to the next layer."""

    def __init__(self, shift, after, behind=None):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(64, 64, 1), nn.BatchNorm2d(64)
        self.shift, self.behind = shift, behind or nn.Identity()
        self.conv2, self.bn2 = after, nn.BatchNorm2d(64)
        self.head = nn.Linear(64, 5)

    def forward(self, x):
        h = self.shift(self.bn1(self.conv1(x)))
        return self.head(self.bn2(self.conv2(self.behind(h))).relu().amax((2, 3)))


class Add(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = nn.Parameter(value) if isinstance(value, torch.Tensor) else value

    def forward(self, h):
        return h + (self.value.view(1, -1, 1, 1) if isinstance(self.value, torch.Tensor) else self.value)


class Film(nn.Module):
    """A shift per channel that is computed from the data itself."""

    def forward(self, h):
        return h + h.amax((2, 3), keepdim=True)


POINTWISE = functools.partial(nn.Conv2d, 64, 64, 1)
DEPTHWISE = functools.partial(nn.Conv2d, 64, 64, 3, groups=64)
PADDED = functools.partial(nn.Conv2d, 64, 64, 3, padding=1)
SHIFTS = {  # shift, next layer, what lies between, covered
    "a number, centred": (lambda: Add(100), POINTWISE, nn.Identity, True),
    "a number, then max pooling, centred": (lambda: Add(100), POINTWISE, lambda: nn.MaxPool2d(2), True),
    "a number, subtracted from": (lambda: Reverse(), POINTWISE, nn.Identity, True),
    "a number, not centred": (lambda: Add(100), DEPTHWISE, nn.Identity, False),
    "a number, on padding": (lambda: Add(100), PADDED, nn.Identity, False),
    "a number, then ReLU": (lambda: Add(100), POINTWISE, nn.ReLU, False),
    "zero, not centred": (lambda: Add(0), DEPTHWISE, nn.Identity, True),
    "a bias of zeros": (lambda: Add(torch.zeros(64)), DEPTHWISE, nn.ReLU, True),
    "a bias of one number": (lambda: Add(torch.full((1,), 3.0)), POINTWISE, nn.Identity, True),
    "a bias that is not zero": (lambda: Add(torch.randn(64)), POINTWISE, nn.Identity, False),
    "a shift from data": (Film, POINTWISE, nn.Identity, False),
}


class Reverse(nn.Module):
    def forward(self, h):
        return 100 - h


@pytest.mark.parametrize("name", SHIFTS)
def test_a_constant_is_covered_if_it_is_zero_or_centring_takes_it_out(name):
    shift, after, behind, covered = SHIFTS[name]
    torch.manual_seed(0)
    model, x = Shifted(shift(), after(), behind()), torch.randn(64, 64, 6, 6)
    report = convert_(model, PLAIN, example=x)
    assert report.init == ("theory" if covered else "calibrate"), report.init_why
    found = variances(model, ["conv1", "conv2"], x)
    assert all(0.4 < v < 2.5 for v in found.values()), found


def test_the_reason_names_the_constant():
    made = plan(Shifted(Add(100), DEPTHWISE()), PLAIN, example=(2, 64, 6, 6))
    assert made.init_why == "no formula for add of a constant other than zero in shift"
    made = plan(Shifted(Film(), POINTWISE()), PLAIN, example=(2, 64, 6, 6))
    assert made.init_why == "no formula for add of a shift computed from data in shift"


def test_without_centring_no_constant_is_taken_out():
    assert plan(Shifted(Add(100), POINTWISE()), NoNorm(), example=(2, 64, 6, 6)).init == "calibrate"


def test_a_batch_norm_that_stays_takes_a_constant_out():
    model = nn.Sequential(
        *(nn.Conv2d(64, 64, 1), nn.BatchNorm2d(64), Add(100), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.Conv2d(64, 64, 1), nn.BatchNorm2d(64), nn.Flatten(), nn.Linear(64 * 16, 5)),
    )
    kept = plan(model, PLAIN, example=(2, 64, 4, 4), where=lambda module, name: name != "3")
    assert kept.init == "theory", kept.init_why
    assert plan(model, PLAIN, example=(2, 64, 4, 4)).init == "calibrate"


class Prelu(nn.Module):
    def __init__(self, known):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(64, 64, 1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(64) for _ in range(3))
        self.acts = nn.ModuleList(nn.PReLU(64) for _ in range(3))
        for act in self.acts:
            nn.init.normal_(act.weight)
        self.known, self.head = known, nn.Linear(64, 5)

    def forward(self, x):
        for conv, norm, act in zip(self.convs, self.norms, self.acts, strict=True):
            y = norm(conv(x))
            x = act(y) if self.known else F.prelu(y, act.weight + 0)
        return self.head(x.amax((2, 3)))


@pytest.mark.parametrize("known", [True, False])
def test_slopes_of_a_prelu_are_its_own_or_calibrated(known):
    torch.manual_seed(0)
    model, x = Prelu(known), torch.randn(64, 64, 6, 6)
    report = convert_(model, PLAIN, example=x)
    assert report.init == ("theory" if known else "calibrate")
    found = variances(model, ["convs.0", "convs.1", "convs.2"], x)
    assert all(0.7 < v < 1.4 for v in found.values()), found
