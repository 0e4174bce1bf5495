"""One training step, tried out on fake tensors or on copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from mimicnorm.arguments import positive_int
from mimicnorm.compress.context import require_bits
from mimicnorm.errors import MemoryPredictionError
from mimicnorm.memory.analysis import Analysis
from mimicnorm.memory.compiled import partition_compiled
from mimicnorm.memory.micro_batches import MicroBatchPasses
from mimicnorm.memory.passes import Loss, Passes, default_loss
from mimicnorm.memory.samples import sample_count, with_samples
from mimicnorm.memory.tracker import StorageTracker
from mimicnorm.surgery import isolate
from mimicnorm.surgery.example import call_arguments

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters),
}
_FOREACH_BY_DEFAULT = ("cuda", "xpu")  # where PyTorch's optimizers work on all parameters at once


class Settings(TypedDict, total=False):
    """What kind of step: arguments of ``measure`` that ``largest_batch`` and ``compare`` take, too."""

    loss: Loss | None
    optimizer: str | MakeOptimizer | None
    autocast: torch.dtype | None
    activation_bits: int | None
    fake: bool
    device: str | torch.device | None


def measure(
    model: nn.Module,
    example: Any,
    *,
    loss: Loss | None = None,
    optimizer: str | MakeOptimizer | None = "sgd-momentum",
    autocast: torch.dtype | None = None,
    activation_bits: int | None = None,
    fake: bool = True,
    device: str | torch.device | None = None,
    batch: int | None = None,
    micro_batch: int | None = None,
) -> Analysis:
    """Predict the memory of one training step without running it.

    The step is that of the usual loop once the optimizer has its state: gradients set to none, forward, loss,
    backward, ``optimizer.step()``; the input and the output are freed at its end. While it runs, the model has fake
    tensors, which have sizes and lifetimes but no memory; afterwards the model and the random number generators are
    as they were. Active ``torch.autocast`` contexts, activation checkpointing and compiled modules count as they
    stand. docs/memory.md lists what is not counted.

    Args:
        model: Any module; ``torch.compile`` may have been applied to it or to parts of it.
        example: A tensor, call arguments (tuple or dict), or a shape. A shape of any size costs nothing.
        loss: From the model's output to a scalar. Without it, cross entropy against class 0 for every output
            tensor of two or more dimensions, the sum of any other.
        optimizer: ``"sgd-momentum"``, ``"sgd"``, ``"adamw"``, a function from parameters to an optimizer, or
            None for no step at all.
        autocast: Run forward and loss in ``torch.autocast`` with this type: ``torch.bfloat16`` or ``torch.float16``.
        activation_bits: Save activations in so many bits: 8, 4, 2, or 32, as ``compress.saved_activations`` does.
        fake: With False, run the step for real on copies, on the device where the model is. For networks whose
            shapes depend on the data; give real data as the example.
        device: What the prediction is for; the model's own device if not given. ``"cuda"`` needs no GPU.
        batch: Take that many samples instead of the example's.
        micro_batch: Predict a step of ``microbatch.backward`` with that many samples at once, outputs returned;
            ``saved_bytes`` is then what one micro-batch saves. The loss must be a mean over samples.

    Raises:
        MemoryPredictionError: The network cannot run on fake tensors (an LSTM in one fused kernel among them, as
            its workspace has no size there), or nothing in it requires a gradient, or loss or optimizer are unfit.
        ExampleError: The model does not run on the example.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        >>> analysis = measure(net, (1024, 3, 34, 34))
        >>> analysis.parameters
        928
    """
    require_model(model)
    make_optimizer = _optimizer_maker(optimizer)
    if not isinstance(fake, bool):
        raise MemoryPredictionError(f"fake={fake!r}: use True or False")
    if batch is not None:
        batch = positive_int(batch, "batch", error=MemoryPredictionError)
    if activation_bits is not None:
        require_bits(activation_bits)
    if micro_batch is not None:
        micro_batch = positive_int(micro_batch, "micro_batch", error=MemoryPredictionError)
    model_device = next(model.parameters()).device.type
    target = _target_device(device, model_device, fake)
    _require_autocast(autocast, model_device)
    trained = [parameter.requires_grad for parameter in model.parameters()]
    new_tracker = partial(StorageTracker, model_device, workspaces=target == "cpu")

    def step() -> Analysis:
        for parameter, trains in zip(model.parameters(), trained, strict=True):  # copies, made by the runner
            parameter.requires_grad_(trains)
            parameter._is_param = True  # pyrefly: ignore
        bare, compiled = partition_compiled(model)
        # each tensor once; in the mode of fake tensors, the copies are fake
        copied = cache(lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad))
        inputs = tree_map_only(Tensor, copied, example)
        args, kwargs = call_arguments(bare, inputs if batch is None else with_samples(inputs, batch))
        loss_fn = default_loss if loss is None else loss
        setting = (bare, compiled, args, kwargs, loss_fn, autocast, activation_bits, fake, new_tracker())
        passes = Passes(*setting) if micro_batch is None else MicroBatchPasses(*setting, size=micro_batch)
        passes.follow_modules()
        if compiled:  # once for the compiler, so that the tracker sees compiled code and not the compiler at work
            passes.run()
            bare.zero_grad()
            passes.tracker = new_tracker()
        return _tracked_step(passes, make_optimizer, target)

    training = None if model.training else True  # in a model that trains, a frozen BatchNorm stays frozen
    return isolate.run(model, step, fake=fake, training=training, modes=[torch.enable_grad()])


def require_model(model: Any) -> None:
    """Raise for what is not a module, or has nothing to train."""
    if not isinstance(model, nn.Module):
        raise MemoryPredictionError(f"the model is a {type(model).__name__}: give an nn.Module")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise MemoryPredictionError(
                f"parameter {name!r} has no shape yet: run the lazy model once on real data first"
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise MemoryPredictionError(
            f"{type(model).__name__} has no parameter that requires a gradient, so there is no training step to "
            "predict: set requires_grad on the parameters that will be trained"
        )


def _tracked_step(passes: Passes, make_optimizer: MakeOptimizer | None, target: str) -> Analysis:
    tracker, model = passes.tracker, passes.model
    with tracker:
        for parameter in model.parameters():
            tracker.add(parameter, "parameters")
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p: tracker.add(p.grad, "gradients"))
        parameters_bytes = tracker.alive_bytes["parameters"]
        for buffer in model.buffers():
            tracker.add(buffer, "parameters")
        buffers_bytes = tracker.alive_bytes["parameters"] - parameters_bytes
        for leaf in tree_leaves((passes.args, passes.kwargs)):
            if isinstance(leaf, Tensor):
                tracker.add(leaf, "inputs")
        optimizer = None if make_optimizer is None else _optimizer_with_state(make_optimizer, passes, target)
        outputs = passes.run()
        gradients_bytes = tracker.alive_bytes["gradients"]
        if optimizer is not None:
            with tracker.during("optimizer"), passes.explained("the optimizer's step"):
                optimizer.step()
        del outputs
    samples = sample_count((passes.args, passes.kwargs))
    return Analysis(
        batch=samples,
        saved_bytes=sum(tracker.saved_by_module.values()),
        parameters=parameters_bytes,
        buffers=buffers_bytes,
        inputs=tracker.alive_bytes["inputs"],
        gradients=gradients_bytes,
        optimizer_state=tracker.alive_bytes["optimizer_state"],
        timeline=tuple(tracker.timeline),
        saved_by_module=tracker.saved_by_module,
        device=target,
        micro_batch=min(passes.size, samples) if isinstance(passes, MicroBatchPasses) else None,
        activation_bits=passes.activation_bits,
    )


def _optimizer_with_state(make: MakeOptimizer, passes: Passes, target: str) -> torch.optim.Optimizer:
    """Make the optimizer and let one step with zero gradients create its state."""
    trained = [parameter for parameter in passes.model.parameters() if parameter.requires_grad]
    with passes.explained("making the optimizer"):
        optimizer = make(trained)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise MemoryPredictionError(
            f"the function given as optimizer returned {type(optimizer).__name__}: return a torch.optim.Optimizer"
        )
    if passes.fake and target in _FOREACH_BY_DEFAULT:  # PyTorch does not take fake tensors for a GPU's
        for group in optimizer.param_groups:
            if group.get("foreach", False) is None and not group.get("fused") and not group.get("differentiable"):
                group["foreach"] = True
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    with passes.explained("the optimizer's step"):
        optimizer.step()
    optimizer.zero_grad()
    for leaf in tree_leaves([list(state.values()) for state in optimizer.state.values()]):
        if isinstance(leaf, Tensor):
            passes.tracker.add(leaf, "optimizer_state")
    return optimizer


def _optimizer_maker(optimizer: Any) -> MakeOptimizer | None:
    make = OPTIMIZERS.get(optimizer) if isinstance(optimizer, str) else optimizer
    if optimizer is None or callable(make):
        return make
    given = type(optimizer).__name__ if isinstance(optimizer, torch.optim.Optimizer) else repr(optimizer)
    raise MemoryPredictionError(
        f"optimizer={given}: use one of {', '.join(map(repr, OPTIMIZERS))}, None, or a function from parameters to an "
        "optimizer, such as lambda p: torch.optim.SGD(p, lr=0.1); the step runs on copies of the model's parameters"
    )


def device_type(device: Any) -> str:
    """Return the type of a device or of its name."""
    try:
        return torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise MemoryPredictionError(f"device={device!r} is not a device: give 'cpu', 'cuda' or None") from error


def _target_device(device: Any, model_device: str, fake: bool) -> str:
    """Return the type of the device that a prediction is for.

    A step on fake tensors of the CPU predicts one of a GPU, too, without what only the CPU's kernels allocate.
    """
    target = model_device if device is None else device_type(device)
    elsewhere = fake and model_device in ("cpu", "meta") and target not in ("cpu", "meta")
    if target != model_device and not elsewhere:
        why = "" if fake else ", and fake=False runs the step where the model is"
        raise MemoryPredictionError(
            f"device={device!r}, but the model is on {model_device}{why}: move it first, model.to({target!r}), or give "
            "None"
        )
    return target


def _require_autocast(dtype: Any, device: str) -> None:
    """Raise for a type in which autocast does not run on a device: torch would warn and run without autocast."""
    if dtype not in (None, torch.bfloat16, torch.float16):
        raise MemoryPredictionError(f"autocast={dtype!r}: use torch.bfloat16, torch.float16, or None for no autocast")
    if dtype is not None and not torch.amp.is_autocast_available(device):
        raise MemoryPredictionError(
            f"autocast={dtype!r}: there is no autocast on {device}, where the model is. Move the model to the CPU or a "
            "GPU, or give None"
        )
