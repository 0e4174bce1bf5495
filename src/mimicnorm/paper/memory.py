"""The memory columns of Tables 1 and 3: predicted peaks of a step, full-size networks at the paper's batch sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from mimicnorm import memory, models
from mimicnorm.paper.published import BATCHES, Cell
from mimicnorm.paper.scales import Runs, Setting
from mimicnorm.paper.tables import accuracies

MIB = 2**20


@functools.cache
def predicted(data: str, network: str, methods: tuple[str, ...]) -> dict[str, float]:
    """Return the peak of a step in MiB, by method, of a network at full width; nothing is allocated."""
    small = data == "cifar100"
    model = models.build(network, input="cifar" if small else "imagenet")
    pixels = 32 if small else 224
    result = memory.compare(model, (BATCHES[data].get(network, 256), 3, pixels, pixels), methods)
    return {method: analysis.peak_bytes / MIB for method, analysis in result.analyses.items()}


def with_memory(
    data: str, published: Mapping[str, Mapping[str, Cell]]
) -> Callable[[Runs, Setting], list[dict[str, Any]]]:
    """Return a reducer that adds ``peak_mib`` to a table's accuracies, and rows for cells without runs.

    BatchNorm's and the plain network's memory are there for every network, since claims compare with them.
    """

    def reducer(runs: Runs, _setting: Setting) -> list[dict[str, Any]]:
        made = {(row["network"], row["method"]): row for row in accuracies(runs)}
        for network, cells in published.items():
            methods = tuple(dict.fromkeys((*cells, "nonorm")))
            for method, peak in predicted(data, network, methods).items():
                empty = {"network": network, "method": method, "top1": [], "diverged": 0}
                made.setdefault((network, method), empty)["peak_mib"] = peak
        return list(made.values())

    return reducer
