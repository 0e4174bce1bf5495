"""Evaluation: every image once, in eval mode, with nothing left behind."""

from __future__ import annotations

import tiny
import torch
import torch.nn.functional as F
from torch import nn

from mimicnorm.training.build import network
from mimicnorm.training.evaluate import evaluate, last_norm_variance
from mimicnorm.training.processes import Processes
from mimicnorm.training.step import Trainer


def trainer(**changes) -> Trainer:
    r = tiny.recipe(**changes)
    return Trainer(r, network(r, tiny.SOURCES[0]), Processes(torch.device("cpu")), 7)


def test_loss_and_accuracies_are_those_of_the_whole_set():
    t = trainer(batch=7)  # 24 images: the last batch is smaller
    before = {k: v.clone() for k, v in t.bare.state_dict().items()}
    found = evaluate(t, tiny.SOURCES[1])
    assert t.bare.training
    assert all(torch.equal(v, before[k]) for k, v in t.bare.state_dict().items())
    images, labels = next(tiny.SOURCES[1].batches([torch.arange(24)], seed=0, epoch=0, augment=False))
    with torch.no_grad():
        logits = t.bare.eval()(images)
    assert found["top1"] == float((logits.argmax(1) == labels).float().mean())
    assert found["top5"] == 1.0
    torch.testing.assert_close(found["test_loss"], float(F.cross_entropy(logits, labels)), rtol=1e-5, atol=1e-6)


def test_a_loss_that_is_no_number_is_none():
    t = trainer(method="nonorm")
    nn.init.constant_(t.bare[9].weight, float("nan"))
    assert evaluate(t, tiny.SOURCES[1])["test_loss"] is None


def test_the_last_norms_variance_if_there_is_one():
    variance = last_norm_variance(trainer())
    assert variance is not None
    assert variance.shape == (4,)
    assert last_norm_variance(trainer(method="nonorm")) is None
