from __future__ import annotations

import dataclasses
import math

import pytest
import small
import torch

from mimicnorm.compare import largest_lr as module
from mimicnorm.compare.largest_lr import largest_lr
from mimicnorm.training import network
from mimicnorm.training.loop import load
from mimicnorm.training.processes import Processes
from mimicnorm.training.step import learning_rate

JOB = small.job("batchnorm,nonorm", lr=0.1)
BATCHNORM, NONORM = (JOB.run_recipe(entry) for entry in JOB.entries)
CPU = Processes(torch.device("cpu"))


@pytest.mark.parametrize(
    ("limit", "expected"), [(0.5, 0.4), (0.6, 0.4 * math.sqrt(2)), (0.03, 0.025), (0.04, 0.025 * math.sqrt(2))]
)
def test_the_search_ends_within_a_factor_of_the_limit(monkeypatch, limit, expected):
    monkeypatch.setattr(module, "network", lambda *_: None)
    monkeypatch.setattr(module, "_trains", lambda recipe, *_: recipe.lr <= limit)
    assert largest_lr(BATCHNORM, None, CPU)["value"] == pytest.approx(expected)


def test_the_rate_is_not_annealed_during_the_search(monkeypatch):
    class Built(Exception):
        pass

    def noted(recipe, *_):
        raise Built(recipe)

    monkeypatch.setattr(module, "Trainer", noted)
    with pytest.raises(Built) as caught:
        module._trains(dataclasses.replace(BATCHNORM, schedule="cosine"), None, range(100), CPU, 10)
    assert learning_rate(caught.value.args[0], 9, 10) == 0.1


def test_never_and_always_stable(monkeypatch):
    built = []
    monkeypatch.setattr(module, "network", lambda *args: built.append(args))
    monkeypatch.setattr(module, "_trains", lambda *_: False)
    assert "unstable from 0.1 down to" in largest_lr(BATCHNORM, None, CPU)["why_not"]
    monkeypatch.setattr(module, "_trains", lambda *_: True)
    assert largest_lr(BATCHNORM, None, CPU)["at_least"]
    assert len(built) == 2  # once in each search


def test_a_real_run_is_stable_at_a_small_rate_and_not_at_an_absurd_one():
    source, _ = load(JOB.recipe)
    for recipe, lr, stable in ((BATCHNORM, 0.05, True), (NONORM, 1e20, False)):
        recipe = dataclasses.replace(recipe, lr=lr)
        assert module._trains(recipe, network(recipe, source), source, CPU, 15) == stable
