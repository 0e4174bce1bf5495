"""One training step, tried out on a replica."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mimicnorm.errors import MemoryPredictionError
from mimicnorm.memory.analysis import Analysis
from mimicnorm.memory.arguments import (
    Loss,
    MakeOptimizer,
    fit_loss,
    optimizer_maker,
    predicted_device,
    require_autocast,
    require_bool,
    require_count,
    require_module,
)
from mimicnorm.memory.micro_batches import MicroBatchPasses
from mimicnorm.memory.passes import Passes, Watch, explained, follow_modules
from mimicnorm.memory.replica import Replica, batch_size, replicate
from mimicnorm.memory.tracker import StorageTracker
from mimicnorm.surgery.isolate import untouched

_ALL_AT_ONCE = ("cuda", "xpu")  # where PyTorch's optimizers work on all parameters at once by default


def measure(
    model: nn.Module,
    example: Any,
    *,
    loss: Loss | None = None,
    optimizer: str | MakeOptimizer | None = "sgd-momentum",
    autocast: torch.dtype | None = None,
    fake: bool = True,
    device: str | torch.device | None = None,
    batch: int | None = None,
    micro_batch: int | None = None,
) -> Analysis:
    """Predict the memory of one training step without running it.

    The step is that of the usual loop once the optimizer has its state: gradients set to none, forward, loss,
    backward, ``optimizer.step()``; the input and the output are held to the end. It happens on a copy of fake
    tensors, which have sizes and lifetimes but no memory; the model and the random number generators are left
    as they were. What is compiled is partitioned as ``torch.compile`` does and then run operation by operation:
    ``saved_bytes`` is what the partitioner keeps, ``peak_bytes`` an upper bound, as nothing is fused. Active
    ``torch.autocast`` contexts and activation checkpointing count as they stand.

    The copies that a convolution on the CPU makes inside itself are part of ``peak_bytes`` where that is predicted for
    the CPU. Not counted: workspaces inside any other kernel (cuDNN's convolutions among them), the allocator's
    rounding, caching and fragmentation, the CUDA context and library handles, communication buffers, sparse gradients,
    and what a custom operation keeps outside of tensors.

    Args:
        model: Any module; ``torch.compile`` may have been applied to it or to parts of it.
        example: A tensor, call arguments (tuple or dict), or a shape. A shape of any size costs nothing.
        loss: From the model's output to a scalar. Without it, cross entropy against class 0 for every output
            tensor of two or more dimensions, the sum of any other.
        optimizer: ``"sgd-momentum"``, ``"sgd"``, ``"adamw"``, a function from parameters to an optimizer, or
            None for no step at all.
        autocast: Run forward and loss in ``torch.autocast`` with this type: ``torch.bfloat16`` or ``torch.float16``.
        fake: With False, run the step for real on a copy, on the device where the model is. For networks whose
            shapes depend on the data; give real data as the example.
        device: What the prediction is for; the model's own device if not given. With ``"cuda"`` for a model on the CPU,
            no GPU is needed: what only the CPU's convolutions allocate is left out, and optimizers work on all
            parameters at once, as they do on a GPU.
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
    make_optimizer = optimizer_maker(optimizer)
    require_module(model)
    loss = fit_loss(loss)
    require_bool("fake", fake)
    require_count("batch", batch, "the example's")
    require_count("micro_batch", micro_batch, "the whole batch at once")
    predicted = predicted_device(device, model, fake)
    with untouched(model), torch.inference_mode(False), torch.enable_grad():
        replica = replicate(model, example, fake=fake, batch=batch)
        require_autocast(autocast, replica.device.type)
        about = (replica, follow_modules(replica), loss, autocast)
        passes = Passes(*about) if micro_batch is None else MicroBatchPasses(*about, int(micro_batch))
        with replica.mode:
            if replica.compiled:
                _compile(passes)
            return _tracked_step(passes, make_optimizer, predicted, fake)


def _compile(passes: Passes) -> None:
    """Run once for the compiler, so that the tracker sees compiled code and not the compiler at work."""
    with warnings.catch_warnings():
        # The compiler looks at .grad of every input; fake intermediate results answer with a warning.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        passes.run(Watch(passes.names))
    passes.replica.model.zero_grad()


def _tracked_step(passes: Passes, make_optimizer: MakeOptimizer | None, predicted: str, fake: bool) -> Analysis:
    replica, model = passes.replica, passes.replica.model
    tracker = StorageTracker(replica.device.type, workspaces=predicted == "cpu")
    with tracker:
        for parameter in model.parameters():
            tracker.add(parameter, "parameters")
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p: tracker.add(p.grad, "gradients"))
        parameters_bytes = tracker.category_bytes("parameters")
        for buffer in model.buffers():
            tracker.add(buffer, "parameters")
        for tensor in replica.inputs:
            tracker.add(tensor, "inputs")
        optimizer = _with_state(make_optimizer, replica, tracker, all_at_once=fake and predicted in _ALL_AT_ONCE)
        own_bytes = tracker.category_bytes("parameters")
        watch = Watch(passes.names, tracker)
        remaining = passes.run(watch)
        gradients_bytes = tracker.category_bytes("gradients")
        if optimizer is not None:
            with tracker.during("optimizer"), explained("the optimizer's step", replica):
                optimizer.step()
        del remaining
    samples = batch_size(replica.args, replica.kwargs)
    return Analysis(
        batch=samples,
        saved_bytes=sum(watch.saved_by_module.values()),
        parameters=parameters_bytes,
        buffers=own_bytes - parameters_bytes,
        inputs=tracker.category_bytes("inputs"),
        gradients=gradients_bytes,
        optimizer_state=tracker.category_bytes("optimizer_state"),
        timeline=tuple(tracker.timeline),
        saved_by_module=watch.saved_by_module,
        device=predicted,
        micro_batch=min(passes.size, samples) if isinstance(passes, MicroBatchPasses) else None,
    )


def _with_state(
    make: MakeOptimizer | None, replica: Replica, tracker: StorageTracker, all_at_once: bool
) -> torch.optim.Optimizer | None:
    """Build the optimizer and let one step with zero gradients create its state."""
    if make is None:
        return None
    trained = [parameter for parameter in replica.model.parameters() if parameter.requires_grad]
    with explained("making the optimizer", replica):
        optimizer = make(trained)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise MemoryPredictionError(
            f"the function given as optimizer returned {type(optimizer).__name__}: return a torch.optim.Optimizer"
        )
    for group in optimizer.param_groups if all_at_once else ():  # fake tensors are not taken for a GPU's
        if group.get("foreach", False) is None and not group.get("fused") and not group.get("differentiable"):
            group["foreach"] = True
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    with explained("the optimizer's step", replica):
        optimizer.step()
    optimizer.zero_grad()
    for leaf in tree_leaves([list(state.values()) for state in optimizer.state.values()]):
        if isinstance(leaf, Tensor):
            tracker.add(leaf, "optimizer_state")
    return optimizer
