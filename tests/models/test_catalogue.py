"""The networks: torchvision's numbers, the common CIFAR sizes, conversion of all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import zoo
from torch import nn

from mimicnorm import MimicNorm, convert_, models
from mimicnorm.errors import MimicNormError

# Networks of torchvision by our names. One of each structure runs; the others differ in depth and width alone.
TWINS = {
    **{f"vgg{depth}": f"vgg{depth}_bn" for depth in (11, 13, 16, 19)},
    **{f"resnet{depth}": f"resnet{depth}" for depth in (18, 34, 50, 101, 152)},
    **{f"shufflenetv2_{size}": f"shufflenet_v2_{size}" for size in ("x0_5", "x1_0", "x1_5", "x2_0")},
    "shufflenetv2": "shufflenet_v2_x1_0",
}
RUN = ("vgg11", "resnet18", "resnet50", "shufflenetv2_x0_5")


def _randomise_statistics(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.1)


def _same_output(mine: nn.Module, theirs: nn.Module, image: int = 64) -> None:
    x = torch.randn(2, 3, image, image)
    with torch.no_grad():
        expected = theirs.eval()(x)
        torch.testing.assert_close(mine.eval()(x), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("name", RUN)
def test_imagenet_versions_compute_what_torchvisions_do(name):
    theirs = zoo.torchvision().models.get_model(TWINS[name], weights=None, num_classes=10)
    _randomise_statistics(theirs)
    with torch.device("meta"):
        mine = models.build(name, num_classes=10)
    mine.load_state_dict(theirs.state_dict(), assign=True)
    _same_output(mine, theirs)


@pytest.mark.parametrize("name", TWINS)
def test_imagenet_versions_have_torchvisions_keys_and_shapes(name):
    with torch.device("meta"):
        theirs = zoo.torchvision().models.get_model(TWINS[name], weights=None)
        mine = models.build(name)
    shapes = [{key: value.shape for key, value in net.state_dict().items()} for net in (mine, theirs)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("name", ["squeezenet1_0", "squeezenet1_1"])
def test_squeezenets_are_torchvisions_with_norms_between(name):
    theirs = zoo.torchvision().models.get_model(name, weights=None)
    mine = models.build(name)
    loaded = mine.load_state_dict(theirs.state_dict(), strict=False)
    assert not loaded.unexpected_keys
    norms = {f"{n}." for n, m in mine.named_modules() if isinstance(m, nn.BatchNorm2d)}
    assert len(norms) == 25
    assert all(any(key.startswith(norm) for norm in norms) for key in loaded.missing_keys)
    for module in mine.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_var.fill_(1 - module.eps)  # the norm is then the identity
    _same_output(mine, theirs, 96)


# The sizes, in millions, by which the common CIFAR definitions are known; docs/data.md has the exact ones.
KNOWN_AS = {
    **{"vgg11": 28.5, "vgg13": 28.7, "vgg16": 34.0, "vgg19": 39.0, "squeezenet": 0.78, "shufflenetv2_x1_0": 1.3},
    **{"resnet18": 11.22, "resnet34": 21.3, "resnet50": 23.7, "resnet101": 42.7, "resnet152": 58.3},
}


def test_the_documented_sizes_are_those_of_the_networks():
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    rows = {cells[1]: cells for line in page.splitlines() if len(cells := line.split(" ")) > 5 and cells[0] == "|"}
    for name in models.names():
        if name.startswith("mlp") or name == "shufflenetv2":
            continue
        with torch.device("meta"):
            counts = [sum(p.numel() for p in models.build(name, input=i).parameters()) for i in ("cifar", "imagenet")]
        assert [f"{count:,}" for count in counts] == [rows[name][3], rows[name][-2]]
        if name in KNOWN_AS:
            assert counts[0] / 1e6 == pytest.approx(KNOWN_AS[name], rel=0.045)


FAMILIES = ("vgg11", "resnet10", "resnet50", "squeezenet", "squeezenet1_1", "shufflenetv2_x0_5", "mlp10")
CASES = [(name, input, 0.25) for name in FAMILIES for input in ("cifar", "imagenet")]
CASES += [(name, "cifar", 1.0) for name in ("resnet18", "squeezenet")]


@pytest.mark.parametrize(("name", "input", "width"), CASES)
def test_every_network_converts_and_trains(name, input, width):
    image = 32 if input == "cifar" else 64
    net = models.build(name, num_classes=10, input=input, width=width, image=image)
    norms = sum(isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d) for m in net.modules())
    report = convert_(net, MimicNorm(), example=(4, 3, image, image))
    assert report.totals()["batch_norms"] == norms
    assert not [name for name, m in net.named_modules() if isinstance(m, nn.BatchNorm2d)]
    loss = nn.functional.cross_entropy(net(torch.randn(4, 3, image, image)), torch.arange(4))
    loss.backward()
    assert torch.isfinite(loss)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in net.parameters())


@pytest.mark.parametrize(("image", "width"), [(8, 0.1), (28, 0.33)])
@pytest.mark.parametrize("name", ["resnet10", "vgg11", "squeezenet", "mlp10", "shufflenetv2_x0_5"])
def test_digits_and_mnist_fit_the_cifar_stems_at_any_width(name, image, width):
    net = models.build(name, num_classes=10, input="cifar", width=width, in_channels=1, image=image)
    assert net(torch.randn(4, 1, image, image)).shape == (4, 10)


def test_weights_start_as_the_authors_draw_them():
    fc = models.build("vgg11", input="cifar").classifier[3]
    assert fc.weight.std().item() == pytest.approx((2 / 4096) ** 0.5, rel=0.01)
    assert not fc.bias.any()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"name": "resnet81"}, "Did you mean resnet18"),
        ({"name": "resnet18", "input": "mnist"}, "input must be"),
        ({"name": "resnet18", "width": 0}, "width=0: use a finite number above 0"),
        ({"name": "resnet18", "num_classes": 0}, "num_classes=0: use a whole number of at least 1"),
        ({"name": "mlp10", "image": 0}, "image=0: use a whole number"),
        ({"name": "mlp10", "in_channels": True}, "in_channels=True: use a whole number"),
    ],
)
def test_mistakes_are_named(arguments, says):
    with pytest.raises(MimicNormError, match=says):
        models.build(**arguments)
