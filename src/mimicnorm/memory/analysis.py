"""What one training step costs in memory, as numbers and as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mimicnorm.errors import MemoryPredictionError
from mimicnorm.memory.tracker import Moment
from mimicnorm.memory.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

LOSS = "(loss)"
ROOT = "(model)"


@dataclass(frozen=True)
class Analysis:
    """The memory of one training step; all amounts are bytes."""

    batch: int
    saved_bytes: int
    """What autograd keeps from the forward for the backward pass, each storage once. Parameters, buffers and the
    input batch are apart: they are there anyway, saved or not."""
    parameters: int
    buffers: int
    inputs: int
    """The call arguments of the model."""
    gradients: int
    optimizer_state: int
    timeline: tuple[Moment, ...]
    """What was alive at each operation of the step."""
    saved_by_module: Mapping[str, int]
    device: str = "cpu"
    """The type of the device that the prediction is for."""
    micro_batch: int | None = None
    """The samples that run at once, where that is not the whole batch: ``saved_bytes`` is theirs."""

    @property
    def setting(self) -> str:
        """Batch and device, for a title."""
        pieces = "" if self.micro_batch is None else f" in micro-batches of {self.micro_batch}"
        return f"batch {self.batch}{pieces}, on {self.device}"

    @property
    def peak(self) -> Moment:
        """The moment at which most is alive."""
        return max(self.timeline, key=lambda moment: moment.total)

    @property
    def peak_bytes(self) -> int:
        """The most that is alive at once over forward pass, backward pass and optimizer step."""
        return self.peak.total

    @property
    def saved_bytes_per_sample(self) -> float:
        """Saved bytes over the samples that run at once."""
        return self.saved_bytes / (self.micro_batch or self.batch)

    def by_module(self, depth: int | None = None) -> dict[str, int]:
        """Split ``saved_bytes`` over the modules that saved them, the largest first.

        A storage belongs to the module in whose forward it was saved first; what the model saves outside of
        any of its parts is under ``"(model)"``, the loss under ``"(loss)"``. The sum is ``saved_bytes``.

        Args:
            depth: Keep that many parts of the qualified names and add up what is below; at 0 there is one sum.

        Example:
            >>> import torch
            >>> from mimicnorm import memory
            >>> net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
            >>> memory.measure(net, (4, 8)).by_module()["1"]
            128
        """
        _require_whole("depth", depth)
        sums: dict[str, int] = {}
        for name, count in self.saved_by_module.items():
            shown = ".".join(name.split(".")[:depth]) or ROOT
            sums[shown] = sums.get(shown, 0) + count
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def table(self) -> Table:
        """Lay the amounts out as a rich table."""
        from rich.table import Table

        table = Table(title=f"Memory of one training step, {self.setting}")
        table.add_column("what")
        table.add_column("memory", justify="right")
        table.add_column("at the peak", justify="right")
        peak = self.peak
        table.add_row(
            "parameters and buffers", format_bytes(self.parameters + self.buffers), format_bytes(peak.parameters)
        )
        table.add_row("inputs", format_bytes(self.inputs), format_bytes(peak.inputs))
        table.add_row("gradients", format_bytes(self.gradients), format_bytes(peak.gradients))
        table.add_row("optimizer state", format_bytes(self.optimizer_state), format_bytes(peak.optimizer_state))
        table.add_row("saved for backward", format_bytes(self.saved_bytes), format_bytes(peak.activations))
        table.add_row("  per sample", format_bytes(round(self.saved_bytes_per_sample)), "")
        table.add_row("temporary", "", format_bytes(peak.temporary))
        table.add_row(f"peak (in the {peak.phase})", "", format_bytes(peak.total), style="bold")
        table.caption, table.caption_justify = "\n".join(not_counted(self.device)) or None, "left"
        return table

    def module_table(self, depth: int | None = None, rows: int = 30) -> Table:
        """Lay out where the saved bytes are, the largest modules first."""
        from rich.table import Table

        _require_whole("rows", rows)
        table = Table(title=f"Saved for backward by module, {self.setting}")
        table.add_column("module")
        table.add_column("memory", justify="right")
        table.add_column("share", justify="right")
        modules = list(self.by_module(depth).items())
        shown, rest = modules[:rows], modules[rows:]
        if rest:
            shown.append((f"({len(rest)} more)", sum(count for _, count in rest)))
        for name, count in shown:
            table.add_row(name, format_bytes(count), f"{count / max(self.saved_bytes, 1):.1%}")
        return table

    def as_dict(self) -> dict[str, Any]:
        """Return everything but the timeline in JSON's types."""
        return {
            "device": self.device,
            "batch": self.batch,
            "micro_batch": self.micro_batch,
            "saved_bytes": self.saved_bytes,
            "peak_bytes": self.peak_bytes,
            "peak": asdict(self.peak),
            "parameters": self.parameters,
            "buffers": self.buffers,
            "inputs": self.inputs,
            "gradients": self.gradients,
            "optimizer_state": self.optimizer_state,
            "by_module": self.by_module(),
        }

    def __str__(self) -> str:
        """Render the table as plain text."""
        return as_text(self.table())


def not_counted(device: str) -> list[str]:
    """What a prediction leaves out that a reader may miss, by device."""
    if device == "cpu":
        return []
    return [f"workspaces inside the kernels of {device} (cuDNN's convolutions) are not counted"]


def _require_whole(name: str, given: Any) -> None:
    if given is not None and (not isinstance(given, int) or given < 0):
        raise MemoryPredictionError(f"{name}={given!r}: give a whole number from 0 on")


def as_text(table: Table) -> str:
    """Render a rich table without colours or the terminal's width."""
    from rich.console import Console

    console = Console(width=120, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(table)
    return captured.get()
