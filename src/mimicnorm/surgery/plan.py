"""A plan as data: one edit per BatchNorm, per weight layer, per head; refusals; how it prints."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.nn import Parameter

from mimicnorm.errors import RefusedError
from mimicnorm.methods import Method, settings
from mimicnorm.methods.edits import Edit, HeadEdit, LayerEdit, NormEdit

OWN_INIT = "prescribes its initial weights, so there is nothing to calibrate"
_COLUMNS = ("module", "kind and role", "action", "fan-in", "gain", "v", "why")
_LEGEND = (
    "action: what is done; xS is a residual scalar that starts at S. gain: initial weights have standard deviation "
    "gain / sqrt(fan-in). v: predicted variance of the input"
)


@dataclass(frozen=True)
class Refusal:
    """Why a network cannot be converted: where, what is wrong, what to do."""

    name: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        where = f"{self.name}: " if self.name else ""
        return f"{where}{self.reason}. {self.remedy}."


@dataclass
class Plan:
    """Everything ``convert_`` would do; prints as a table.

    Attributes:
        gates: Layers of gates without BatchNorm: "calibrate" makes them small, so that gates start near constant.
        init: How the initial weights are set: "theory", "calibrate", "keep" (a trained network's stay) or None.
        init_why: Why that one.
        notes: What a reader should know and nothing refuses.
        example_shape: Of the example, if that was one float tensor; for ``fold``, once it was carried out.
    """

    method: Method
    norms: list[NormEdit] = field(default_factory=list)
    layers: list[LayerEdit] = field(default_factory=list)
    heads: list[HeadEdit] = field(default_factory=list)
    gates: list[str] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    init: str | None = None
    init_why: str = ""
    notes: list[str] = field(default_factory=list)
    example_shape: tuple[int, ...] | None = None

    @property
    def edits(self) -> list[Edit]:
        """Every edit, in the order in which they are carried out."""
        return [*self.layers, *self.norms, *self.heads]

    @property
    def ok(self) -> bool:
        """Whether it can be carried out."""
        return not self.refusals

    def refuse(self, name: str, reason: str, remedy: str) -> None:
        """Add a reason why this network cannot be converted as asked."""
        self.refusals.append(Refusal(name, reason, remedy))

    def require(self) -> None:
        """Raise with every refusal at once, if there is any."""
        if self.refusals:
            lines = "\n".join(f"  - {r}" for r in self.refusals)
            raise RefusedError(
                f"this network cannot be converted as asked, for {count(len(self.refusals), 'reason')}:\n{lines}",
                tuple(self.refusals),
            )

    def totals(self) -> dict[str, int]:
        """Count how many BatchNorms, layers and heads get which treatment."""
        norms = Counter(n.action for n in self.norms)
        layers = Counter(layer.action for layer in self.layers)
        trained = Counter(layer.centring is not None for layer in self.layers if layer.action == "trained")
        return {
            "batch_norms": len(self.norms),
            "removed": norms["remove"],
            "shifts": norms["shift"],
            "scales": norms["scale"],
            "folded": norms["fold"],
            "affines": norms["affine"],
            "group_norms": norms["group"],
            "left": norms["leave"],
            "centred": layers["centre"] + trained[True],
            "standardised": layers["standardise"],
            "biased": layers["bias"],
            "not_centred": layers["keep"] + trained[False],
            "residual_scalars": norms["scale"] + sum(layer.scale is not None for layer in self.layers),
            "last_norms": len(self.heads),
            "refused": len(self.refusals),
        }

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        lists = {"norms": self.norms, "layers": self.layers, "heads": self.heads, "refusals": self.refusals}
        return {
            "method": settings(self.method),
            "init": self.init,
            "init_why": self.init_why,
            "totals": self.totals(),
            **{key: [dataclasses.asdict(item) for item in items] for key, items in lists.items()},
            "gates": list(self.gates),
            "notes": list(self.notes),
        }

    def rows(self) -> list[tuple[str, ...]]:
        """Return one row per BatchNorm, per layer, per head: name, role, action, fan-in, gain, v, why."""
        return [_row(edit) for edit in (*self.norms, *self.layers, *self.heads)]

    def __str__(self) -> str:
        rows = [_COLUMNS, *self.rows()]
        widths = [max(len(r[i]) for r in rows) for i in range(len(_COLUMNS))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(r, widths, strict=True)).rstrip() for r in rows]
        lines.insert(1, "  ".join("-" * w for w in widths))
        lines += [_LEGEND, "", self._summary()]
        if self.heads:
            names = ", ".join(h.name or "(root)" for h in self.heads)
            lines.append(
                f"last BN: takes the outputs of {names} for class scores that a cross entropy is trained on; for "
                "anything else (regression, a discriminator) use last_norm=False"
            )
        lines += [
            f"logit scale: one learned scalar, from 1, multiplies the normalised outputs of {h.name or '(root)'} "
            f"({h.why}); exempt it from weight decay with mimicnorm.param_groups"
            for h in self.heads
            if h.logit_scale
        ]
        if self.init_why:
            lines.append(f"initial weights: {self.init or 'unchanged'} ({self.init_why})")
        lines += [f"note: {n}" for n in self.notes]
        lines += [f"REFUSED {r}" for r in self.refusals]
        return "\n".join(lines)

    def _summary(self) -> str:
        t = self.totals()
        done = {"standardise": "standardised", "bias": "biased"}.get(self.method.weights, "centred")
        fates = {"removed": "removed", "shifts": "to a shift", "scales": "to a scalar", "left": "left"}
        if self.method.keeps_statistics:
            fates = {"folded": "folded into a layer", "affines": "to an affine map", "left": "left"}
        if t["group_norms"]:
            fates["group_norms"] = "to a GroupNorm"
        listed = ", ".join(f"{t[key]} {fate}" for key, fate in fates.items())
        return (
            f"{self.method.name}: {count(t['batch_norms'], 'BatchNorm')} ({listed}); "
            f"{count(t[done], 'layer')} {done}, {t['not_centred']} not; "
            f"{count(t['residual_scalars'], 'residual scalar')}; {count(t['last_norms'], 'last norm')}"
        )


@dataclass
class Report(Plan):
    """The plan that was carried out, and what an optimizer built before it would miss.

    Attributes:
        new_parameters: (qualified name, parameter) of every trainable parameter that did not exist before.
        moved_parameters: Old key -> new key of betas that live on as, or were added to, a layer's bias or a shift; with
            ``init="keep"`` of all that a BatchNorm had. Under every name that a module is registered by.
    """

    new_parameters: list[tuple[str, Parameter]] = field(default_factory=list)
    moved_parameters: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        return {
            **super().as_dict(),
            "new_parameters": [name for name, _ in self.new_parameters],
            "moved_parameters": dict(self.moved_parameters),
        }


def _row(edit: Edit) -> tuple[str, ...]:
    fan_in = gain = ""
    v = "" if edit.role in ("left", "unused", "head") else f"{edit.v:.4g}"
    action, why = edit.action, edit.why
    if isinstance(edit, LayerEdit):
        fan_in, gain = str(edit.fan_in), f"{edit.gain:.4f}"
        action += ", backward" if action in ("centre", "trained") and edit.centring == "backward" else ""
        action += f" x{edit.scale:.3f}" if edit.scale is not None else ""
        why = f"fed by {edit.fed_by}" + (f"; {why}" if why else "")
    elif isinstance(edit, HeadEdit):
        why = count(edit.outputs, "output") + ", times a learned scale" * edit.logit_scale
    return edit.name or "(root)", f"{edit.kind}, {edit.role}", action, fan_in, gain, v, why


def count(n: int, noun: str) -> str:
    """Return a number with its noun.

    Example:
        >>> count(1, "layer"), count(2, "layer")
        ('1 layer', '2 layers')
    """
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def first_names(names: Sequence[str], most: int = 3) -> str:
    """Return the first names of a list that may be long.

    Example:
        >>> first_names(["a", "b", "c", "d"])
        'a, b, c, ...'
    """
    return ", ".join((*names[:most], *["..."][: len(names) > most]))
