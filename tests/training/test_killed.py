"""Runs that are killed anywhere end as if they had not been, bit for bit."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
import tiny


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple[tuple, int]:
    out = tmp_path_factory.mktemp("undisturbed")
    assert tiny.in_a_process(tiny.killed_after, 10**9, out) == 0
    return tiny.outcome(out), int((out / "lines").read_text())


@pytest.mark.parametrize("chain", range(4))
def test_killed_at_random_lines_and_started_again(undisturbed, chain, tmp_path: Path):
    wanted, lines = undisturbed
    draw = random.Random(chain)
    for _ in range(5):
        assert tiny.in_a_process(tiny.killed_after, draw.randrange(1, lines // 5), tmp_path) == -signal.SIGKILL
    assert tiny.in_a_process(tiny.train, tmp_path) == 0
    assert tiny.outcome(tmp_path) == wanted


@pytest.mark.parametrize(("number", "part"), [(1, 0.5), (3, 0.0), (4, 1.0), (5, 2.0)])
def test_killed_while_a_checkpoint_is_written(undisturbed, number, part, tmp_path: Path):
    assert tiny.in_a_process(tiny.killed_in_write, number, part, tmp_path) == -signal.SIGKILL
    assert list(tmp_path.glob("checkpoints/.*.partial"))
    assert len(list(tmp_path.glob("checkpoints/step-*"))) == min(number - 1, 2)
    assert tiny.in_a_process(tiny.train, tmp_path) == 0
    assert not list(tmp_path.glob("checkpoints/.*.partial"))
    assert tiny.outcome(tmp_path) == undisturbed[0]
