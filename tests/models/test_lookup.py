"""Models by a spec: what is passed on, and what cannot be."""

from __future__ import annotations

import sys

import pytest
import zoo

from mimicnorm import models
from mimicnorm.cli import main
from mimicnorm.errors import MimicNormError, NameNotFoundError


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mynets.py").write_text(
        "from torch import nn\n"
        "def plain():\n    return nn.Linear(4, 2)\n"
        "def full(num_classes=5, in_channels=3):\n    return nn.Conv2d(in_channels, num_classes, 1)\n"
        "def required(num_classes, in_channels):\n    return nn.Conv2d(in_channels, num_classes, 1)\n"
        "ready = nn.Linear(3, 7)\n"
    )
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("mynets", None)


def test_own_names_take_everything():
    net = models.find("resnet18", num_classes=7, input="cifar", width=0.25, in_channels=1)
    assert net.fc.out_features == 7
    assert net.conv1.weight.shape == (16, 1, 3, 3)
    assert models.find("resnet10").fc.out_features == 1000


def test_classes_and_channels_reach_timm_and_torchvision():
    zoo.timm()
    net = models.find("timm:resnet18", num_classes=7, in_channels=1)
    assert net.fc.out_features == 7
    assert net.conv1.in_channels == 1
    assert models.find("torchvision:resnet18", num_classes=7, in_channels=3).fc.out_features == 7
    with pytest.raises(MimicNormError, match="takes images of 3 channels, not 1"):
        models.find("torchvision:resnet18", in_channels=1)
    with pytest.raises(MimicNormError, match="set width to 1"):
        models.find("timm:resnet18", width=0.5)


def test_a_factory_gets_what_it_takes(mine):
    assert models.find("mynets:full", num_classes=2, in_channels=1).weight.shape == (2, 1, 1, 1)
    assert models.find("mynets:plain", in_channels=3).out_features == 2
    assert models.find("mynets:ready", num_classes=9).out_features == 7
    assert models.find("mynets:ready") is not models.find("mynets:ready")  # one may be converted, the next not
    for arguments in ({"num_classes": 2}, {"in_channels": 1}):
        with pytest.raises(MimicNormError, match="cannot be called with"):
            models.find("mynets:plain", **arguments)


def test_a_wrong_name_lists_near_ones():
    with pytest.raises(NameNotFoundError, match="Near ones: resnet18"):
        models.find("resnet_18")


def test_own_names_work_on_the_command_line(capsys):
    assert main(["memory", "resnet10", "--image", "32", "--batch", "4", "--width", "0.25", "--input", "cifar"]) == 0
    assert "mimicnorm" in capsys.readouterr().out
    assert main(["convert", "mlp10", "--image", "8"]) == 0
    assert "10 BatchNorms (10 removed" in capsys.readouterr().out
    assert main(["theory", "doctor", "resnet10", "--input", "cifar", "--width", "0.25", "--batch", "2"]) == 0
    assert "layer4.0.conv2" in capsys.readouterr().out


def test_a_file_beside_the_user_hides_nothing_of_pythons(tmp_path, monkeypatch):
    (tmp_path / "colorsys.py").write_text("net = None\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with pytest.raises(NameNotFoundError, match=r"colorsys \(.*colorsys\.py\) has no 'net'"):
        models.find("colorsys:net")


def test_what_a_factory_must_take_is_said_and_may_be_required(mine, tmp_path):
    with pytest.raises(MimicNormError, match="takes the keywords num_classes and in_channels"):
        models.find("mynets:plain", num_classes=2)
    assert models.find("mynets:required", num_classes=2, in_channels=1).weight.shape == (2, 1, 1, 1)
