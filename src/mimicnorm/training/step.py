"""One step of the optimizer, in any precision, at once or in micro-batches, on one process or several.

What a step depends on (learning rate, order of the images, dropout) is a function of the recipe and the step's number,
so that a resumed run needs no memory of it.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from bisect import bisect_right
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mimicnorm import microbatch
from mimicnorm.compress import saved_activations
from mimicnorm.errors import MicroBatchError, NonFiniteError, RecipeError
from mimicnorm.layers.param_groups import param_groups
from mimicnorm.training.precision import autocast
from mimicnorm.training.processes import Processes
from mimicnorm.training.recipes import Recipe

_DDP = inspect.signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _DDP else "broadcast_buffers"  # by torch's version


class Trainer:
    """A network with all that moves it: optimizer, gradient scaler, learning rate.

    Args:
        recipe: How to train.
        model: The network; it is moved to the device.
        processes: The processes that train it together.
        steps: Of the whole run.

    Attributes:
        bare: The network itself, neither wrapped nor compiled: what is evaluated and saved.
    """

    _logits: Tensor | None = None

    def __init__(self, recipe: Recipe, model: nn.Module, processes: Processes, steps: int):
        if recipe.precision == "int8":
            raise RecipeError(
                'precision="int8" is trained by mimicnorm.integer.run.train, or mimicnorm train --integer; there is no '
                "other measurement of it"
            )
        self.recipe, self.processes, self.steps = recipe, processes, steps
        last = recipe.channels_last and not (processes.device.type == "cpu" and _would_crash(model))
        self.format = torch.channels_last if last else torch.contiguous_format
        self.bare = model.to(processes.device).to(memory_format=self.format).train()  # pyrefly: ignore
        self.optimizer = optimizer(recipe, model)
        self.scaler = torch.amp.GradScaler(processes.device.type, enabled=recipe.precision == "fp16")
        self.model: Any = torch.compile(self.bare) if recipe.compile else self.bare
        if processes.size > 1:  # statistics differ only in BatchNorms; evaluation takes the main process's
            ids = [processes.device] if processes.device.type == "cuda" else None
            self.model = DistributedDataParallel(self.model, device_ids=ids, **{_SYNC_BUFFERS: False})  # pyrefly: ignore

    def step(self, images: Tensor, labels: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Take one step; return this process's part of the global batch's mean loss, and its number of correct answers.

        Randomness inside the network is drawn from (seed, step, rank).
        """
        torch.manual_seed(mixed_seed(self.recipe.seed, "step", step, self.processes.rank))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.recipe, step, self.steps) * group["rate"]
        self.optimizer.zero_grad()
        images = images.to(memory_format=self.format)
        with self.autocast():
            backward = self._in_micro_batches if self.recipe.micro_batch else self._at_once
            loss, logits = backward(images, labels, step)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self._logits = logits
        return loss, (logits.argmax(1) == labels).sum()

    def logit_variance(self) -> Tensor | None:
        """Return the variance of each class's logits in this process's part of the last batch, as the loss saw them."""
        return None if self._logits is None or len(self._logits) < 2 else self._logits.float().var(0)

    def predict(self, images: Tensor) -> Tensor:
        """Return logits in float32; the caller chooses the mode."""
        return self.bare(images.to(memory_format=self.format)).float()

    def tensors(self) -> dict[str, Tensor]:
        """Return weights, statistics and the optimizer's state by name."""
        tensors = {f"model.{name}": tensor for name, tensor in self.bare.state_dict().items()}
        for number, parameter in enumerate(self._parameters()):
            for key, value in self.optimizer.state[parameter].items():
                if value is not None:  # SGD without momentum
                    tensors[f"optimizer.{number}.{key}"] = value
        return tensors

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Put back what `tensors` returned."""
        parameters = self._parameters()
        self.bare.load_state_dict({k[6:]: v for k, v in tensors.items() if k.startswith("model.")})
        for name, values in tensors.items():
            if name.startswith("optimizer."):
                number, key = name.split(".")[1:]
                parameter = parameters[int(number)]
                if key != "step":  # a counter, in host memory
                    values = torch.empty_like(parameter, requires_grad=False).copy_(values)  # in its memory format
                self.optimizer.state[parameter][key] = values

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def autocast(self) -> AbstractContextManager:
        """The recipe's precision."""
        return autocast(self.processes.device, self.recipe.precision, compiled=self.recipe.compile)

    def _saving(self, step: int) -> AbstractContextManager:
        """How the forward pass saves activations; rounding is drawn from (seed, step, rank)."""
        seed = mixed_seed(self.recipe.seed, "activations", step, self.processes.rank)
        bits = self.recipe.activation_bits
        return saved_activations(bits, seed=seed) if bits else nullcontext()

    def _at_once(self, images: Tensor, labels: Tensor, step: int) -> tuple[Tensor, Tensor]:
        with self._saving(step):
            logits = self.model(images)
            loss = F.cross_entropy(logits.float(), labels, reduction="sum") / self.recipe.batch
        with torch.autocast(self.processes.device.type, enabled=False):
            self.scaler.scale(loss * self.processes.size).backward()  # the average over processes is their sum
        return loss.detach(), logits.detach()

    def _in_micro_batches(self, images: Tensor, labels: Tensor, step: int) -> tuple[Tensor, Tensor]:
        scaler = self.scaler if self.scaler.is_enabled() else None
        size = self.recipe.micro_batch
        try:
            with self._saving(step):
                loss, logits = microbatch.backward(
                    self.model, mean_loss, images, labels, micro_batch=size, scaler=scaler, return_outputs=True
                )
        except MicroBatchError as error:  # raised in all processes if in one, but only one knows the reason
            if any(self.processes.any(isinstance(error, NonFiniteError))):
                raise NonFiniteError(str(error)) from error
            raise
        return loss / self.processes.size, logits


def _would_crash(model: nn.Module) -> bool:
    """Whether oneDNN would write beyond its memory in the backward pass, channels last.

    It does for strided 1 x 1 convolutions of fewer than 16 input channels on large images (torch 2.13, AVX-512).
    """
    layers = (m for m in model.modules() if isinstance(m, nn.Conv2d))
    return any(m.kernel_size == (1, 1) and max(m.stride) > 1 and m.in_channels < 16 for m in layers)


def optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    """Build the recipe's optimizer; parameters are grouped by weight decay and by their factor on the learning rate."""
    scalar_rate = recipe.resolved().scalar_rate
    groups: dict[tuple[float, Any], list[Tensor]] = {}
    for group in param_groups(model, weight_decay=recipe.weight_decay, decay_scalars=recipe.decay_scalars):
        for p in group["params"]:
            rate = scalar_rate if p.numel() == 1 else 1.0
            groups.setdefault((group["weight_decay"], rate), []).append(p)
    settings = [{"params": same, "weight_decay": decay, "rate": rate} for (decay, rate), same in groups.items()]
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(settings, lr=recipe.lr, betas=(recipe.momentum, 0.999))
    return torch.optim.SGD(settings, lr=recipe.lr, momentum=recipe.momentum)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy, a mean over the images."""
    return F.cross_entropy(logits.float(), labels)


def learning_rate(recipe: Recipe, step: int, steps: int) -> float:
    """Return the learning rate of a step (counted from 0): a linear rise that ends at ``lr``, then the schedule.

    The rise counts from the first step, which has 1/n of the rate: a step at rate 0 would be lost. The schedule steps
    down at milestones, or anneals from the end of the rise to exactly 0 at the last step.

    Example:
        >>> from mimicnorm.training import recipe
        >>> [round(learning_rate(recipe("cifar100-vgg11"), s, 15000), 4) for s in (0, 99, 199, 7999, 8000)]
        [0.0005, 0.05, 0.1, 0.1, 0.01]
    """
    rise = round(recipe.warmup * steps)
    warm = min(1.0, (step + 1) / rise) if rise else 1.0
    if recipe.schedule == "steps":
        passed = bisect_right(sorted(round(m * steps) for m in recipe.milestones), step)
        return recipe.lr * warm * recipe.gamma**passed
    done = min(max((step + 1 - rise) / max(steps - rise, 1), 0.0), 1.0)
    return recipe.lr * warm * (1 - done if recipe.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2)


def epoch_batches(recipe: Recipe, samples: int, epoch: int) -> list[Tensor]:
    """Return the global batches of an epoch, as indices: an order drawn from (seed, epoch) alone."""
    generator = torch.Generator().manual_seed(mixed_seed(recipe.seed, "order", epoch))
    order = torch.randperm(samples, generator=generator)
    return list(order[: samples // recipe.batch * recipe.batch].split(recipe.batch))


def mixed_seed(*parts: int | str) -> int:
    """Make one seed from several parts, unrelated for any two combinations."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # a seed is a signed number
