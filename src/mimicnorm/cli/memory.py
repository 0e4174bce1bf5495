"""``mimicnorm memory``: what training a network costs, method by method, before it is run."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro


@dataclass
class Memory:
    """Predict the memory of a training step under several methods, without allocating it."""

    model: Annotated[str, tyro.conf.Positional]
    """A network of this package (resnet18, vgg16, ...), timm:NAME, torchvision:NAME, or package.module:factory."""
    batch: int = 32
    """Samples in the batch."""
    image: int | None = None
    """Height and width of the input; the model's own default if not given."""
    input: Literal["imagenet", "cifar"] | None = None
    """Stem of a network of this package: imagenet (224 px), or cifar (32 px), without stride."""
    width: float | None = None
    """Multiplies the channels of a network of this package."""
    shape: tuple[int, ...] | None = None
    """The whole input shape, batch first, for inputs that are no square images."""
    methods: str | None = None
    """Methods to compare, separated by commas: those of ``convert --method``. All that the network takes by default."""
    optimizer: str = "sgd-momentum"
    """sgd-momentum, sgd, adamw, or none."""
    budget: str | None = None
    """Memory of the device, e.g. 16GiB: adds the largest batch that fits."""
    fake: bool = True
    """Try the step without allocating it; --no-fake runs it for real, on normal noise."""
    by_module: bool = False
    """Show where the memory is, for each method."""
    plot: str | None = None
    """Draw the memory over the step to this file."""
    json: bool = False
    """Print plain JSON instead of tables."""

    def run(self) -> None:
        """Measure every method and print one table."""
        from mimicnorm import memory
        from mimicnorm.cli.console import Console
        from mimicnorm.errors import MemoryPredictionError
        from mimicnorm.memory.figure import refuse_unwritable
        from mimicnorm.memory.step import OPTIMIZERS
        from mimicnorm.methods import method
        from mimicnorm.models import find
        from mimicnorm.models.lookup import input_shape

        chosen = None
        if self.methods is not None:
            chosen = [method(name.strip()) for name in self.methods.split(",") if name.strip()]
            if not chosen:
                raise MemoryPredictionError("--methods names no method: give some, such as batchnorm,mimicnorm")
        if self.optimizer not in (*OPTIMIZERS, "none"):
            known = ", ".join(OPTIMIZERS)
            raise MemoryPredictionError(f"--optimizer {self.optimizer!r} is not known: give one of {known}, none")
        if self.plot is not None:
            refuse_unwritable(self.plot)
        budget = memory.parse_bytes(self.budget) if self.budget is not None else None
        model = find(self.model, input=self.input, width=self.width, image=self.image)
        shape = input_shape(model, batch=self.batch, image=self.image, shape=self.shape)
        optimizer = None if self.optimizer == "none" else self.optimizer
        comparison = memory.compare(model, shape, chosen, optimizer=optimizer, budget=budget, fake=self.fake)
        if self.plot is not None:
            memory.plot(comparison, self.plot)
        if self.json:
            json.dump({"model": self.model, "shape": list(shape), **comparison.as_dict()}, sys.stdout)
            print()
            return
        console = Console()
        console.print(comparison.table())
        if self.by_module:
            for name, analysis in comparison.analyses.items():
                console.print(f"\n{name}")
                console.print(analysis.module_table())
        if self.plot is not None:
            console.print(f"wrote {self.plot}")
