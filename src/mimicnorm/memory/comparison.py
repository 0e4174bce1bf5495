"""The memory of one network under several methods, side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Unpack

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from mimicnorm.errors import MemoryPredictionError, RefusedError
from mimicnorm.memory.analysis import Analysis, as_text, not_counted
from mimicnorm.memory.arguments import Settings, predicted_device, require_module
from mimicnorm.memory.budget import largest_batch
from mimicnorm.memory.replica import first_line, first_samples
from mimicnorm.memory.step import measure
from mimicnorm.memory.units import format_bytes, parse_bytes
from mimicnorm.methods import METHODS, Method, as_method
from mimicnorm.methods import settings as fields
from mimicnorm.surgery.convert import convert

if TYPE_CHECKING:
    from rich.table import Table

EVERY = tuple(dict.fromkeys(("batchnorm", "mimicnorm", "nonorm", *METHODS)))


@dataclass(frozen=True)
class Comparison:
    """One analysis per method, in the order asked for; ratios are to the first."""

    analyses: dict[str, Analysis]
    largest_batches: dict[str, int]
    """Empty if no budget was given; 0 where the budget allows no batch at all."""
    budget_bytes: int | None = None
    refused: dict[str, str] = field(default_factory=dict)
    """Why the other methods cannot be applied to this network; empty if the methods were named."""

    def saved_ratio(self, name: str) -> float:
        """Saved bytes of a method over those of the first one."""
        return self.analyses[name].saved_bytes / self._first.saved_bytes

    def peak_ratio(self, name: str) -> float:
        """Peak bytes of a method over those of the first one."""
        return self.analyses[name].peak_bytes / self._first.peak_bytes

    def table(self) -> Table:
        """Lay the methods out as rows of a rich table."""
        from rich.table import Table

        table = Table(title=f"Memory of one training step, {self._first.setting}")
        table.add_column("method")
        for heading in ("saved per sample", "ratio", "peak", "ratio"):
            table.add_column(heading, justify="right")
        if self.budget_bytes is not None:
            table.add_column(f"largest batch in {format_bytes(self.budget_bytes)}", justify="right")
        for name, analysis in self.analyses.items():
            table.add_row(
                name,
                format_bytes(round(analysis.saved_bytes_per_sample)),
                f"{self.saved_ratio(name):.3f}",
                format_bytes(analysis.peak_bytes),
                f"{self.peak_ratio(name):.3f}",
                *([] if self.budget_bytes is None else [str(self.largest_batches[name])]),
            )
        for name in self.refused:
            table.add_row(name, "refused", *["-"] * (len(table.columns) - 2))
        table.caption_justify = "left"
        reasons = [f"{name}: {reason}" for name, reason in self.refused.items()]
        table.caption = "\n".join([*not_counted(self._first.device), *reasons]) or None
        return table

    def as_dict(self) -> dict[str, Any]:
        """Return every row in JSON's types."""
        return {
            "device": self._first.device,
            "budget_bytes": self.budget_bytes,
            "methods": {
                name: {
                    **analysis.as_dict(),
                    "saved_ratio": self.saved_ratio(name),
                    "peak_ratio": self.peak_ratio(name),
                    "largest_batch": self.largest_batches.get(name),
                }
                for name, analysis in self.analyses.items()
            },
            "refused": self.refused,
        }

    def __str__(self) -> str:
        """Render the table as plain text."""
        return as_text(self.table())

    @property
    def _first(self) -> Analysis:
        return next(iter(self.analyses.values()))


def compare(
    model: nn.Module,
    example: Any,
    methods: Method | str | Iterable[Method | str] | None = None,
    *,
    budget: str | int | None = None,
    **settings: Unpack[Settings],
) -> Comparison:
    """Predict what a network with BatchNorm costs as it is and converted by each method.

    Args:
        model: A network with BatchNorm; compiled, it is converted and then taken as compiled again.
        example: As for ``measure``.
        methods: Methods or their names; the first is what the others are compared with. Two of one name
            but with other settings go by both, as in ``"mimicnorm(last_norm=False)"``. Without them, every method
            that the network can take; the others are in ``refused``, each with its reason.
        budget: With it, also find each method's largest batch.
        **settings: ``loss``, ``optimizer``, ``autocast``, ``fake`` and ``device`` as for ``measure``.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(7200, 9))
        >>> compare(net, (64, 3, 32, 32), ["batchnorm", "nonorm"]).saved_ratio("nonorm") < 0.7
        True
    """
    budget_bytes = None if budget is None else parse_bytes(budget)
    require_module(model)
    predicted_device(settings.get("device"), model, settings.get("fake", True))  # an error before the first conversion
    compiled = isinstance(model, OptimizedModule) or model._compiled_call_impl is not None
    plain = model._orig_mod if isinstance(model, OptimizedModule) else model
    small = first_samples(example, 2)  # the surgery reads shapes, it needs no large batch
    analyses, batches = {}, {}
    refusals: dict[str, RefusedError] = {}
    shortages: list[MemoryPredictionError] = []
    for name, method in _by_unique_name(EVERY if methods is None else methods).items():
        try:
            network = convert(plain, method, example=small, init=None)
        except RefusedError as refusal:
            if methods is not None:
                raise
            refusals[name] = refusal
            continue
        if compiled:
            network.compile()
        analyses[name] = measure(network, example, **settings)
        if budget_bytes is None:
            continue
        try:
            batches[name] = largest_batch(network, example, budget_bytes, **settings)
        except MemoryPredictionError as shortage:  # what one method cannot fit another may
            shortages.append(shortage)
            batches[name] = 0
    if refusals and len(analyses) < 2:  # as in a network without BatchNorm: there is nothing to compare
        raise next(iter(refusals.values()))
    if shortages and not any(batches.values()):
        raise shortages[0]
    return Comparison(analyses, batches, budget_bytes, {name: _in_short(error) for name, error in refusals.items()})


def _in_short(error: RefusedError) -> str:
    """The first reason of a refusal, without its remedy."""
    if not error.refusals:
        return first_line(error)
    first, *others = error.refusals
    where = f"{first.name}: " if first.name else ""
    return f"{where}{first.reason}" + (f" (and {len(others)} more)" if others else "")


def _by_unique_name(methods: Method | str | Iterable[Method | str]) -> dict[str, Method]:
    several = isinstance(methods, Iterable) and not isinstance(methods, str)
    chosen = [as_method(m) for m in (methods if several else [methods])]  # pyrefly: ignore
    if not chosen:
        raise MemoryPredictionError('there is no method to compare: give at least one, such as "batchnorm"')
    named = {_name_among(method, chosen): method for method in chosen}
    if len(named) < len(chosen):
        raise MemoryPredictionError(
            f"a method is given twice with the same settings among {', '.join(m.name for m in chosen)}: give it once"
        )
    return named


def _name_among(method: Method, chosen: Sequence[Method]) -> str:
    """Return a method's name, with the settings in which others of the same name differ."""
    namesakes = [fields(other) for other in chosen if other.name == method.name]
    differing = [
        f"{key}={value!r}" for key, value in fields(method).items() if any(other[key] != value for other in namesakes)
    ]
    return f"{method.name}({', '.join(differing)})" if differing else method.name
