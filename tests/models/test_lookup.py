"""Models by a spec: what is passed on, and what cannot be."""

from __future__ import annotations

import subprocess
import sys

import pytest
import zoo

from mimicnorm import models
from mimicnorm.errors import MimicNormError
from mimicnorm.models.lookup import input_shape


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "mynets.py").write_text(
        "from torch import nn\n"
        "def plain():\n    return nn.Linear(4, 2)\n"
        "def full(num_classes=5, in_channels=3):\n    return nn.Conv2d(in_channels, num_classes, 1)\n"
        "def required(num_classes, in_channels):\n    return nn.Conv2d(in_channels, num_classes, 1)\n"
        "def broken():\n    raise KeyError('width')\n"
        "ready = nn.Linear(3, 7)\n"
    )
    (tmp_path / "typo.py").write_text("def net(:\n")
    (tmp_path / "colorsys.py").write_text("net = None\n")
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


def test_a_factory_gets_what_it_takes(user_module):
    assert models.find("mynets:full", num_classes=2, in_channels=1).weight.shape == (2, 1, 1, 1)
    assert models.find("mynets:required", num_classes=2, in_channels=1).weight.shape == (2, 1, 1, 1)
    assert models.find("mynets:plain", in_channels=3).out_features == 2
    assert models.find("mynets:ready", num_classes=9).out_features == 7
    assert models.find("mynets:ready") is not models.find("mynets:ready")  # one may be converted, the next not


@pytest.mark.parametrize(
    ("spec", "arguments", "says"),
    [
        ("resnet_18", {}, "'resnet_18' is not a model: .* Did you mean resnet18"),
        ("timm:", {}, "is not a model"),
        ("timm:resnet5O", {}, "timm has no model 'resnet5O' among .* Did you mean resnet50"),
        ("torchvision:resnet9", {}, "torchvision has no model 'resnet9'"),
        ("torchvision:resnet18", {"in_channels": 1}, "takes images of 3 channels, not 1"),
        ("timm:resnet18", {"width": 0.5}, "set width to 1"),
        ("timm:resnet18", {"input": "cifar"}, "leave input out"),
        ("no.such.module:net", {}, "there is no module 'no'"),
        ("torch.nn:Conv7d", {}, "Did you mean Conv"),
        ("torch.nn:Conv2d", {}, "cannot be called without arguments"),
        ("mynets:plain", {"num_classes": 2}, "with num_classes=2: .* takes the keywords num_classes and in_channels"),
        ("mynets:plain", {"in_channels": 1}, "cannot be called with in_channels=1"),
        ("mynets:broken", {}, "raised KeyError: 'width'"),
        ("typo:net", {}, "importing typo raised SyntaxError"),
        ("colorsys:net", {}, r"colorsys \(.*colorsys\.py\) has no 'net'"),  # Python's, not the user's file
    ],
)
def test_mistakes_are_named(user_module, spec, arguments, says):
    zoo.timm()
    with pytest.raises(MimicNormError, match=says):
        models.find(spec, **arguments)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(MimicNormError, match=r"timm is not installed\. Install it with: pip install timm"):
        models.find("timm:resnet18")


def test_a_package_that_does_not_import_is_named(monkeypatch, tmp_path):
    (tmp_path / "timm.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MimicNormError, match=r"nms does not exist\. Its build must match that of torch"):
        models.find("timm:resnet18")


def test_a_mistyped_name_does_not_wait_for_torch():
    code = (
        "import sys\nfrom mimicnorm import errors, models\n"
        "try: models.find('resnet81')\nexcept errors.NameNotFoundError as error: print(error)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Did you mean resnet18" in done.stdout


@pytest.mark.parametrize(
    ("given", "shape"),
    [
        ({"image": None, "shape": None}, (2, 1, 32, 32)),
        ({"image": 64, "shape": None}, (2, 1, 64, 64)),
        ({"image": None, "shape": (7, 5)}, (7, 5)),
        ({"image": 8, "shape": (7, 3, 8, 8)}, (7, 3, 8, 8)),
    ],
)
def test_the_shape_of_an_example(given, shape):
    assert input_shape(models.build("resnet10", input="cifar", in_channels=1), batch=2, **given) == shape


@pytest.mark.parametrize(("image", "shape", "says"), [(None, (), "is empty"), (64, (2, 3, 32, 32), "different sizes")])
def test_shapes_that_make_no_sense(image, shape, says):
    with pytest.raises(MimicNormError, match=says):
        input_shape(None, batch=2, image=image, shape=shape)
