"""``mimicnorm export``: fold a network, write it to a file, and quantise it if asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from mimicnorm.cli.network import Network
from mimicnorm.errors import DeployError

_CALIBRATION, _BATCH = 512, 64  # images


@dataclass(kw_only=True)
class Export(Network):
    """Fold the network of a finished run, or a converted one, to plain layers and write it to a file."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_FOLDER|MODEL")]
    """The folder of a finished run; or a network as for convert, which is converted unless it already is."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """The file to write; it must not exist."""
    to: Literal["onnx", "pt2", "safetensors"] = "onnx"
    """onnx, pt2 (torch.export), or safetensors (the weights alone, by the names of the original network)."""
    int8: bool = False
    """Quantise the ONNX file, too, calibrated on training images: OUT with .int8 and .int8-channel in its name."""
    method: str = "mimicnorm"
    """How to convert a network that is not converted yet; its weights are random then."""
    data_dir: Path | None = None
    """Where the data of the run is; else the environment variable MIMICNORM_DATA, else the hub."""

    def check_names(self) -> None:
        """Raise an error for a mistyped model or method before torch is imported."""
        if not Path(self.model).is_dir():
            super().check_names()

    def run(self) -> None:
        """Fold, export, quantise; print what came of it."""
        from mimicnorm.deploy import export, fold_with_report, fuse
        from mimicnorm.deploy.export import require_target

        run_folder = Path(self.model).is_dir()
        if self.int8 and (self.to != "onnx" or not run_folder):
            raise DeployError("--int8 quantises ONNX and calibrates on real images: use --to onnx and a run's folder")
        targets = [self.out.with_suffix(f".{kind}{self.out.suffix}") for kind in ("int8", "int8-channel")]
        for target in (self.out, *targets) if self.int8 else (self.out,):
            require_target(target)
        run: Any = None
        if run_folder:
            from mimicnorm.training.finished_run import finished

            run = finished(self.model, data_dir=self.data_dir)
            model, example = run.model, (2, *run.train_set.shape)
        else:
            model, example = self._converted()
        if run is not None and run.recipe.method == "batchnorm":
            plain = fuse(model)
            print("a network with BatchNorms: fused by PyTorch")
        else:
            report = fold_with_report(model, example=example)
            plain = report.model
            print(report)
        print(export(plain, self.to, self.out, example=example))
        if self.int8:
            self._quantise(run, targets)

    def _converted(self) -> tuple[Any, tuple[int, ...]]:
        """Return a network in eval mode that is converted, now if it was not before, and the shape of an example."""
        from mimicnorm.layers import Derived
        from mimicnorm.methods import method
        from mimicnorm.surgery.convert import convert_

        model, shape = self.build()
        if not any(isinstance(m, Derived) or "_mimicnorm" in m.__dict__ for m in model.modules()):
            convert_(model, method(self.method), example=shape)
        return model.eval(), shape

    def _quantise(self, run: Any, targets: list[Path]) -> None:
        from mimicnorm.deploy.int8 import accuracy, quantise

        ranges = []
        for target, per_channel in zip(targets, (False, True), strict=True):
            images = (images for images, _ in run.train_set.plain_batches(_BATCH, most=_CALIBRATION))
            ranges = quantise(self.out, target, images, per_channel=per_channel)
        labels = ("float", "int8, per tensor", "int8, per channel")
        for path, label in zip((self.out, *targets), labels, strict=True):
            top1 = accuracy(path, run.test_set.plain_batches(_BATCH))
            print(f"{label}: top-1 {top1:.2%}, {path.stat().st_size / 2**20:.2f} MiB, {path}")
        print("layer  largest weight  widest channel over median  range of the input")
        for row in ranges:
            print(f"{row.layer}  {row.weight:.3g}  {row.spread:.2f}  {row.input:.3g}")
