"""The neural tangent kernel of a real network: Theta(x, x') = J(x) J(x')^T, J the parameters' Jacobian."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from mimicnorm.arguments import positive_int
from mimicnorm.errors import TheoryError
from mimicnorm.surgery import isolate

from .arguments import running


def empirical_ntk(
    model: nn.Module,
    x: Tensor,
    x2: Tensor | None = None,
    mode: str = "per_sample",
    *,
    outputs: str = "mean",
    memory_bytes: int = 2**29,
) -> Tensor:
    """Compute the NTK of any model at its present parameters.

    The Jacobian is never in memory as a whole. Samples are taken in blocks: two of them fit `memory_bytes`, or have one
    sample each.

    Args:
        model: any module that maps a batch to one tensor; its mode, buffers and gradients stay as they are.
        x: inputs, (m, ...).
        x2: second inputs: the kernel between x and x2.
        mode: ``"per_sample"``: each sample runs by itself, through `torch.func.vmap`. ``"batch"``: x (and x2) run as
            whole batches, which is the network's function under BatchNorm in train mode, with the terms through the
            batch statistics; also for models that vmap cannot run, such as LSTMs.
        outputs: ``"mean"``: (m, m2), averaged over outputs as trace / outputs; ``"full"``: (m, outputs, m2, outputs).
        memory_bytes: for the blocks of the Jacobian; autograd's temporaries come on top, about as much again.

    Example:
        >>> model = nn.Linear(3, 1, bias=False).double()
        >>> float(empirical_ntk(model, torch.ones(1, 3, dtype=torch.float64)))
        3.0
    """
    if mode not in ("per_sample", "batch"):
        raise TheoryError(f"unknown mode {mode!r}: use 'per_sample' or 'batch'.")
    if outputs not in ("mean", "full"):
        raise TheoryError(f"unknown outputs {outputs!r}: use 'mean' (m, m2) or 'full' (m, outputs, m2, outputs).")
    if not isinstance(model, nn.Module):
        raise TheoryError(f"model must be an nn.Module, not {type(model).__name__}; its parameters make the kernel.")
    for side in (x, x2):
        if side is not None and (not isinstance(side, Tensor) or side.dim() == 0 or len(side) == 0):
            raise TheoryError("inputs must be tensors of at least one sample, (m, ...).")
    memory_bytes = positive_int(memory_bytes, "memory_bytes", error=TheoryError)
    if not any(p.requires_grad for p in model.parameters()):
        raise TheoryError("the model has no trainable parameter, so its tangent kernel is zero.")
    if mode == "per_sample":
        _require_independent_samples(model)
    sides = (x,) if x2 is None else (x, x2)
    return isolate.run(model, lambda *sides: _kernel(model, sides, mode, outputs == "full", memory_bytes), sides)


def _kernel(model: nn.Module, sides: tuple[Tensor, ...], mode: str, full: bool, memory_bytes: int) -> Tensor:
    left, right = sides[0], sides[-1]
    m, m2, same = len(left), len(right), len(sides) == 1
    widths = [_output_count(model, side if mode == "batch" else side[:64]) for side in sides]
    if len(set(widths)) > 1:
        raise TheoryError(
            f"the model has {widths[0]} outputs on x and {widths[1]} on x2: a kernel needs as many on both."
        )
    width = widths[0]
    kernel = torch.zeros((m, width, m2, width) if full else (m, 1, m2, 1), dtype=torch.float64, device=left.device)
    size = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    block = max(1, memory_bytes // (2 * width * size))
    for i in range(0, m, block):
        rows = slice(i, i + block)
        j_left = _jacobian(model, left, rows, mode)
        for k in range(i if same else 0, m2, block):
            columns = slice(k, k + block)
            j_right = j_left if same and k == i else _jacobian(model, right, columns, mode)
            if full:
                part = torch.einsum("icp,jdp->icjd", j_left, j_right)
            else:  # the trace over outputs is one product of the flattened rows
                part = (j_left.flatten(1) @ j_right.flatten(1).T / width)[:, None, :, None]
            kernel[rows, :, columns] = part
            if same:
                kernel[columns, :, rows] = part.permute(2, 3, 0, 1)
    return kernel if full else kernel[:, 0, :, 0]


def _jacobian(model: nn.Module, x: Tensor, samples: slice, mode: str) -> Tensor:
    """Return the derivatives of some samples' outputs by the trainable parameters, (samples, outputs, parameters)."""
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    if mode == "batch":
        jacobian = jacrev(lambda chosen: _outputs(model, chosen, x)[samples])(parameters)
    else:
        one = jacrev(lambda chosen, sample: _outputs(model, chosen, sample.unsqueeze(0))[0])
        try:
            jacobian = vmap(one, (None, 0), randomness="different")(parameters, x[samples])
        except (RuntimeError, ValueError, TypeError) as error:  # such as an LSTM, or a branch on values
            reason = str(error).strip().split("\n")[0].rstrip(".")
            raise TheoryError(
                f"torch.func.vmap cannot run the model sample by sample ({reason}). Use mode='batch': the kernel is "
                "the same where no sample depends on another."
            ) from error
    return torch.cat([j.detach().flatten(2) for j in jacobian.values()], 2)


def _outputs(model: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    """Return (samples, outputs), also of a model that returns one number per sample."""
    # copies: a BatchNorm in train mode updates its buffers in place, which vjp forbids on outer tensors
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    out = functional_call(model, (parameters, buffers), (x,))
    if not isinstance(out, Tensor):
        raise TheoryError(f"the model returns {type(out).__name__}; wrap it so that it returns one tensor.")
    if out.dim() == 0:
        raise TheoryError("the model returns one number for the whole batch: its kernel needs outputs per sample.")
    return out.reshape(len(out), -1)


def _output_count(model: nn.Module, x: Tensor) -> int:
    """Return the number of outputs per sample; refuse a model whose output on x differs between runs."""
    with torch.no_grad(), running("the model", x):
        state, out = torch.get_rng_state(), _outputs(model, {}, x)
        if not bool(torch.isfinite(out).all()):
            raise TheoryError("the model's output is not finite on these inputs.")
        # a model that draws random numbers may drop a path only now and then
        again = 1 if torch.equal(state, torch.get_rng_state()) else 16
        runs = (_outputs(model, {}, x) for _ in range(again))
        same = all(torch.allclose(run, out, rtol=1e-4, atol=1e-4 * float(out.abs().max())) for run in runs)
    if not same:
        raise TheoryError(
            "the model's output is noise in part: two runs on the same inputs differ. Call model.eval(), or take "
            "its functional dropout or random paths away, for a kernel without noise."
        )
    return out.shape[1]


def _require_independent_samples(model: nn.Module) -> None:
    """Refuse layers whose samples depend on each other."""
    for name, module in model.named_modules():
        by_batch = isinstance(module, nn.modules.batchnorm._BatchNorm)
        if by_batch and (module.training or module.running_mean is None):
            raise TheoryError(
                f"{name or 'the model'} is a BatchNorm in train mode: its samples depend on each other. "
                "Use mode='batch', or model.eval() for the running statistics."
            )
