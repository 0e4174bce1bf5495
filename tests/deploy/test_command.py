"""``mimicnorm export``."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import zoo

from mimicnorm.cli import main
from mimicnorm.training import recipe, train


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Finished runs of an epoch, with MimicNorm and with BatchNorm."""
    out = tmp_path_factory.mktemp("runs")
    for method in ("mimicnorm", "batchnorm"):
        train(
            recipe("digits-resnet10", method=method, epochs=1, limit=640, test_limit=200), out / method, progress=False
        )
    return out


@pytest.mark.parametrize("method", ["mimicnorm", "batchnorm"])
def test_a_run_as_onnx_and_in_int8(runs, tmp_path, capsys, method):
    assert main(["export", str(runs / method), str(tmp_path / "net.onnx"), "--int8"]) == 0
    out = capsys.readouterr().out
    assert "normalisation nodes: none" in out
    assert "int8, per channel: top-1" in out
    assert ("fc.last_norm: folded into fc" in out) == (method == "mimicnorm")
    names = {"net.onnx", "net.int8.onnx", "net.int8-channel.onnx"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert (tmp_path / "net.int8.onnx").stat().st_size < 0.4 * (tmp_path / "net.onnx").stat().st_size


def test_a_network_by_its_name(tmp_path, capsys):
    words = ["resnet10", "--input", "cifar", "--image", "32", "--width", "0.25"]
    assert main(["export", *words, str(tmp_path / "net.pt2"), "--to", "pt2"]) == 0
    assert torch.export.load(tmp_path / "net.pt2").module()(torch.randn(3, 3, 32, 32)).shape == (3, 100)
    assert "read back" in capsys.readouterr().out


def test_a_users_converted_network_keeps_its_weights(tmp_path, monkeypatch):
    (tmp_path / "mine_converted.py").write_text(
        "import torch, mimicnorm as mn\n"
        "from torch import nn\n"
        "def net():\n"
        "    torch.manual_seed(0)\n"
        "    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))\n"
        "    return mn.convert(model, mn.NoNorm(), example=(2, 3, 8, 8))\n"
    )
    monkeypatch.chdir(tmp_path)
    command = ["export", "mine_converted:net", "net.safetensors", "--to", "safetensors", "--shape", "2", "3", "8", "8"]
    assert main(command) == 0
    from mine_converted import net
    from safetensors.torch import load_file

    assert torch.equal(load_file("net.safetensors")["0.weight"], net()[0].weight)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["RUN", "EXISTS"], "exists: remove it"),
        (["RUN", "no/folder/net.onnx"], "the folder does not exist"),
        (["EMPTY", "net.onnx"], "does not hold a run"),
        (["resnet10", "net.onnx", "--int8"], "use --to onnx and a run's folder"),
        (["RUN", "net.pt2", "--to", "pt2", "--int8"], "use --to onnx and a run's folder"),
        (["torchvision:alexnet", "net.onnx"], "no BatchNorm"),
        (["resnet10", "net.onnx", "--method", "mimik"], "Did you mean mimicnorm"),
    ],
)
def test_mistakes_are_one_message_and_leave_nothing(runs, tmp_path, monkeypatch, capsys, words, says):
    zoo.torchvision()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "there.onnx").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    words = [{"RUN": str(runs / "mimicnorm"), "EXISTS": "there.onnx", "EMPTY": "empty"}.get(w, w) for w in words]
    assert main(["export", *words]) == 2
    assert says in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_mistyped_model_does_not_wait_for_torch(tmp_path):
    code = "import sys, mimicnorm.cli as c\nassert c.main(['export', 'resnet5', 'x']) == 2\n"
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
