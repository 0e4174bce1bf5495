"""What every test shares: one thread, the examples of README and docs, names for the docstrings' examples."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Some CPUs announce matrix units that trap when used for bf16; said before torch loads.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

sys.path.insert(0, str(Path(__file__).parent / "tests"))

torch.set_num_threads(1)  # two test processes share two cores


def _documents(namespace: dict) -> None:
    import zoo

    zoo.timm()  # README imports torchvision, which needs the shim here
    namespace["torch"] = torch


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["README.md", "docs/*.md"],
    setup=_documents,
).pytest()


@pytest.fixture(autouse=True)
def _names(doctest_namespace: dict) -> None:
    doctest_namespace.update(torch=torch, nn=torch.nn)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
