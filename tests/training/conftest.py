"""Let the tests here import their small network and data, and run it on one thread."""

import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path[:0] = [path for path in (str(HERE.parent), str(HERE)) if path not in sys.path]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
