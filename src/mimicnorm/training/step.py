"""One step of SGD, in any precision, whole or in micro-batches, on one process or many."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mimicnorm import microbatch
from mimicnorm.errors import CheckpointError, MicroBatchError, NonFiniteError
from mimicnorm.methods import method
from mimicnorm.training.processes import Processes
from mimicnorm.training.recipes import Recipe
from mimicnorm.training.schedule import learning_rate, mixed_seed

_DDP = inspect.signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _DDP else "broadcast_buffers"  # by torch's version
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Trainer:
    """A network with all that moves it: optimizer, gradient scaler, learning rate.

    Attributes:
        bare: The network itself, neither wrapped nor compiled: what is evaluated and saved.
    """

    def __init__(self, recipe: Recipe, model: nn.Module, processes: Processes, steps_per_epoch: int):
        self.recipe, self.processes, self.steps_per_epoch = recipe, processes, steps_per_epoch
        last = recipe.channels_last and not (processes.device.type == "cpu" and _would_crash(model))
        self.format = torch.channels_last if last else torch.contiguous_format
        self.bare = model.to(processes.device).to(memory_format=self.format).train()  # pyrefly: ignore
        self.optimizer = optimizer(recipe, model.parameters())
        self.scaler = torch.amp.GradScaler(processes.device.type, enabled=recipe.precision == "fp16")
        wrapped = self.bare
        if processes.size > 1:  # statistics differ only in BatchNorms; evaluation takes the main process's
            ids = [processes.device] if processes.device.type == "cuda" else None
            wrapped = DistributedDataParallel(wrapped, device_ids=ids, **{_SYNC_BUFFERS: False})  # pyrefly: ignore
        self.model: Any = torch.compile(wrapped) if recipe.compile else wrapped

    def step(self, images: Tensor, labels: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Take one step; returns this process's part of the global batch's mean loss, and its correct answers.

        Randomness inside the network is drawn from (seed, step, rank), so a resumed run has nothing to remember.
        """
        torch.manual_seed(mixed_seed(self.recipe.seed, "step", step, self.processes.rank))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.recipe, step, self.steps_per_epoch) * group["rate"]
        self.optimizer.zero_grad()
        images = images.to(memory_format=self.format)
        with self.autocast():
            loss, logits = (self._whole if not self.recipe.micro_batch else self._in_parts)(images, labels)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss, (logits.argmax(1) == labels).sum()

    def autocast(self) -> torch.autocast:
        """The recipe's precision."""
        dtype = DTYPES.get(self.recipe.precision)
        return torch.autocast(self.processes.device.type, dtype=dtype, enabled=dtype is not None)

    def _whole(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(images)
        loss = F.cross_entropy(logits.float(), labels, reduction="sum") / self.recipe.batch
        with torch.autocast(self.processes.device.type, enabled=False):
            self.scaler.scale(loss * self.processes.size).backward()  # the average over processes is their sum
        return loss.detach(), logits.detach()

    def _in_parts(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        scaler = self.scaler if self.scaler.is_enabled() else None
        fault: MicroBatchError | None = None
        try:
            size = self.recipe.micro_batch
            loss, logits = microbatch.backward(
                self.model, mean_loss, images, labels, micro_batch=size, scaler=scaler, return_outputs=True
            )
            return loss / self.processes.size, logits
        except MicroBatchError as error:  # raised in all processes if in one
            fault = error
        if any(self.processes.any(isinstance(fault, NonFiniteError))):
            raise NonFiniteError(str(fault)) from fault
        raise fault

    # -- what a checkpoint holds ------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Weights, statistics and momentum, by name."""
        held = {f"model.{k}": v for k, v in self.bare.state_dict().items()}
        for number, parameter in enumerate(self._parameters()):
            buffer = self.optimizer.state[parameter].get("momentum_buffer")
            if buffer is not None:
                held[f"momentum.{number}"] = buffer
        return held

    def restore(self, tensors: dict[str, Tensor] | None, scaler: dict) -> None:
        """Put back what a checkpoint of the main process held; ``tensors`` is None in the others."""
        with self.processes.all_or_none():
            if tensors is not None:
                self._require_fit(tensors)
                self.bare.load_state_dict({k[6:]: v for k, v in tensors.items() if k.startswith("model.")})
        names = self.processes.from_main(None if tensors is None else sorted(tensors))
        for number, parameter in enumerate(self._parameters()):
            if f"momentum.{number}" in names:
                buffer = torch.empty_like(parameter, requires_grad=False)  # in the weights' own memory format
                if tensors is not None:
                    buffer.copy_(tensors[f"momentum.{number}"])
                self.optimizer.state[parameter]["momentum_buffer"] = buffer
        self.processes.copy_from_main(*self.tensors().values())
        self.scaler.load_state_dict(scaler)

    def _require_fit(self, tensors: dict[str, Tensor]) -> None:
        learnt = {f"momentum.{i}": p.shape for i, p in enumerate(self._parameters())}
        shapes = {f"model.{k}": v.shape for k, v in self.bare.state_dict().items()} | learnt
        found = {k: v.shape for k, v in tensors.items()}
        wrong = sorted(k for k in found.keys() | shapes.keys() - learnt.keys() if found.get(k) != shapes.get(k))
        if wrong:
            raise CheckpointError(
                f"the checkpoint does not fit the network that {self.recipe.model} builds now: {wrong[0]} and "
                f"{len(wrong) - 1} others differ. Train in another folder"
            )

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


def _would_crash(model: nn.Module) -> bool:
    """Whether oneDNN would write beyond its memory in the backward pass, channels last.

    It does for strided 1 x 1 convolutions of fewer than 16 input channels on large images (torch 2.13, AVX-512).
    """
    layers = (m for m in model.modules() if isinstance(m, nn.Conv2d))
    return any(m.kernel_size == (1, 1) and max(m.stride) > 1 and m.in_channels < 16 for m in layers)


def optimizer(recipe: Recipe, parameters: Iterable[Tensor]) -> torch.optim.SGD:
    """The recipe's SGD; parameters are grouped by weight decay and by their rate over the recipe's."""
    slower = method(recipe.method).scalar_rate if recipe.scalar_rate is None else recipe.scalar_rate
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for p in parameters:
        if p.requires_grad:
            decay = recipe.weight_decay if p.dim() > 1 or recipe.decay_scalars else 0.0
            groups.setdefault((decay, slower if p.numel() == 1 else 1.0), []).append(p)
    settings = [{"params": same, "weight_decay": decay, "rate": rate} for (decay, rate), same in groups.items()]
    return torch.optim.SGD(settings, lr=recipe.lr, momentum=recipe.momentum)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy, a mean over the images."""
    return F.cross_entropy(logits.float(), labels)
