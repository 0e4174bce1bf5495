from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import small

from mimicnorm.compare import run


@pytest.fixture(scope="session")
def compared(tmp_path_factory):
    """The folder of a finished comparison, and what it holds."""
    out = tmp_path_factory.mktemp("compared")
    run(small.job(), out, progress=False)
    return out, json.loads((out / "compare.json").read_text())
