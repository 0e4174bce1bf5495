"""``mimicnorm theory``: the paper's theory, running."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Theory:
    """Print the gain and the stability of every activation the theory knows."""

    def run(self) -> None:
        """Tabulate gains, slopes and drift."""
        from rich.console import Console
        from rich.table import Table

        from mimicnorm.theory import activations

        table = Table("activation", "gain", "chi_1", "Tbar'(0)", "dV/dq", title="At the weight-mean gain")
        for name in activations.names():
            stats = activations.activation_stats(name)
            cells = (1 / stats.sd, stats.chi1, stats.tbar_slope_at_zero, stats.variance_slope)
            table.add_row(name, *(f"{value:.4f}" for value in cells))
        Console().print(table)
