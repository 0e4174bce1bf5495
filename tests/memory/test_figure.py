import matplotlib.colors
import matplotlib.image
import numpy
import pytest
from torch import nn

from mimicnorm.errors import PictureError
from mimicnorm.memory import measure, plot
from mimicnorm.memory.figure import _COLOURS


def pixels(path, category):
    """Count the image's pixels in the colour of a category."""
    image = matplotlib.image.imread(path)[..., :3]
    colour = numpy.array(matplotlib.colors.to_rgb(_COLOURS[category]))
    return int((numpy.abs(image - colour).max(axis=-1) < 0.01).sum())


def mlp(depth):
    return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(64, 64), nn.Tanh())])


def test_each_part_of_the_memory_has_its_area(tmp_path):
    analyses = {str(batch): measure(mlp(8), (batch, 64)) for batch in (20, 2000)}
    for name, analysis in analyses.items():
        plot(analysis, tmp_path / f"{name}.png")
    for category in _COLOURS:
        assert pixels(tmp_path / "20.png", category) > 100
    assert pixels(tmp_path / "2000.png", "activations") > 3 * pixels(tmp_path / "20.png", "activations")


def test_several_analyses_stand_side_by_side_on_one_scale(tmp_path):
    small, large = measure(mlp(8), (200, 64)), measure(mlp(8), (2000, 64))
    plot({"large": large}, tmp_path / "one.png")
    plot({"small": small, "large": large}, tmp_path / "two.png")
    one, two = (matplotlib.image.imread(tmp_path / name).shape for name in ("one.png", "two.png"))
    assert two[1] > 1.5 * one[1]
    assert pixels(tmp_path / "two.png", "activations") < 1.4 * pixels(tmp_path / "one.png", "activations")


def test_a_picture_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(PictureError, match="there is no directory"):
        plot(measure(mlp(1), (2, 64)), tmp_path / "no" / "x.png")
