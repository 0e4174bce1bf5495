"""Top-1, top-5 and loss on a test set, in eval mode, shared out over the processes."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from mimicnorm.data import Source
from mimicnorm.layers import LastNorm
from mimicnorm.training.step import Trainer


def evaluate(trainer: Trainer, source: Source) -> dict[str, float | None]:
    """The network's loss and accuracies (parts of 1) on all images of a source; a loss that is not finite is None."""
    recipe, processes, model = trainer.recipe, trainer.processes, trainer.bare
    processes.copy_from_main(*model.buffers())
    batches = torch.arange(len(source)).split(recipe.micro_batch or recipe.batch)
    shares = [s for s in map(processes.share, batches) if len(s)]
    sums = torch.zeros(3, dtype=torch.float64, device=processes.device)
    model.eval()
    try:
        with torch.no_grad(), trainer.autocast():
            found = source.batches(shares, seed=recipe.seed, epoch=0, augment=False, device=processes.device)
            for images, labels in found:
                logits = model(images.to(memory_format=trainer.format)).float()
                best = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
                loss = F.cross_entropy(logits, labels, reduction="sum")
                sums += torch.stack([loss.double(), best[:, 0].sum().double(), best.sum().double()])
    finally:
        model.train()
    loss, top1, top5 = (processes.sum(sums) / len(source)).tolist()
    return {"test_loss": loss if math.isfinite(loss) else None, "top1": top1, "top5": top5}


def last_norm_variance(trainer: Trainer) -> torch.Tensor | None:
    """The running variance of each class's logits in the last BN (the paper's Appendix B.2), if there is one."""
    found = [m for m in trainer.bare.modules() if isinstance(m, LastNorm)]
    return found[0].running_var if found else None
