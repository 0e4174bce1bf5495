"""What a network answers on images it was not trained on: loss, accuracy, confidence, calibration."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from mimicnorm.data import Source
from mimicnorm.training.step import Trainer

BINS = 15


def evaluate(trainer: Trainer, source: Source) -> dict[str, float | None]:
    """Measure a network on all images of a source, in eval mode.

    Returns:
        test_loss: mean cross entropy.
        top1, top5: fractions.
        confidence: mean probability (softmax) of the predicted class.
        calibration_error: see `calibration_error`.

        Numbers that are not finite are None.
    """
    recipe, processes, model = trainer.recipe, trainer.processes, trainer.bare
    processes.copy_from_main(*model.buffers())
    batches = torch.arange(len(source)).split(recipe.micro_batch or recipe.batch)
    shares = [share for share in map(processes.share, batches) if len(share)]
    sums = [torch.zeros(2, device=processes.device)]
    bins = [torch.zeros(BINS, 3, device=processes.device)]
    model.eval()
    try:
        with torch.no_grad(), trainer.autocast():
            given = source.batches(shares, seed=recipe.seed, epoch=0, augment=False, device=processes.device)
            for images, labels in given:
                logits = trainer.predict(images)
                top5 = (logits.topk(min(5, logits.shape[1])).indices == labels[:, None]).sum()
                sums.append(torch.stack([F.cross_entropy(logits, labels, reduction="sum"), top5.float()]))
                bins.append(by_confidence(logits, labels))
    finally:
        model.train()
    loss, top5 = (processes.sum(torch.stack(sums).cpu().double().sum(0)) / len(source)).tolist()
    binned = processes.sum(torch.stack(bins).cpu().double().sum(0))
    _, right, confidence = (binned.sum(0) / len(source)).tolist()
    measured = {"test_loss": loss, "top1": right, "top5": top5, "confidence": confidence}
    measured["calibration_error"] = calibration_error(binned)
    return {name: value if math.isfinite(value) else None for name, value in measured.items()}


def by_confidence(logits: Tensor, labels: Tensor) -> Tensor:
    """Sort predictions into 15 bins of equal width by their confidence, the probability of the predicted class.

    Bin b of 0 to 14 holds confidences above b / 15 up to (b + 1) / 15.

    Returns:
        (15, 3): for each bin the predictions, the right ones, and the sum of their confidences.
    """
    with torch.autocast(logits.device.type, enabled=False):
        confidence, predicted = logits.float().softmax(1).amax(1), logits.argmax(1)
        number = ((confidence * BINS).ceil().long() - 1).clamp(0, BINS - 1)
        counted = torch.stack([torch.ones_like(confidence), (predicted == labels).float(), confidence], 1)
        return F.one_hot(number, BINS).float().T @ counted


def calibration_error(bins: Tensor) -> float:
    """Return the expected calibration error: |accuracy - mean confidence| of each bin, weighted by its share of images.

    With n_b predictions in bin b, r_b of them right and c_b the sum of their confidences, that is
    sum_b n_b / n * |r_b / n_b - c_b / n_b| = sum_b |r_b - c_b| / n (Guo et al. 2017, equation 3).

    Args:
        bins: As `by_confidence` gives them, summed over batches.

    Example:
        >>> logits = torch.tensor([[0.75, 0.25], [0.75, 0.25]]).log()  # twice 75 % sure of class 0, once right
        >>> round(calibration_error(by_confidence(logits, torch.tensor([0, 1]))), 6)
        0.25
    """
    count, right, confidence = bins.double().unbind(1)
    return float((right - confidence).abs().sum() / count.sum())
