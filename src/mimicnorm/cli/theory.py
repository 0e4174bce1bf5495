"""``mimicnorm theory``: gains, figures, Monte Carlo checks, the signal doctor."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from mimicnorm.cli.network import Network

if TYPE_CHECKING:
    import torch


@dataclass
class Gains:
    """Print the gain and the stability of every activation the theory knows."""

    def run(self) -> None:
        """Tabulate gains, slopes and drift."""
        from rich.table import Table

        from mimicnorm.cli.console import Console
        from mimicnorm.theory import activations

        table = Table("activation", "gain", "chi_1", "Tbar'(0)", "dV/dq", title="At the weight-mean gain 1/sd(phi(z))")
        for name in activations.names():
            stats = activations.activation_stats(name)
            cells = (1 / stats.sd, stats.chi1, stats.tbar_slope_at_zero, stats.variance_slope)
            table.add_row(name, *(f"{value:.4f}" for value in cells))
        Console().print(table)


@dataclass
class Figure:
    """Draw one of the theory's figures."""

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """distributions, transitions, correlations, ntk, residual or phase."""
    out: str | None = None
    """The file to write; its ending chooses the format. theory-NAME.png if not given."""
    inputs: str | None = None
    """Samples instead of a Gaussian mixture: a data set (mnist, digits, ...) or a .npy file (m, ...)."""
    data_dir: str | None = None
    """Folder of the data set's files; by default MIMICNORM_DATA, else they are downloaded from the hub."""
    seed: int = 0
    """Seed of samples and weights."""

    def run(self) -> None:
        """Draw the figure and print its path."""
        from mimicnorm.pictures import require_picture
        from mimicnorm.theory import figures

        _require_seed(self.seed)
        path = f"theory-{self.name}.png" if self.out is None else self.out
        if self.name in figures.NAMES:
            require_picture(path)  # before data are fetched
        inputs = None if self.inputs is None else _samples(self.inputs, self.data_dir)
        figures.draw(self.name, path, inputs=inputs, seed=self.seed)
        print(f"wrote {path}")


@dataclass
class Check:
    """Compare the theorems with Monte Carlo: estimate, standard error, prediction."""

    seed: int = 0
    """Seed of the draws."""

    def run(self) -> None:
        """Run every check with its default settings."""
        from mimicnorm.theory import Transition, montecarlo

        _require_seed(self.seed)
        checks = (
            montecarlo.dual_activation,
            montecarlo.lemma1,
            montecarlo.theorem1,
            montecarlo.theorem2,
            montecarlo.theorem3,
            functools.partial(montecarlo.tangent_kernel, Transition("weight_mean")),
            montecarlo.gradient_growth,
            montecarlo.correlation_spread,
            montecarlo.residual_variance,
        )
        for check in checks:
            print(check(seed=self.seed), flush=True)


@dataclass
class Doctor(Network):
    """Show variance, correlation and gradient through a network, before and after conversion, with a verdict."""

    method: str = "mimicnorm"
    """What to convert with."""
    head: str | None = None
    """Qualified name of the module that makes the logits."""
    plot: str | None = None
    """Draw both networks over depth to this file."""
    json: bool = False
    """Print plain JSON instead of the table."""

    def run(self) -> None:
        """Propagate one batch of noise through both networks, layer by layer."""
        from rich import box
        from rich.table import Table

        from mimicnorm.cli.console import Console, print_json
        from mimicnorm.methods import method
        from mimicnorm.pictures import require_picture
        from mimicnorm.surgery.convert import convert
        from mimicnorm.surgery.example import call_arguments
        from mimicnorm.theory import TheoryError, doctor

        samples = self.shape[0] if self.shape else self.batch
        if samples < 2:
            flag = "the first number of --shape" if self.shape else "--batch"
            raise TheoryError(f"{flag} must be at least 2, not {samples}: a correlation needs two samples.")
        if self.plot is not None:
            require_picture(self.plot)
        chosen = method(self.method)
        model, shape = self.build()
        (x,), _ = call_arguments(model, shape)
        signals = {"before": doctor.propagate(model, x)}
        signals[chosen.name] = doctor.propagate(convert(model, chosen, example=x, head=self.head), x)
        if self.plot is not None:
            doctor.plot({name: s.weight_layers() for name, s in signals.items()}, self.plot)
        if self.json:
            print_json({name: s.as_dicts() for name, s in signals.items()})
            return
        before, after = (_by_use(s.weight_layers().layers) for s in signals.values())
        title = f"{self.model}: before and after {chosen.name}"
        table = Table(title=title, box=box.SIMPLE, pad_edge=False, collapse_padding=True)
        table.add_column("layer", overflow="fold")  # cut short, names that differ at the end would look alike
        for quantity in ("variance", "corre-\nlation", "gradient"):
            for when in ("before", "after"):
                table.add_column(f"{quantity}\n{when}", justify="right", no_wrap=True)
        for use, a in before.items():
            b = after.get(use)  # a head with a LastNorm inside is not a leaf
            cells = [a.name]
            for quantity in ("variance", "correlation", "gradient"):
                cells += [f"{getattr(a, quantity):.3g}", "" if b is None else f"{getattr(b, quantity):.3g}"]
            table.add_row(*cells)
        Console().print(table)
        for name, signal in signals.items():
            Console().print(f"{name} is {signal.verdict()}", highlight=False)


def _require_seed(seed: int) -> None:
    from mimicnorm.theory import TheoryError

    if not 0 <= seed < 2**63:
        raise TheoryError(f"--seed must be at least 0 and below 2^63, not {seed}.")


def _samples(path: str, data_dir: str | None) -> torch.Tensor:
    import numpy as np
    import torch

    from mimicnorm import data
    from mimicnorm.theory import TheoryError

    known = [name for name in data.names() if name not in ("imagenet", "folder:PATH")]
    if path in known:
        source = data.load(path, data_dir=data_dir, limit=4000)
        images, _ = next(source.plain_batches(len(source)))
        return images.double()
    if not path.endswith(".npy"):
        raise TheoryError(
            f"--inputs must be a .npy file of samples (numpy.save) or one of {', '.join(known)}, not {path!r}."
        )
    try:
        return torch.from_numpy(np.load(path, allow_pickle=False).astype(np.float64))
    except (OSError, ValueError, EOFError) as error:
        raise TheoryError(f"cannot read samples from {path!r}: {error}") from error


def _by_use(layers: Sequence[Any]) -> dict[tuple[str, int], Any]:
    """Return layers by their name and the number of earlier uses of it."""
    uses: Counter[str] = Counter()
    by_use = {}
    for layer in layers:
        by_use[layer.name, uses[layer.name]] = layer
        uses[layer.name] += 1
    return by_use


@dataclass
class Theory:
    """Compute, draw, check and apply the paper's theory."""

    what: (
        Annotated[Gains, tyro.conf.subcommand("gains")]
        | Annotated[Figure, tyro.conf.subcommand("figure")]
        | Annotated[Check, tyro.conf.subcommand("check")]
        | Annotated[Doctor, tyro.conf.subcommand("doctor")]
    )

    def run(self) -> None:
        """Run the part that was asked for."""
        self.what.run()
