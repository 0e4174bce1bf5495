"""``mimicnorm memory``: what training a network costs, method by method, before it is run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mimicnorm.cli.network import Network


@dataclass
class Memory(Network):
    """Predict the memory of a training step under several methods, without allocating it."""

    batch: int = 32
    methods: str = "batchnorm,mimicnorm,nonorm"
    """Methods to compare, separated by commas: those of ``convert --method``, or ``all``."""
    optimizer: Literal["sgd-momentum", "sgd", "adamw", "none"] = "sgd-momentum"
    """Whose state and step to count."""
    budget: str | None = None
    """Memory of the device, e.g. 16GiB: adds the largest batch that fits."""
    activation_bits: Literal[2, 4, 8, 32] | None = None
    """Also predict every method with activations saved in so many bits (mimicnorm.compress)."""
    device: str = "auto"
    """What to predict for: cpu, cuda, ...; auto is the GPU if there is one. No GPU is needed to predict for one."""
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
        import torch

        from mimicnorm import memory
        from mimicnorm.cli.console import Console, print_json
        from mimicnorm.errors import MemoryPredictionError
        from mimicnorm.memory.step import device_type
        from mimicnorm.methods import METHODS, method
        from mimicnorm.pictures import require_picture

        names = METHODS if self.methods == "all" else [name.strip() for name in self.methods.split(",")]
        methods = [method(name) for name in names if name]
        if not methods:
            raise MemoryPredictionError("--methods names no method: give some, such as batchnorm,mimicnorm")
        if self.plot is not None:
            require_picture(self.plot)
        budget = memory.parse_bytes(self.budget) if self.budget is not None else None
        auto = "cuda" if torch.cuda.is_available() else "cpu"
        device = device_type(auto if self.device == "auto" else self.device)
        with Console(stderr=True).status(f"loading {self.model}") as status:
            model, shape = self.build()
            if not self.fake:
                model = _moved(model, device)
            comparison = memory.compare(
                model,
                shape,
                methods,
                optimizer=None if self.optimizer == "none" else self.optimizer,
                budget=budget,
                fake=self.fake,
                device=device,
                activation_bits=self.activation_bits,
                progress=status.update,
            )
        if self.plot is not None:
            memory.plot(comparison, self.plot)
        if self.json:
            print_json({"model": self.model, "shape": list(shape), **comparison.as_dict()})
            return
        console = Console()
        console.print(comparison.table())
        if self.by_module:
            for name, analysis in comparison.analyses.items():
                console.print(f"\n{name}")
                console.print(analysis.module_table())
        if self.plot is not None:
            console.print(f"wrote {self.plot}")


def _moved(model: Any, device: str) -> Any:
    """Return the model on the device on which the step runs for real."""
    from mimicnorm.errors import MemoryPredictionError

    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise MemoryPredictionError(f"--no-fake runs the step on {device}, which cannot be used: {reason}") from error
