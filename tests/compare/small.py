"""A comparison that takes seconds: a narrow ResNet, 48 images of digits, one epoch."""

from __future__ import annotations

from typing import Any

from mimicnorm.compare import Job, base_recipe, entries


def job(methods: str = "batchnorm,mimicnorm,nonorm:1", seeds: int = 2, rounds: int = 5, **changes: Any) -> Job:
    fields = {"limit": 48, "test_limit": 40, "batch": 16, "epochs": 1, "width": 0.125, **changes}
    return Job(base_recipe("digits", **fields), entries(methods, seeds), rounds, command="mimicnorm compare --seeds 2")
