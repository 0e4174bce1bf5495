"""What one training step costs in memory, as numbers and as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mimicnorm.arguments import positive_int
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
    """What autograd saves for backward, each storage once. Parameters, buffers and the input batch do not count: they
    are there anyway, saved or not."""
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
    activation_bits: int | None = None
    """The bits that activations are saved in, where that is not as PyTorch does."""

    @property
    def setting(self) -> str:
        """Batch and device, for a title."""
        pieces = "" if self.micro_batch is None else f" in micro-batches of {self.micro_batch}"
        bits = "" if self.activation_bits is None else f", activations in {self.activation_bits} bits"
        return f"batch {self.batch}{pieces}{bits}, on {self.device}"

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
        if depth is not None:
            depth = positive_int(depth, "depth", least=0, error=MemoryPredictionError)
        sums: Counter[str] = Counter()
        for name, count in self.saved_by_module.items():
            sums[".".join(name.split(".")[:depth]) or ROOT] += count
        return dict(sums.most_common())

    def table(self) -> Table:
        """Return a rich table of the amounts, over the whole step and at its peak."""
        peak = self.peak
        table = new_table(f"Memory of one training step, {self.setting}", ["what", "memory", "at the peak"])
        for what, amount, at_peak in (
            ("parameters and buffers", self.parameters + self.buffers, peak.parameters),
            ("inputs", self.inputs, peak.inputs),
            ("gradients", self.gradients, peak.gradients),
            ("optimizer state", self.optimizer_state, peak.optimizer_state),
            ("saved for backward", self.saved_bytes, peak.activations),
            ("  per sample", round(self.saved_bytes_per_sample), None),
            ("temporary", None, peak.temporary),
        ):
            table.add_row(what, *("" if count is None else format_bytes(count) for count in (amount, at_peak)))
        table.add_row(f"peak (in the {peak.phase})", "", format_bytes(peak.total), style="bold")
        table.caption = "\n".join(not_counted(self.device)) or None
        return table

    def module_table(self, depth: int | None = None, rows: int = 30) -> Table:
        """Return a rich table of where the saved bytes are, the largest modules first."""
        rows = positive_int(rows, "rows", least=0, error=MemoryPredictionError)
        table = new_table(f"Saved for backward by module, {self.setting}", ["module", "memory", "share"])
        modules = list(self.by_module(depth).items())
        shown, rest = modules[:rows], modules[rows:]
        if rest:
            shown.append((f"({len(rest)} more)", sum(count for _, count in rest)))
        for name, count in shown:
            table.add_row(name, format_bytes(count), f"{count / max(self.saved_bytes, 1):.1%}")
        return table

    def as_dict(self) -> dict[str, Any]:
        """Return everything except the timeline in JSON's types."""
        amounts = {name: value for name, value in vars(self).items() if name not in ("timeline", "saved_by_module")}
        return {**amounts, "peak_bytes": self.peak_bytes, "peak": asdict(self.peak), "by_module": self.by_module()}

    def __str__(self) -> str:
        """Return the table as plain text."""
        return as_text(self.table())


def not_counted(device: str) -> list[str]:
    """Return what a prediction for a device leaves out, in lines."""
    if device == "cpu":
        return []
    return [f"workspaces inside the kernels of {device} (cuDNN's convolutions) are not counted"]


def new_table(title: str, headings: Sequence[str]) -> Table:
    """Return an empty rich table whose first column is text and whose others are numbers."""
    from rich.table import Table

    table = Table(title=title, caption_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    return table


def as_text(table: Table) -> str:
    """Return a rich table as text, without colours and of a fixed width."""
    from rich.console import Console

    console = Console(width=120, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(table)
    return captured.get()
