"""Recipes of paper scale run from end to end: every network of Table 1, and ImageNet from a folder of JPEGs."""

import dataclasses
import io

import numpy as np
import pytest
from PIL import Image

from mimicnorm.paper import SCALES
from mimicnorm.paper.published import TABLE1
from mimicnorm.training import train

TRIAL = dataclasses.replace(SCALES["paper"], changes={"batch": 4}, max_steps=2)


@pytest.mark.parametrize("network", TABLE1)
def test_every_network_of_table1_takes_two_steps(network, source, tmp_path):
    chosen = TRIAL.recipe("cifar100", network, "mimicnorm")
    result = train(chosen, tmp_path, sources=(source, source), progress=False)
    assert (result.status, result.step) == ("done", 2)


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    """A thousand class folders with a JPEG each."""
    folder = tmp_path_factory.mktemp("imagenet")
    pixels = np.random.default_rng(0).integers(0, 256, (60, 70, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer := io.BytesIO(), "JPEG")
    for split in ("train", "val"):
        for label in range(1000):
            place = folder / split / f"n{label:08d}"
            place.mkdir(parents=True)
            (place / "0.JPEG").write_bytes(buffer.getvalue())
    return folder


@pytest.mark.parametrize("method", ["batchnorm", "mimicnorm"])
def test_table3_trains_from_a_folder_of_images(method, imagenet, tmp_path):
    chosen = TRIAL.recipe("imagenet", "shufflenetv2_x0_5", method)
    assert (chosen.limit, chosen.weight_decay, chosen.augment) == (8, 1e-4, "light")
    result = train(chosen, tmp_path, data_dir=imagenet, progress=False)
    assert (result.status, result.step) == ("done", 2)
