from __future__ import annotations

import os
import sys

import nets
import onnx
import onnxruntime
import pytest
import torch
from stirred import stirred
from torch import nn

import mimicnorm as mn
from mimicnorm.deploy import export, fold
from mimicnorm.errors import DeployError

SHAPE = (2, 3, 8, 8)


@pytest.fixture(scope="module")
def folded() -> nn.Module:
    return fold(stirred(nets.resnet(), mn.MimicNorm(), SHAPE))


def test_onnx_runs_at_any_batch_size_without_norms(folded, tmp_path):
    done = export(folded, "onnx", tmp_path / "net.onnx", example=SHAPE)
    assert done.nodes["Conv"] == 8
    assert not done.norms
    assert done.opset == onnx.load(tmp_path / "net.onnx").opset_import[0].version
    assert done.bytes == (tmp_path / "net.onnx").stat().st_size
    assert max(done.errors.values()) < 1e-5
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx")
    x = torch.randn(7, *SHAPE[1:])
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), folded(x).detach(), rtol=1e-4, atol=1e-5)
    assert [p.name for p in tmp_path.iterdir()] == ["net.onnx"]
    assert "normalisation nodes: none" in str(done)


def test_group_norms_are_listed(tmp_path):
    plain = fold(stirred(nets.resnet(), mn.GroupNormWS(), SHAPE))
    assert export(plain, "onnx", tmp_path / "net.onnx", example=SHAPE).norms


def test_pt2_is_read_back(folded, tmp_path):
    done = export(folded, "pt2", tmp_path / "net.pt2", example=SHAPE)
    assert done.errors == {1: 0.0, 2: 0.0, 5: 0.0}
    loaded, x = torch.export.load(tmp_path / "net.pt2").module(), torch.randn(7, *SHAPE[1:])
    torch.testing.assert_close(loaded(x), folded(x))


def test_safetensors_holds_the_state_dict(folded, tmp_path):
    from safetensors.torch import load_file

    export(folded, "safetensors", tmp_path / "net.safetensors", example=SHAPE)
    read = load_file(tmp_path / "net.safetensors")
    assert read.keys() == folded.state_dict().keys()
    assert all(torch.equal(read[name], t) for name, t in folded.state_dict().items())


@pytest.mark.parametrize("to", ["onnx", "pt2"])
def test_several_outputs(to, tmp_path):
    plain = fold(stirred(nets.Segmenter(), mn.MimicNorm(), SHAPE))
    assert max(export(plain, to, tmp_path / "net", example=SHAPE).errors.values()) < 1e-5


@pytest.mark.parametrize("to", ["onnx", "pt2"])
def test_arguments_by_name(to, tmp_path):
    class Named(nn.Module):
        def forward(self, *, image, offset):
            return image.relu() + offset[:, None]

    example = {"image": torch.randn(3, 4), "offset": torch.randn(3)}
    assert max(export(Named().eval(), to, tmp_path / "net", example=example).errors.values()) < 1e-6


# -- bad input --------------------------------------------------------------------------------------------------


def test_bad_input_is_one_clear_error_and_leaves_nothing(folded, tmp_path):
    path = tmp_path / "net.onnx"
    converted = stirred(nets.resnet(), mn.MimicNorm(), SHAPE)
    for model, to, says in (
        (folded, "onx", "use one of onnx, pt2, safetensors"),
        (converted, "onnx", r"not folded: give export mimicnorm.fold\(model\)"),
        (nets.plain(), "onnx", "training mode"),
    ):
        with pytest.raises(DeployError, match=says):
            export(model, to, path, example=SHAPE)
    with pytest.raises(DeployError, match="the folder does not exist"):
        export(folded, "onnx", tmp_path / "no" / "net.onnx", example=SHAPE)
    assert not list(tmp_path.iterdir())
    path.write_text("mine")
    with pytest.raises(DeployError, match=r"net\.onnx exists"):
        export(folded, "onnx", path, example=SHAPE)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package(folded, tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DeployError, match=rf"{package}.* is not installed.*mimicnorm\[export\]"):
        export(folded, "onnx", tmp_path / "net.onnx", example=SHAPE)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("to", ["onnx", "pt2", "safetensors"])
def test_a_disk_that_is_full(folded, tmp_path, monkeypatch, to):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(DeployError, match=r"cannot write .*No space left"):
        export(folded, to, tmp_path / "net", example=SHAPE)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("to", ["onnx", "pt2"])
def test_a_network_that_cannot_be_captured(tmp_path, to):
    class Fixed(nn.Module):
        def forward(self, x):
            return x.reshape(2, -1) if x.shape[0] == 2 else x  # one batch size alone

    with pytest.raises(DeployError, match=r"torch cannot export the network|does not run at batch|differs"):
        export(Fixed().eval(), to, tmp_path / "net", example=SHAPE)
    assert not list(tmp_path.iterdir())
