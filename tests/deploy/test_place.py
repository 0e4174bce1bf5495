from __future__ import annotations

import nets
import pytest
import torch
import torch.nn.functional as F
from stirred import stirred
from torch import nn

import mimicnorm as mn
from mimicnorm.deploy import fold_with_report


class Between(nn.Module):
    """A BatchNorm behind an activation: the layers that read it may take its shift up, if they have no padding."""

    def __init__(self, padding: int):
        super().__init__()
        self.stem, self.norm = nets.conv(3, 8), nn.BatchNorm2d(8)
        self.a, self.b = (nn.Conv2d(8, 4, 2 * padding + 1, padding=padding) for _ in range(2))
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        x = self.norm(F.gelu(self.stem(x)))
        return self.fc(torch.cat((self.a(x), self.b(x)), 1).mean((2, 3)))


class Reshaped(nn.Module):
    """A linear layer on sequences; a view keeps its channels where as many values come before them."""

    def __init__(self, way: str):
        super().__init__()
        self.fc1, self.norm, self.fc, self.way = nn.Linear(24, 8), nn.BatchNorm1d(8), nn.Linear(8, 3), way

    def forward(self, x):
        y = self.fc1(x.flatten(2).view(len(x), 8, 24))
        y = self.norm(y.flatten(0, 1)).view_as(y) if self.way == "view" else self.norm(y.transpose(1, 2))
        return self.fc(F.relu(y if self.way == "view" else y.transpose(1, 2)).mean(1))


class Convolutions(nn.Module):
    """Two convolutions and two norms, connected in several ways."""

    def __init__(self, way, affine: bool = True):
        super().__init__()
        self.stem, self.conv, self.fc, self.way = nets.conv(3, 8), nets.conv(8, 8), nn.Linear(8, 3), way
        self.norm, self.other = nn.BatchNorm2d(8, affine=affine), nn.BatchNorm2d(8)

    def forward(self, x):
        return self.fc(self.way(self, self.stem(x)).mean((2, 3)))


def read_twice(m, x):
    """A skip reads what the layer made, before the norm."""
    return x + F.relu(m.norm(x)) + m.other(m.conv(x))


def repvgg(m, x):
    """A normalised identity beside a convolution."""
    x = F.relu(x)
    return F.relu(m.norm(x) + m.other(m.conv(x)))


def preactivation(m, x):
    """An in-place ReLU behind a norm without beta: as an identity, the norm would let it overwrite the skip."""
    return x + m.other(m.conv(F.relu_(m.norm(x))))


def shared(m, x):
    """Several norms on one layer."""
    return F.relu(m.other(m.conv(F.relu(m.norm(m.conv(x))))))


def unread(m, x):
    """A norm whose output nothing reads, as in an evaluation mode that returns the features before a neck."""
    m.norm(x)
    return F.relu(m.other(m.conv(x)))


def on_itself(m, x):
    """A norm on its own output: each call shifts."""
    return F.relu(m.norm(m.norm(m.conv(F.relu(m.other(x))))))


class Viewed(nn.Module):
    """A view needs the memory format that a norm gave to a permuted tensor."""

    def __init__(self, way: str, affine: bool):
        super().__init__()
        self.way = way
        self.a, self.b = nn.Linear(3, 8), nn.Conv1d(3, 8, 1)
        self.norm, self.fc = nn.BatchNorm1d(8, affine=affine), nn.Linear(8 * 64 if way == "added" else 8, 3)

    def forward(self, x):
        x = x.flatten(2)
        y = F.relu(self.a(x.transpose(1, 2))).transpose(1, 2)
        if self.way == "added":
            return self.fc((self.norm(y) + self.b(x)).view(len(x), -1))
        return self.fc(F.relu(self.norm(y + y * y)).view(len(x), 8, 8, 8).mean((2, 3)))


STAYS = ({}, ["norm"])


@pytest.mark.parametrize(
    ("model", "into", "standalone"),
    [
        (Between(padding=0), {"norm": ("a", "b")}, []),
        (Between(padding=1), *STAYS),  # zero padding comes after the shift
        (Reshaped("view"), {"norm": ("fc1",)}, []),
        (Reshaped("transpose"), *STAYS),
        (Convolutions(read_twice), *STAYS),
        (Convolutions(repvgg), {"norm": ("conv",)}, []),
        (Convolutions(preactivation, affine=False), *STAYS),
        (Convolutions(shared), {}, ["norm", "other"]),
        (Convolutions(unread), *STAYS),
        (Convolutions(on_itself), *STAYS),
        *((Viewed(way, affine), *STAYS) for way in ("added", "summed") for affine in (True, False)),
    ],
)
def test_where_what_is_left_of_a_norm_goes(model, into, standalone):
    converted = stirred(model, mn.NoNorm(), (2, 3, 8, 8))
    report, x = fold_with_report(converted), torch.randn(3, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(report.model(x.clone()), converted(x.clone()), rtol=1e-5, atol=1e-5)
    assert (report.into, report.standalone) == (into, standalone)


class Exits(nn.Module):
    """Two heads, of which evaluation mode returns the second and reads the values of the first."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.first, self.second = (
            nets.conv(3, 8),
            nn.BatchNorm2d(8),
            *map(nn.Linear, (8, 8), (4, 4)),
        )

    def forward(self, x):
        x = self.norm(self.stem(x)).relu().mean((2, 3))
        first, second = self.first(x), self.second(x)
        return (first, second) if self.training or bool(first.sum() > 1e9) else second


def test_a_last_norm_whose_output_is_not_returned_goes_into_its_head():
    converted = stirred(Exits(), mn.MimicNorm(), (2, 3, 8, 8))
    report = fold_with_report(converted)
    assert report.into["first.last_norm"] == ("first",)
    assert report.into["second.last_norm"] == ("second",)
