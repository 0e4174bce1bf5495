from __future__ import annotations

import math

import pytest
import small
import torch

from mimicnorm.compare import largest_lr as module
from mimicnorm.compare.largest_lr import largest_lr
from mimicnorm.training.loop import load
from mimicnorm.training.processes import Processes

JOB = small.job("batchnorm,nonorm", lr=0.1)


@pytest.mark.parametrize(
    ("limit", "found"), [(0.5, 0.4), (0.6, 0.4 * math.sqrt(2)), (0.03, 0.025), (0.04, 0.025 * math.sqrt(2))]
)
def test_the_search_ends_within_a_factor_of_the_limit(monkeypatch, limit, found):
    monkeypatch.setattr(module, "_trains", lambda job, contestant, source, processes, lr, steps: lr <= limit)
    assert largest_lr(JOB, JOB.contestants[0], None, None)["value"] == pytest.approx(found)


def test_never_and_always_stable_are_said(monkeypatch):
    monkeypatch.setattr(module, "_trains", lambda *_: False)
    assert "unstable from 0.1 down to" in largest_lr(JOB, JOB.contestants[0], None, None)["why_not"]
    monkeypatch.setattr(module, "_trains", lambda *_: True)
    assert largest_lr(JOB, JOB.contestants[0], None, None)["at_least"]


def test_a_real_run_is_stable_at_a_small_rate_and_not_at_an_absurd_one():
    source, _ = load(JOB.recipe)
    cpu = Processes(torch.device("cpu"))
    assert module._trains(JOB, JOB.contestants[0], source, cpu, 0.05, 15)
    assert not module._trains(JOB, JOB.contestants[1], source, cpu, 1e20, 15)
