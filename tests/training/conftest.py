"""Let the tests here import their small network and data, and share one finished run."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [path for path in (str(HERE.parent), str(HERE)) if path not in sys.path]


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    """The folder of a run that nobody disturbed; ``lines`` in it is how many lines of the training code it took."""
    import tiny

    out = tmp_path_factory.mktemp("finished")
    assert tiny.in_a_process(tiny.killed_after, 10**9, out) == 0
    return out
