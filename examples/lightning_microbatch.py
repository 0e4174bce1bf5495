"""Lightning with exact micro-batches: the gradient of 128 samples with the memory of 16.

python examples/lightning_microbatch.py --epochs 5

Lightning's ``accumulate_grad_batches`` would normalise the logits of each small batch by themselves. With manual
optimisation ``mn.microbatch.backward`` does the backward pass.
"""

from __future__ import annotations

import argparse

import lightning
import torch
from digits import accuracy, digits
from small_resnet import small_resnet
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import mimicnorm as mn


class Classifier(lightning.LightningModule):
    """A converted network and its training step."""

    def __init__(self, lr: float = 0.2, micro_batch: int = 16):
        super().__init__()
        self.automatic_optimization = False
        self.lr, self.micro_batch = lr, micro_batch
        self.model = small_resnet(num_classes=10, in_channels=1)
        mn.convert_(self.model, mn.MimicNorm(), example=(2, 1, 8, 8))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """One step of the optimizer; the batch may be larger than memory allows."""
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = mn.microbatch.backward(self.model, cross_entropy, *batch, micro_batch=self.micro_batch)
        optimizer.step()
        self.lr_schedulers().step()
        self.log("loss", loss)

    def configure_optimizers(self) -> dict:
        """SGD, one cycle."""
        optimizer = torch.optim.SGD(mn.param_groups(self.model, weight_decay=5e-4), self.lr, momentum=0.9)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def main(epochs: int = 5, batch_size: int = 128, micro_batch: int = 16) -> float:
    """Train; return the accuracy on the test set."""
    lightning.seed_everything(0)
    train, test = digits()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_epochs=epochs, accelerator="cpu", devices=1, **quiet)
    classifier = Classifier(micro_batch=micro_batch)
    trainer.fit(classifier, DataLoader(train, batch_size, shuffle=True, drop_last=True))
    print(f"test accuracy {accuracy(classifier.model, test):.3f}")
    return accuracy(classifier.model, test)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--micro-batch", type=int, default=16)
    main(**vars(parser.parse_args()))
