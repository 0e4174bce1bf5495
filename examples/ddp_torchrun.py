"""Several processes, by DistributedDataParallel.

torchrun --nproc-per-node 2 examples/ddp_torchrun.py --epochs 5

The last BN normalises over the batch of all processes together, so the result is that of one process with the whole
batch. Nothing but the logits is exchanged in the forward pass.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from digits import accuracy, digits
from small_resnet import small_resnet
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import mimicnorm as mn


def main(epochs: int = 5, batch_size: int = 64, lr: float = 0.1) -> None:
    """Train; the first process prints the accuracy on the test set."""
    dist.init_process_group("gloo")  # "nccl" on GPUs
    torch.manual_seed(0)  # the same initial weights everywhere
    train, test = digits()
    sampler = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, batch_size // dist.get_world_size(), sampler=sampler, drop_last=True)

    model = small_resnet(num_classes=10, in_channels=1)
    mn.convert_(model, mn.MimicNorm(), example=(2, 1, 8, 8))  # first convert, then wrap
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(mn.param_groups(model, weight_decay=5e-4), lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=epochs * len(loader))

    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(parallel(images), labels).backward()
            optimizer.step()
            schedule.step()
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} processes, test accuracy {accuracy(model, test):.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="of all processes together")
    parser.add_argument("--lr", type=float, default=0.1)
    main(**vars(parser.parse_args()))
