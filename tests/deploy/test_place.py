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

    def __init__(self, padding: int, width: int = 8):
        super().__init__()
        self.stem, self.norm = nets.conv(3, width), nn.BatchNorm2d(width)
        self.a, self.b = (nn.Conv2d(width, 4, 2 * padding + 1, padding=padding) for _ in range(2))
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        x = self.norm(F.gelu(self.stem(x)))
        return self.fc(torch.cat((self.a(x), self.b(x)), 1).mean((2, 3)))


def report(model, method=None, **kw):
    converted = stirred(model, method or mn.NoNorm(), (2, 3, 8, 8), **kw)
    folded, x = fold_with_report(converted), torch.randn(3, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(folded.model(x.clone()), converted(x.clone()), rtol=1e-5, atol=1e-5)
    return folded


def test_layers_without_padding_take_up_the_shift_before_them():
    assert report(Between(padding=0)).into == {"norm": ("a", "b")}


def test_zero_padding_comes_after_the_shift():
    assert report(Between(padding=1)).standalone == ["norm"]


class Reshaped(nn.Module):
    """A linear layer on sequences, its BatchNorm behind a view or a transpose."""

    def __init__(self, way: str):
        super().__init__()
        self.fc1, self.norm, self.fc, self.way = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3), way

    def forward(self, x):
        y = self.fc1(x.flatten(2))
        y = self.norm(y.flatten(0, 1)).view_as(y) if self.way == "view" else self.norm(y.transpose(1, 2))
        return self.fc(F.relu(y if self.way == "view" else y.transpose(1, 2)).mean(1))


@pytest.mark.parametrize("way", ["view", "transpose"])
def test_a_view_keeps_channels_where_as_many_values_come_before_them(way):
    model = Reshaped(way)
    converted = stirred(model, mn.NoNorm(), (2, 8, 2, 4))
    folded, x = fold_with_report(converted), torch.randn(2, 8, 2, 4)
    torch.testing.assert_close(folded.model(x), converted(x), rtol=1e-5, atol=1e-5)
    assert (folded.into, folded.standalone) == (({"norm": ("fc1",)}, []) if way == "view" else ({}, ["norm"]))


class ReadTwice(nn.Module):
    """A skip reads what the layer made, before the norm."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.fc = nets.conv(3, 8), nn.BatchNorm2d(8), nn.Linear(8, 3)

    def forward(self, x):
        y = self.conv(x)
        return self.fc((y + F.relu(self.norm(y))).mean((2, 3)))


def test_a_layer_that_others_read_too_takes_nothing_up():
    assert report(ReadTwice()).standalone == ["norm"]


class Added(nn.Module):
    """RepVGG: a normalised identity beside a convolution."""

    def __init__(self):
        super().__init__()
        self.stem, self.conv, self.bn, self.identity = (
            nets.conv(3, 8),
            nets.conv(8, 8),
            nn.BatchNorm2d(8),
            nn.BatchNorm2d(8),
        )
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        x = F.relu(self.stem(x))
        return self.fc(F.relu(self.identity(x) + self.bn(self.conv(x))).mean((2, 3)))


def test_a_layer_in_the_same_sum_takes_up_the_shift_of_an_identity():
    assert report(Added()).into == {"identity": ("conv",)}


class Preactivation(nn.Module):
    """An in-place ReLU behind a norm without beta: as an identity, it would overwrite the skip."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.conv, self.fc = (
            nets.conv(3, 8),
            nn.BatchNorm2d(8, affine=False),
            nets.conv(8, 8),
            nn.Linear(8, 3),
        )

    def forward(self, x):
        x = self.stem(x)
        return self.fc((x + self.conv(F.relu_(self.norm(x)))).mean((2, 3)))


def test_a_copy_stays_where_a_skip_would_be_overwritten():
    assert report(Preactivation()).standalone == ["norm"]


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


@pytest.mark.parametrize("way", ["added", "summed"])
@pytest.mark.parametrize("affine", [True, False])
def test_a_memory_format_that_a_view_needs_stays(way, affine):
    assert report(Viewed(way, affine)).standalone == ["norm"]


def test_several_norms_on_one_layer_stay():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.conv, self.fc = nets.conv(3, 8), nets.conv(8, 8), nn.Linear(8, 3)
            self.first, self.second = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

        def forward(self, x):
            x = F.relu(self.first(self.conv(self.stem(x))))
            return self.fc(F.relu(self.second(self.conv(x))).mean((2, 3)))

    assert report(Shared()).standalone == ["first", "second"]
