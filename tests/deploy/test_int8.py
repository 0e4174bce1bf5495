from __future__ import annotations

import nets
import onnx
import pytest
import torch
from stirred import stirred

import mimicnorm as mn
from mimicnorm.deploy import accuracy, export, fold, quantise
from mimicnorm.errors import DeployError

SHAPE = (2, 3, 8, 8)


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """A folded network in which one output channel of the first layer is 300 times as wide as the others."""
    folded = fold(stirred(nets.resnet(), mn.MimicNorm(), SHAPE))
    with torch.no_grad():
        folded.stem[0].weight[0] *= 300
        folded.blocks[0].conv1.weight[:, 0] /= 300
        folded.blocks[0].conv2.bias[0] = -1e4  # whatever the skip brings, the ReLU behind it gives 0
    path = tmp_path_factory.mktemp("int8") / "net.onnx"
    export(folded, "onnx", path, example=SHAPE)
    return folded, path


def images(count: int = 4):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(16, *SHAPE[1:], generator=generator) for _ in range(count)]


def labelled(model):
    with torch.no_grad():
        return [(x, model(x).argmax(1)) for x in images()]


def test_accuracy_counts_right_answers(network):
    model, path = network
    batches = labelled(model)
    assert accuracy(path, batches) == 1.0
    wrong = [(x, (y + (torch.arange(16) % 4 == 0)) % 5) for x, y in batches]
    assert accuracy(path, wrong) == 0.75


def test_quantised_files_and_their_ranges(network, tmp_path):
    model, path = network
    rows = quantise(path, tmp_path / "channel.onnx", images(), per_channel=True)
    quantise(path, tmp_path / "tensor.onnx", images(), per_channel=False)
    kinds = {node.op_type for node in onnx.load(tmp_path / "tensor.onnx").graph.node}
    assert {"QuantizeLinear", "DequantizeLinear"} <= kinds
    assert all(row.input > 0 for row in rows)
    first = next(row for row in rows if row.layer == "stem.0.weight")
    weight = model.stem[0].weight.detach()
    widths = weight.flatten(1).abs().amax(1)
    assert first.weight == pytest.approx(float(widths.max()), rel=1e-5)
    assert first.spread == pytest.approx(float(widths.max() / widths.quantile(0.5)), rel=0.3)
    assert first.spread > 100
    assert len(rows) == 9
    truth = labelled(model)
    assert accuracy(tmp_path / "channel.onnx", truth) >= accuracy(tmp_path / "tensor.onnx", truth)


def test_a_target_that_exists(network, tmp_path):
    (tmp_path / "out.onnx").touch()
    with pytest.raises(DeployError, match=r"out\.onnx exists"):
        quantise(network[1], tmp_path / "out.onnx", images(), per_channel=True)
