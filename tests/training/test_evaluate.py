"""Loss, accuracy, confidence and calibration: against the definitions, and a case worked out by hand."""

from __future__ import annotations

import pytest
import tiny
import torch
import torch.nn.functional as F
from torch import nn

from mimicnorm.training.evaluate import by_confidence, calibration_error, evaluate


def test_evaluation_sees_the_whole_set_once_in_eval_mode():
    t = tiny.trainer(batch=7, method="batchnorm")  # 24 images: the last batch is smaller
    nn.init.normal_(t.bare[9].weight, 0.0, 1.0)  # so that confidences fall into several bins
    before = {k: v.clone() for k, v in t.bare.state_dict().items()}
    measured = evaluate(t, tiny.SOURCES[1])
    assert t.bare.training
    assert all(torch.equal(v, before[k]) for k, v in t.bare.state_dict().items())
    images, labels = next(tiny.SOURCES[1].batches([torch.arange(24)], seed=0, epoch=0, augment=False))
    with torch.no_grad():
        logits = t.bare.eval()(images)
    assert measured["top1"] == pytest.approx(float((logits.argmax(1) == labels).float().mean()))
    assert measured["top5"] == 1.0
    torch.testing.assert_close(measured["test_loss"], float(F.cross_entropy(logits, labels)), rtol=1e-5, atol=1e-6)
    confidence = logits.softmax(1).amax(1)
    assert measured["confidence"] == pytest.approx(float(confidence.mean()))
    right = logits.argmax(1) == labels
    gaps = []
    for b in range(15):
        inside = (confidence > b / 15) & (confidence <= (b + 1) / 15)
        if inside.any():
            gaps.append(float(inside.float().mean() * (right[inside].float().mean() - confidence[inside].mean()).abs()))
    assert len(gaps) > 1
    assert measured["calibration_error"] == pytest.approx(sum(gaps), abs=1e-6)


def test_numbers_that_are_not_finite_are_none():
    t = tiny.trainer(method="nonorm")
    nn.init.constant_(t.bare[9].weight, float("nan"))
    measured = evaluate(t, tiny.SOURCES[1])
    assert {name for name, value in measured.items() if value is None} == {
        "test_loss",
        "confidence",
        "calibration_error",
    }


def test_calibration_by_hand():
    """Five predictions in three of the bins; the numbers are worked out below."""
    sure = [0.5, 0.55, 0.9, 0.95, 0.99]
    logits = torch.tensor([[p, 1 - p] for p in sure]).log()
    bins = by_confidence(logits, torch.tensor([1, 0, 0, 1, 0]))  # 0.5 is a tie: class 0 is predicted, and is wrong
    # 0.5 is in (7/15, 8/15], 0.55 in (8/15, 9/15], 0.9 in (13/15, 14/15], 0.95 and 0.99 above 14/15
    expected = torch.zeros(15, 3)
    expected[7] = torch.tensor([1, 0, 0.5])
    expected[8] = torch.tensor([1, 1, 0.55])
    expected[13] = torch.tensor([1, 1, 0.9])
    expected[14] = torch.tensor([2, 1, 1.94])
    torch.testing.assert_close(bins, expected)
    assert calibration_error(bins) == pytest.approx((0.5 + 0.45 + 0.1 + 0.94) / 5)
