"""Static int8 quantisation of an ONNX file by onnxruntime: calibrated, measured, with the ranges that decide it."""

from __future__ import annotations

import logging
import statistics
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mimicnorm.deploy.export import import_package, quiet, require_target, session_of, written


@dataclass(frozen=True)
class Range:
    """What int8 has to resolve at one layer.

    Attributes:
        layer: The name of its weight.
        weight: The largest absolute weight.
        spread: That of the widest output channel over the median channel's. Per tensor, a channel with 1/127 of the
            widest one's range is left with a single step.
        input: The range of its input, largest minus smallest, as calibrated.
    """

    layer: str
    weight: float
    spread: float
    input: float


def quantise(source: str | Path, path: str | Path, images: Iterable[Tensor], *, per_channel: bool) -> list[Range]:
    """Quantise weights and activations of an ONNX file to int8, with ranges calibrated on real images.

    Both are signed and symmetric or not as onnxruntime chooses; ranges are those between the smallest and the largest
    value seen.

    Args:
        source: The ONNX file.
        path: A file that does not exist.
        images: Batches, as the network takes them.
        per_channel: A scale for each output channel of a weight; otherwise one for each weight.
    """
    quantization = import_package("onnxruntime.quantization")
    shape_inference = import_package("onnxruntime.quantization.shape_inference")
    path = require_target(path)
    name = session_of(Path(source)).get_inputs()[0].name
    logger = logging.getLogger()
    before, logger.disabled = logger.disabled, True  # it recommends what is done here
    try:
        with written(path) as partial, tempfile.TemporaryDirectory() as folder, quiet():
            prepared = Path(folder) / "prepared.onnx"
            shape_inference.quant_pre_process(str(source), str(prepared))
            reader = _reader(quantization, name, iter(images))
            quantization.quantize_static(str(prepared), str(partial), reader, per_channel=per_channel)
            return _ranges(prepared, partial)
    finally:
        logger.disabled = before


def accuracy(path: str | Path, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return the fraction of samples whose largest output, by onnxruntime, is that of their label."""
    session = session_of(Path(path))
    name = session.get_inputs()[0].name
    right = total = 0
    for images, labels in batches:
        logits = torch.from_numpy(session.run(None, {name: images.numpy()})[0])
        right += int((logits.argmax(1) == labels).sum())
        total += len(labels)
    return right / max(total, 1)


def _reader(quantization: Any, name: str, images: Iterator[Tensor]) -> Any:
    class Reader(quantization.CalibrationDataReader):
        def get_next(self) -> dict[str, Any] | None:
            batch = next(images, None)
            return None if batch is None else {name: batch.numpy()}

    return Reader()


def _ranges(plain: Path, quantised: Path) -> list[Range]:
    """Read off what was calibrated: scales of inputs from the quantised file, weights from the plain one."""
    onnx = import_package("onnx")
    numpy_helper = import_package("onnx.numpy_helper")
    constants = {t.name: t for t in onnx.load(str(plain)).graph.initializer}
    scales = {t.name: t for t in onnx.load(str(quantised)).graph.initializer if t.name.endswith("_scale")}
    rows = []
    for node in onnx.load(str(plain)).graph.node:
        if node.op_type not in ("Conv", "ConvTranspose", "Gemm", "MatMul") or node.input[1] not in constants:
            continue
        weight = torch.from_numpy(numpy_helper.to_array(constants[node.input[1]]).copy()).abs()
        transposed = node.op_type in ("ConvTranspose", "MatMul") or any(
            a.name == "transB" and not a.i for a in node.attribute
        )
        channels = (weight.transpose(0, 1) if transposed else weight).flatten(1).amax(1).tolist()
        scale = scales.get(f"{node.input[0]}_scale")
        widest, middle = max(channels), statistics.median(channels)
        rows.append(
            Range(
                layer=node.input[1],
                weight=widest,
                spread=widest / middle if middle else float("inf"),
                input=255 * float(numpy_helper.to_array(scale)) if scale is not None else float("nan"),
            )
        )
    return rows
