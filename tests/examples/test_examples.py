"""Every example runs, and does what its first lines say."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import zoo
from torch import nn

import mimicnorm as mn

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _as_scripts(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    zoo.torchvision()  # timm and Lightning import it


def example(name: str):
    return importlib.import_module(name)


def test_plain_pytorch(capsys):
    assert example("plain_pytorch").main(epochs=2) > 0.8
    assert "epoch 2: loss" in capsys.readouterr().out


def test_ddp_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [*command, EXAMPLES / "ddp_torchrun.py", "--epochs", "2"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found = re.search(r"2 processes, test accuracy ([\d.]+)", run.stdout)
    assert found is not None
    assert float(found[1]) > 0.8


def test_finetune_timm(capsys):
    assert example("finetune_timm").main(steps=100) > 0.5
    assert float(re.search(r"at most (\S+)", capsys.readouterr().out)[1]) < 1e-5


@pytest.mark.filterwarnings("ignore")  # Lightning's, about workers and loggers
def test_lightning_microbatch():
    assert example("lightning_microbatch").main(epochs=2) > 0.7


def test_segmentation_tiles():
    assert example("segmentation_tiles").main(steps=20) < 1e-4


@pytest.mark.parametrize(
    ("method", "equal"),
    [
        (mn.MimicNorm(last_norm=False), True),
        (mn.MimicNorm(last_norm=False, centre="backward"), True),
        (mn.BatchNorm(), False),
        (mn.GroupNormWS(), False),
    ],
)
def test_a_tile_equals_the_whole_away_from_its_padding(method, equal):
    """In training mode, where norms of other kinds look at all pixels."""
    tiles = example("segmentation_tiles")
    model = tiles.network().double()
    mn.convert_(model, method, example=(2, 3, 24, 24))
    image = torch.randn(2, 3, 40, 40, dtype=torch.float64)
    part, margin = slice(8, 32), tiles.REACH
    whole, tile = model(image)[:, :, part, part], model(image[:, :, part, part])
    inside = slice(margin, -margin)
    difference = (whole - tile)[:, :, inside, inside].abs().max().item()
    assert difference < 1e-12 if equal else difference > 1e-2
    assert (whole - tile).abs().max() > 1e-2  # at the padding they do differ


@pytest.mark.filterwarnings("ignore:Full backward hook", "ignore:Secure RNG", "ignore:Optimal order")
def test_opacus_dp():
    spent, accuracy = example("opacus_dp").main(epsilon=8, epochs=3)
    assert 7 < spent <= 8
    assert accuracy > 0.4


def test_small_resnet_is_as_it_was():
    assert isinstance(example("small_resnet").small_resnet()[1], nn.BatchNorm2d)
    assert example("small_resnet").small_resnet()(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_the_page_lists_every_example():
    listed = re.findall(r"^\| \[`(\w+)\.py`\]\(\1\.py\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(p.stem for p in EXAMPLES.glob("*.py") if p.stem != "__init__")
