"""The passes of ``microbatch.backward``: one micro-batch's activations at a time.

Micro-batches that are independent of each other run once each, forward and backward. Where a last BN needs the logits
of the whole batch, every micro-batch runs twice: first without a graph, for its logits, then with one, from the
gradient of these logits. What is alive when is as in ``microbatch.backward``, up to a few copies of the logits; its
checks of values, which fake tensors do not have, are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from mimicnorm.errors import MemoryPredictionError
from mimicnorm.layers import LastNorm
from mimicnorm.memory.passes import Passes
from mimicnorm.memory.samples import sample_count


class _Logits(list[Tensor]):
    """Stands in for a LastNorm: collects the logits of the first pass and passes all on as they are."""

    def __call__(self, logits: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            self.append(logits.detach().clone())
        return logits


@dataclass
class MicroBatchPasses(Passes):
    """The passes of one step in micro-batches of ``size`` samples."""

    size: int = field(kw_only=True)

    def run(self) -> Any:
        """Run all micro-batches; returns the outputs of the whole batch."""
        modules = dict(self.model.named_modules())
        for name, module in modules.items():
            norm = isinstance(module, _BatchNorm) and not isinstance(module, LastNorm)
            if norm and (module.training or module.running_mean is None):
                raise MemoryPredictionError(
                    f"micro_batch={self.size}: {name} ({type(module).__name__}) is a BatchNorm in training mode, which "
                    "mixes the samples of a micro-batch, so microbatch.backward refuses the network. Convert it first, "
                    "or leave micro_batch out"
                )
        heads = [module for module in modules.values() if isinstance(module, LastNorm) and module.training]
        return self._in_two_passes(heads) if heads else self._in_one_pass()

    def _pieces(self) -> list[tuple[tuple, dict[str, Any]]]:
        arguments = (self.args, self.kwargs)
        samples = sample_count(arguments)

        def piece(start: int) -> tuple[tuple, dict[str, Any]]:
            def cut(tensor: Tensor) -> Tensor:
                return tensor[start : start + self.size] if tensor.dim() and tensor.shape[0] == samples else tensor

            return tree_map_only(Tensor, cut, arguments)

        return [piece(start) for start in range(0, samples, self.size)]

    def _in_one_pass(self) -> Any:
        outputs = []
        for args, kwargs in self._pieces():
            with self.forward():
                output = self.call(args, kwargs)
                outputs.append(tree_map_only(Tensor, lambda t: t.detach().clone(), output))
                value = self.value(output)
                del output
            self.backward(value)
            del value
        return _joined(outputs)

    def _in_two_passes(self, heads: list[LastNorm]) -> Any:
        pieces, outputs = self._pieces(), []
        logits = {norm: _Logits() for norm in heads}
        for norm in heads:
            norm.intercept = logits[norm]
        for args, kwargs in pieces:
            with self.forward(), torch.no_grad():
                outputs.append(self.call(args, kwargs))
        with self.forward():
            whole = _joined(outputs)
            outputs.clear()
            normed = [_normed(norm, logits[norm]) for norm in heads]
            leaves, spec = tree_flatten(whole)
            leaves = [t.detach().requires_grad_() if _differentiable(t) else t for t in leaves]
            value = self.value(tree_unflatten(leaves, spec))
        with self.tracker.during("backward"), self.explained("the backward pass"):
            indices = [i for i, leaf in enumerate(leaves) if _differentiable(leaf)]
            grads = torch.autograd.grad(value, [leaves[i] for i in indices], allow_unused=True)
            of_logits = [torch.autograd.grad(n, raw, torch.ones_like(n)) for raw, n in normed]
        of_outputs = {i: grad for i, grad in zip(indices, grads, strict=True) if grad is not None}
        del value, leaves, grads
        for number, (args, kwargs) in enumerate(pieces):
            with self.forward():
                output = tree_flatten(self.call(args, kwargs))[0]
            with self.tracker.during("backward"), self.explained("the backward pass"):
                parts = [grad[number * self.size : (number + 1) * self.size] for grad in of_outputs.values()]
                torch.autograd.backward([output[i] for i in of_outputs], parts)
            del output, parts
        return whole, normed, of_outputs, of_logits


def _normed(norm: LastNorm, logits: _Logits) -> tuple[Tensor, Tensor]:
    """Return the logits of the whole batch and what a LastNorm makes of them."""
    raw = torch.cat(logits).requires_grad_()
    logits.clear()
    norm.intercept = None
    normed = norm.forward(raw)
    norm.intercept = logits
    return raw, normed


def _joined(outputs: list[Any]) -> Any:
    columns = zip(*(tree_flatten(output)[0] for output in outputs), strict=True)
    leaves = [torch.cat(c) if isinstance(c[0], Tensor) and c[0].dim() else c[0] for c in columns]
    return tree_unflatten(leaves, tree_flatten(outputs[0])[1])


def _differentiable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
