"""The last BN: one affine-free BatchNorm on the logits, inside the layer that makes them.

It is the one layer of a converted network that sees more than one sample, and it must see the whole batch. So it
reduces over all ranks of ``torch.distributed``, ``mimicnorm.microbatch`` can stand in for it, and it warns where the
gradients of several small batches are added up.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm

from mimicnorm.errors import MicroBatchError
from mimicnorm.layers.derive import Derived, derive_
from mimicnorm.layers.regression_loss import losses_under_way, nodes_from, regression_on, warn_of_regression
from mimicnorm.layers.weight import widened


class AccumulationWarning(UserWarning):
    """Gradients of several small batches were added up through a LastNorm: not the gradient of the large one.

    A discriminator that is given real and fake samples apart needs them in one batch: normalised by itself, each batch
    looks like the other. The warning is also given where gradients are added up only to be thrown away, as those of a
    discriminator in the generator's step: freeze it there (``requires_grad_(False)``), which saves computing them, too.
    """


_refusal: ContextVar[str | None] = ContextVar("refusal", default=None)
_advice: ContextVar[str] = ContextVar(
    "advice",
    default="Train with a larger batch; if that does not fit into memory, give it whole to "
    "mimicnorm.microbatch.backward(..., micro_batch=1)",
)


@contextlib.contextmanager
def _value(variable: ContextVar, value: str) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def refused(why: str) -> contextlib._GeneratorContextManager[None]:
    """Raise inside where a LastNorm normalises over the batch: only a piece of the batch is there."""
    return _value(_refusal, why)


def advising(what: str) -> contextlib._GeneratorContextManager[None]:
    """Give other advice inside where a LastNorm gets a single value per class."""
    return _value(_advice, what)


class LastNorm(_BatchNorm):
    """Normalise each class's logits over the batch; no affine parameters per class (Section "Last BN Layer").

    In training mode the batch is that of all ranks when ``torch.distributed`` is initialised, whatever share each
    has of it; every rank must take part then.

    With ``logit_scale``, one learned scalar multiplies the normalised logits of all classes. A state dict from before
    the scalar existed loads as a scalar of 1, which is what it was.

    Args:
        num_classes: The number of logits per sample.
        dim: Where the classes are: 1 after a convolution, -1 after a linear layer.
        eps: Added to the variance.
        momentum: Weight of the new batch in the running statistics; None averages all batches alike.
        logit_scale: Whether it has that scalar. Exempt it from weight decay: ``mimicnorm.param_groups``.

    Attributes:
        logit_scale: The scalar, of shape (1,), starting at 1, or None. ``scale`` is what multiplies the logits.
        intercept: Called with the logits in place of the normalisation, if set; for ``mimicnorm.microbatch``.

    Example:
        >>> LastNorm(10)(torch.randn(64, 10)).std(0, correction=0)  # doctest: +SKIP
        tensor([1.0000, ...])
    """

    def __init__(
        self,
        num_classes: int,
        dim: int = 1,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        logit_scale: bool = False,
        **factory: Any,
    ):
        super().__init__(num_classes, eps, momentum, affine=False, **factory)
        self.register_parameter("logit_scale", nn.Parameter(torch.ones(1, **factory)) if logit_scale else None)
        self.dim = dim
        self.intercept: Callable[[Tensor], Tensor] | None = None
        self._accumulation = _Accumulation()

    def forward(self, input: Tensor) -> Tensor:
        """Normalise over everything but the classes; with running statistics in eval mode."""
        if self.intercept is not None:  # a micro-batch sees the statistics of the whole batch
            return _outside_graphs(self.intercept, input)
        classes_first = input if self.dim == 1 or input.dim() == 2 else input.movedim(self.dim, 1)
        if self.training and not torch.compiler.is_compiling():
            _require_whole()
        if self.training and world_size() > 1 and not isinstance(input, FakeTensor) and not input.is_meta:
            normed = _outside_graphs(_over_all_ranks, self, classes_first)
        else:
            if self.training:
                self._require_two(classes_first.numel() // max(classes_first.shape[1], 1), input.shape)
            normed = super().forward(classes_first)
        output = normed if classes_first is input else normed.movedim(1, self.dim)
        if self.training and not torch.compiler.is_compiling():
            self._accumulation.watch(input, output, self.num_features)
        return output

    @property
    def weight(self) -> Tensor | None:  # pyrefly: ignore
        """The scalar as BatchNorm's gamma: multiplying afterwards would save the normalised logits for backward."""
        # Not expand: on the CPU, torch 2.13 reads gamma as contiguous in the backward pass of (samples, classes).
        scale = self.scale
        return None if scale is None else scale.repeat(self.num_features)

    @property
    def scale(self) -> Tensor | None:
        """What multiplies the normalised logits: the scalar s where it is 1 or more, exp(s - 1) below.

        It cannot become negative. Before a network has learned anything, a smaller scale lowers the loss, most of all
        where classes are imbalanced, and momentum would carry a plain scalar through zero (docs/theory.md).
        """
        return None if self.logit_scale is None else 1 + F.elu(self.logit_scale - 1)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Read a pickle from before the scalar existed."""
        super().__setstate__(state)
        self._parameters.setdefault("logit_scale", None)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:  # pyrefly: ignore
        statistics = state_dict.get(f"{prefix}running_mean")
        if self.logit_scale is not None and statistics is not None:
            state_dict.setdefault(f"{prefix}logit_scale", statistics.new_ones(1))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def as_affine(self) -> tuple[Tensor, Tensor]:
        """What it does in eval mode: as ``Shift.as_affine``."""
        scale = torch.rsqrt(widened(self.running_var) + self.eps)  # pyrefly: ignore
        scale = scale if self.weight is None else scale * self.weight
        return scale, -self.running_mean * scale  # pyrefly: ignore

    def _require_two(self, values: float, shape: torch.Size) -> None:
        if values < 2:
            raise MicroBatchError(
                f"LastNorm got a single value per class (logits of shape {tuple(shape)}) in "
                f"training mode, so there is no variance to divide by. {_advice.get()}."
            )

    def _check_input_dim(self, input: Tensor) -> None:
        """Any rank from 2 on."""

    def extra_repr(self) -> str:
        """Show classes and where they are."""
        scaled = "" if self.logit_scale is None else ", logit_scale=True"
        return f"{self.num_features}, dim={self.dim}, eps={self.eps}, momentum={self.momentum}{scaled}"


def _require_whole() -> None:
    why = _refusal.get()
    if why is not None:
        raise MicroBatchError(
            f"{why}. Give backward the module itself as loss_fn (LastNormCrossEntropy, or an nn.Module that has it as "
            "a child), not a function around it"
        )


def _outside_graphs(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Let a compiled model break its graph here, so that it is not compiled anew for every micro-batch.

    The decorator ``torch.compiler.disable`` would import the compiler along with this file, which takes seconds.
    """
    return _uncompiled(function, *args) if torch.compiler.is_compiling() else function(*args)


@_disable_dynamo
def _uncompiled(function: Callable[..., Tensor], *args: Any) -> Tensor:
    return function(*args)


# -- many ranks --------------------------------------------------------------------------------------------------


def world_size() -> int:
    """How many ranks share the batch."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class _SumOverRanks(torch.autograd.Function):
    """All-reduce whose gradient is all-reduced: each rank's loss depends on every rank's logits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        del ctx
        return _SumOverRanks.apply(*grads)


def _over_all_ranks(norm: LastNorm, x: Tensor) -> Tensor:
    """Normalise with the mean and variance over all ranks' values; shares may differ, even be empty."""
    wide = widened(x)
    others = [d for d in range(x.dim()) if d != 1]
    values = x.numel() // max(x.shape[1], 1)
    scale = wide.new_ones(1) if norm.logit_scale is None else norm.scale.to(wide.dtype)  # pyrefly: ignore
    # The scalar is averaged over the ranks, hence its gradient: inside a loss, nobody else does that.
    sums = _SumOverRanks.apply(torch.cat([wide.sum(others), wide.new_full((1,), values), scale]))
    count, scale = sums[-2].detach(), sums[-1] / world_size()
    if values < 2:  # where the total is below two, every rank looks, and all raise together
        norm._require_two(count.item(), x.shape)
    along = [1, -1] + [1] * (x.dim() - 2)
    mean = sums[:-2] / count
    centred = wide - mean.reshape(along)
    # The squares are summed around the mean, in a second reduction: sums of raw squares would cancel.
    var = _SumOverRanks.apply(centred.square().sum(others)) / count
    if norm.running_mean is not None and norm.running_var is not None and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        factor = 1.0 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
        with torch.no_grad():
            norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), factor)
            norm.running_var.lerp_((var * (count / (count - 1))).to(norm.running_var.dtype), factor)
    return (centred * (scale * torch.rsqrt(var + norm.eps)).reshape(along)).to(x.dtype)


# -- batches that come in pieces ---------------------------------------------------------------------------------


_WATCHED = 32  # forward passes: a loop that adds gradients up does so from its first step on, and looking takes time


class _Accumulation:
    """Warns, in the backward pass, of gradients that an earlier batch left, and of a regression loss.

    It looks at the parameter nearest to the logits. Not accumulation: a second backward of the same forward, two
    forwards under one backward, a backward that leaves the parameter alone (``autograd.grad`` for the inputs).
    """

    warned_in: int | None = None
    """The backward pass that last gave the warning, for any head: one pass through two heads warns once."""

    loss_was_seen = False
    """Whether a backward pass has been searched for a regression loss."""

    def __init__(self) -> None:
        self.active = True
        self.forwards = 0
        self.last_forward: int | None = None
        self.last_task: int | None = None
        self.expected_version: int | None = None

    def watch(self, logits: Tensor, output: Tensor, outputs: int) -> None:
        """Register a hook for the backward pass through these logits."""
        if (not self.active and self.loss_was_seen) or not logits.requires_grad:
            return
        if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            return
        leaf = _nearest_parameter(logits)
        if leaf is None and self.loss_was_seen:
            return
        self.forwards += 1
        this = self.forwards
        # Its number, not the node: a hook that referred to the node would keep the graph alive for ever.
        number = output.grad_fn._sequence_nr()  # pyrefly: ignore

        def hook(_grad: Tensor) -> None:
            self._look_at_loss(number, outputs)
            if leaf is not None:
                self._look_at_gradient(this, leaf)

        logits.register_hook(hook)

    def _look_at_loss(self, number: int, outputs: int) -> None:
        """Warn of a regression loss, in the first backward pass only."""
        if self.loss_was_seen:
            return
        self.loss_was_seen = True
        for loss in losses_under_way():
            if kind := regression_on(loss, lambda node: node._sequence_nr() == number):
                warn_of_regression(kind, f"LastNorm of {outputs} outputs")

    def _look_at_gradient(self, forward: int, leaf: Any) -> None:
        """Warn if the leaf has a gradient that another forward pass left there."""
        try:
            if not torch._C._will_engine_execute_node(leaf):
                return
        except RuntimeError:  # autograd.grad for this parameter, which leaves its .grad alone
            return
        task = torch._C._current_graph_task_id()
        earlier = self.last_forward is not None and self.last_forward != forward and self.last_task != task
        self.last_forward, self.last_task = forward, task
        self.active = self.active and forward <= _WATCHED
        grad = leaf.variable.grad
        expected, self.expected_version = self.expected_version, None
        if not self.active or grad is None or type(grad) is not Tensor:
            return
        # Adding to a gradient writes it once. If it was written more often since (zeroed, clipped), do not look at
        # its values, which would cost a synchronisation in every step of a training that clears with zeros.
        self.expected_version = grad._version + 1
        if not earlier or (expected is not None and grad._version != expected) or not grad.any():
            return
        self.active = False
        if _Accumulation.warned_in != task:
            _Accumulation.warned_in = task
            warnings.warn(
                "gradients are being accumulated over several batches through a LastNorm: each batch was "
                "normalised by itself, so the sum is not the gradient of the large batch. Use "
                "mimicnorm.microbatch.backward(model, loss_fn, inputs, targets, micro_batch=...), which is exact. A "
                "batch must not carry the label: give the real and the fake samples of a discriminator in one batch, "
                "or convert with last_norm=False.",
                AccumulationWarning,
                stacklevel=2,
            )


def _nearest_parameter(logits: Tensor) -> Any:
    """The autograd node of the trainable leaf nearest to the logits: the head's bias or weight."""
    nearest = itertools.islice(nodes_from(logits.grad_fn), 32)
    return next((node for node in nearest if isinstance(getattr(node, "variable", None), nn.Parameter)), None)


# -- the head ----------------------------------------------------------------------------------------------------


class LastNormed(Derived):
    """A head that normalises its output by its child ``last_norm``."""

    last_norm: LastNorm

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Make the logits, then normalise them."""
        output = super().forward(*args, **kwargs)  # pyrefly: ignore
        # A Sequential runs all its children, and the last BN is the last of them.
        return output if self.base.forward is nn.Sequential.forward else self.last_norm(output)


def last_norm_(head: nn.Module, norm: LastNorm) -> nn.Module:
    """Put a LastNorm inside a head, in place: the same object, the same keys."""
    derive_(head, LastNormed)
    head.add_module("last_norm", norm)
    return head
