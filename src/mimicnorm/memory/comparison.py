"""The memory of one network under several methods, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Unpack

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from mimicnorm.errors import MemoryPredictionError, RefusedError
from mimicnorm.memory.analysis import Analysis, as_text, new_table, not_counted
from mimicnorm.memory.budget import search
from mimicnorm.memory.passes import first_line
from mimicnorm.memory.samples import with_samples
from mimicnorm.memory.step import Settings, measure, require_model
from mimicnorm.memory.units import format_bytes, parse_bytes
from mimicnorm.methods import Method, as_method
from mimicnorm.methods import settings as fields
from mimicnorm.surgery.convert import convert

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Comparison:
    """One analysis per method, in the order asked for; ratios are to the first."""

    analyses: dict[str, Analysis]
    largest_batches: dict[str, int]
    """Empty if no budget was given; 0 where the budget allows no batch at all."""
    budget_bytes: int | None = None
    refused: dict[str, str] = field(default_factory=dict)
    """Why the other methods cannot be applied to this network."""

    def saved_ratio(self, name: str) -> float:
        """Return the saved bytes of a method over those of the first one."""
        return self.analyses[name].saved_bytes / self._first.saved_bytes

    def peak_ratio(self, name: str) -> float:
        """Return the peak bytes of a method over those of the first one."""
        return self.analyses[name].peak_bytes / self._first.peak_bytes

    def table(self) -> Table:
        """Return a rich table with one row per method."""
        headings = ["method", "saved per sample", "ratio", "peak", "ratio"]
        widths = {name: analysis.activation_bits for name, analysis in self.analyses.items()}
        if any(widths.values()):
            headings.insert(1, "activation bits")
        if self.budget_bytes is not None:
            headings.append(f"largest batch in {format_bytes(self.budget_bytes)}")
        table = new_table(f"Memory of one training step, {self._first.setting}", headings)
        for name, analysis in self.analyses.items():
            table.add_row(
                name,
                *([str(widths[name] or "-")] if any(widths.values()) else []),
                format_bytes(round(analysis.saved_bytes_per_sample)),
                f"{self.saved_ratio(name):.3f}",
                format_bytes(analysis.peak_bytes),
                f"{self.peak_ratio(name):.3f}",
                *([] if self.budget_bytes is None else [str(self.largest_batches[name])]),
            )
        for name in self.refused:
            table.add_row(name, "refused", *["-"] * (len(headings) - 2))
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
        """Return the table as plain text."""
        return as_text(self.table())

    @property
    def _first(self) -> Analysis:
        return next(iter(self.analyses.values()))


def compare(
    model: nn.Module,
    example: Any,
    methods: Method | str | Iterable[Method | str] = ("batchnorm", "mimicnorm", "nonorm"),
    *,
    budget: str | int | None = None,
    progress: Callable[[str], None] | None = None,
    **settings: Unpack[Settings],
) -> Comparison:
    """Predict what a network with BatchNorm costs as it is and converted by each method.

    Args:
        model: A network with BatchNorm; compiled, it is converted and then taken as compiled again.
        example: As for ``measure``.
        methods: Methods or their names (``mimicnorm.methods.METHODS`` for all); the first is what the others are
            compared with. Two of one name but with other settings go by both, as in ``"mimicnorm(last_norm=False)"``.
            Those that the network cannot take are in ``refused``, each with its reason.
        budget: With it, also find each method's largest batch.
        progress: Called with a line of text before each prediction.
        **settings: ``loss``, ``optimizer``, ``autocast``, ``fake`` and ``device`` as for ``measure``; with
            ``activation_bits``, every method is predicted as it is and again with activations in so many bits, under
            names such as ``"mimicnorm, 8 bits"``.

    Raises:
        RefusedError: No method can be applied, or only one of several: there is nothing to compare.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(7200, 9))
        >>> compare(net, (64, 3, 32, 32), ["batchnorm", "nonorm"]).saved_ratio("nonorm") < 0.7
        True
    """
    require_model(model)
    budget_bytes = None if budget is None else parse_bytes(budget)
    show = progress or (lambda _: None)
    compiled = isinstance(model, OptimizedModule) or model._compiled_call_impl is not None
    plain = model._orig_mod if isinstance(model, OptimizedModule) else model
    small = with_samples(example, 2)  # the surgery reads shapes, it needs no large batch
    analyses, batches = {}, {}
    width = settings.pop("activation_bits", None)
    refusals: dict[str, RefusedError] = {}
    shortages: list[MemoryPredictionError] = []
    for name, method in _by_unique_name(methods).items():
        show(f"{name}: converting")
        try:
            network = convert(plain, method, example=small, init=None)
        except RefusedError as refusal:
            refusals[name] = refusal
            continue
        if compiled:
            network.compile()

        for row, bits in {name: None, **({f"{name}, {width} bits": width} if width is not None else {})}.items():

            def predict(batch: int | None, network: Any = network, row: str = row, bits: Any = bits) -> Analysis:
                show(f"{row}: predicting " + ("the step" if batch is None else f"batch {batch}"))
                return measure(network, example, batch=batch, activation_bits=bits, **settings)

            analyses[row] = predict(None)
            if budget_bytes is not None:
                try:
                    batches[row] = search(predict, budget_bytes, analyses[row])
                except MemoryPredictionError as shortage:  # what one method cannot fit another may
                    shortages.append(shortage)
                    batches[row] = 0
    if refusals and len(analyses) < 2:  # as in a network without BatchNorm: there is nothing to compare
        raise next(iter(refusals.values()))
    if shortages and not any(batches.values()):
        raise shortages[0]
    return Comparison(analyses, batches, budget_bytes, {name: _first_reason(error) for name, error in refusals.items()})


def _first_reason(error: RefusedError) -> str:
    """Return the first reason of a refusal, without its remedy."""
    if not error.refusals:
        return first_line(error)
    first, *others = error.refusals
    where = f"{first.name}: " if first.name else ""
    return f"{where}{first.reason}" + (f" (and {len(others)} more)" if others else "")


def _by_unique_name(methods: Method | str | Iterable[Method | str]) -> dict[str, Method]:
    several = isinstance(methods, Iterable) and not isinstance(methods, str)
    chosen = [as_method(m).resolved(trained=False) for m in (methods if several else [methods])]  # pyrefly: ignore
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
