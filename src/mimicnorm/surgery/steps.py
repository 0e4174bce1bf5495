"""A plan as data: one step per BatchNorm, per weight layer, per head; refusals; how it prints."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch.nn import Parameter

from mimicnorm.errors import RefusedError
from mimicnorm.methods import Method, settings

OWN_INIT = "prescribes its starting weights, so there is nothing to calibrate"


@dataclass(frozen=True)
class NormStep:
    """What happens to one BatchNorm.

    Attributes:
        name: Qualified name.
        kind: Its class.
        role: "post" (a layer owns it), "pre" (it stands before the layers), "unused" or "left".
        action: "remove", "shift", "scale", "group" or "leave".
        owner: The layers it normalised, by name.
        keeps: Children that stay (dropout, activation).
        channel_dim: The dimension that its beta lies along.
        scale: Start of the scalar put in its place, for "scale".
        factor: A fixed factor beside that scalar.
        scalar: Whether the shift is a single number (Fixup) in place of its beta.
        groups: Of the GroupNorm put in its place, for "group".
        v: Predicted variance of its input.
        why: One clause.
    """

    name: str
    kind: str
    role: str
    action: str
    owner: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ()
    channel_dim: int = 1
    scale: float | None = None
    v: float | None = None
    why: str = ""
    factor: float = 1.0
    scalar: bool = False
    groups: int | None = None


@dataclass(frozen=True)
class LayerStep:
    """What happens to one weight layer that a BatchNorm touched.

    Attributes:
        name: Qualified name.
        kind: Its class.
        role: "owner" (of a BatchNorm behind or before it), "branch end", "gate" or "head".
        action: "centre", "standardise", "bias" (a scalar before it) or "keep".
        fan_in: Inputs per output.
        fed_by: The activation its input went through.
        gain: Its weights start with standard deviation gain / sqrt(fan_in).
        scale: Start of the residual scalar folded into it, or None.
        v: Predicted variance of its input before the activation.
        beta_from: The BatchNorm whose beta becomes its bias, or None.
        why: One clause.
        factor: What standardised weights are multiplied with.
        output_factor: A fixed factor on the whole output: alpha at the end of a branch.
        learns_gain: Whether it gets a learnable gain per output channel.
        on_raw_input: Whether it reads the model's own input, so that no bias comes before it.
        start: What becomes of its weights: "draw" (by the theory; calibrated from where they are), "scale" (zeros
            stay) or "keep" (frozen).
    """

    name: str
    kind: str
    role: str
    action: str
    fan_in: int
    fed_by: str
    gain: float
    scale: float | None = None
    v: float = 1.0
    beta_from: str | None = None
    why: str = ""
    factor: float = 1.0
    output_factor: float = 1.0
    learns_gain: bool = False
    on_raw_input: bool = False
    start: str = "draw"


@dataclass(frozen=True)
class HeadStep:
    """A module whose output gets a LastNorm."""

    name: str
    kind: str
    outputs: int
    dim: int


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
        init: How the starting weights are set: "theory", "calibrate" or None.
        init_why: Why that one.
        notes: What a reader should know and nothing refuses.
    """

    method: Method
    norms: list[NormStep] = field(default_factory=list)
    layers: list[LayerStep] = field(default_factory=list)
    heads: list[HeadStep] = field(default_factory=list)
    gates: list[str] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    init: str | None = None
    init_why: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether it can be carried out."""
        return not self.refusals

    def require(self) -> None:
        """Raise with every refusal at once, if there is any."""
        if self.refusals:
            lines = "\n".join(f"  - {r}" for r in self.refusals)
            count = len(self.refusals)
            raise RefusedError(
                f"this network cannot be converted as asked, for {count} reason{'s' * (count > 1)}:\n{lines}",
                tuple(self.refusals),
            )

    def totals(self) -> dict[str, int]:
        """How many BatchNorms, layers and heads get which treatment."""
        norms = Counter(n.action for n in self.norms)
        layers = Counter(step.action for step in self.layers)
        return {
            "batch_norms": len(self.norms),
            "removed": norms["remove"],
            "shifts": norms["shift"],
            "scales": norms["scale"],
            "group_norms": norms["group"],
            "left": norms["leave"],
            "centred": layers["centre"],
            "standardised": layers["standardise"],
            "biased": layers["bias"],
            "not_centred": layers["keep"],
            "residual_scalars": norms["scale"] + sum(step.scale is not None for step in self.layers),
            "last_norms": len(self.heads),
            "refused": len(self.refusals),
        }

    def as_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "method": settings(self.method),
            "init": self.init,
            "init_why": self.init_why,
            "totals": self.totals(),
            "norms": [dataclasses.asdict(n) for n in self.norms],
            "layers": [dataclasses.asdict(step) for step in self.layers],
            "heads": [dataclasses.asdict(h) for h in self.heads],
            "gates": list(self.gates),
            "refusals": [dataclasses.asdict(r) for r in self.refusals],
            "notes": list(self.notes),
        }

    def rows(self) -> list[tuple[str, ...]]:
        """One line per BatchNorm, per layer, per head: name, role, action, fan-in, gain, v, why."""
        lines: list[tuple[str, ...]] = []
        for n in self.norms:
            v = "" if n.v is None else f"{n.v:.4g}"
            lines.append((n.name or "(root)", f"{n.kind}, {n.role}", n.action, "", "", v, n.why))
        for step in self.layers:
            action = step.action + (f" x{step.scale:.3f}" if step.scale is not None else "")
            why = f"fed by {step.fed_by}" + (f"; {step.why}" if step.why else "")
            row = (step.name, f"{step.kind}, {step.role}", action, str(step.fan_in), f"{step.gain:.4f}")
            lines.append((*row, f"{step.v:.4g}", why))
        for h in self.heads:
            lines.append((h.name or "(root)", f"{h.kind}, head", "last norm", "", "", "", count(h.outputs, "output")))
        return lines

    def __str__(self) -> str:
        header = ("module", "kind and role", "action", "fan-in", "gain", "v", "why")
        rows = [header, *self.rows()]
        widths = [max(len(r[i]) for r in rows) for i in range(len(header))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(r, widths, strict=True)).rstrip() for r in rows]
        lines.insert(1, "  ".join("-" * w for w in widths))
        t = self.totals()
        done = {"standardise": "standardised", "bias": "biased"}.get(self.method.weights, "centred")
        grouped = f"{t['group_norms']} to a GroupNorm, " if t["group_norms"] else ""
        lines.append("")
        lines.append(
            f"{self.method.name}: {count(t['batch_norms'], 'BatchNorm')} ({t['removed']} removed, "
            f"{t['shifts']} to a shift, {t['scales']} to a scalar, "
            f"{grouped}{t['left']} left); "
            f"{count(t[done], 'layer')} {done}, {t['not_centred']} not; "
            f"{count(t['residual_scalars'], 'residual scalar')}; {count(t['last_norms'], 'last norm')}"
        )
        if self.heads:
            names = ", ".join(h.name or "(root)" for h in self.heads)
            lines.append(
                f"last BN: takes the outputs of {names} for class scores that a cross entropy is trained on; for "
                "anything else (regression, a discriminator) use last_norm=False"
            )
        if self.init_why:
            lines.append(f"starting weights: {self.init} ({self.init_why})")
        lines += [f"note: {n}" for n in self.notes]
        lines += [f"REFUSED {r}" for r in self.refusals]
        return "\n".join(lines)


@dataclass
class Report(Plan):
    """The plan that was carried out, and what an optimizer built before it would miss.

    Attributes:
        new_parameters: (qualified name, parameter) of every trainable parameter that did not exist before.
        moved_parameters: Old key -> new key of betas that live on as, or were added to, a layer's bias or a shift.
    """

    new_parameters: list[tuple[str, Parameter]] = field(default_factory=list)
    moved_parameters: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            **super().as_dict(),
            "new_parameters": [name for name, _ in self.new_parameters],
            "moved_parameters": dict(self.moved_parameters),
        }


def count(n: int, noun: str) -> str:
    """A number with its noun.

    Example:
        >>> count(1, "layer"), count(2, "layer")
        ('1 layer', '2 layers')
    """
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def few(names: list[str]) -> str:
    """The first names of a list that may be long."""
    return ", ".join((*names[:3], *["..."][: len(names) > 3]))
