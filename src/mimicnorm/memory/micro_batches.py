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
from mimicnorm.memory.passes import Passes, Watch, explained
from mimicnorm.memory.replica import batch_size


class _Logits:
    """Stands in for a LastNorm: keeps the logits of the first pass and lets all pass as they are."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []

    def __call__(self, logits: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            self.parts.append(logits.detach().clone())
        return logits


@dataclass
class MicroBatchPasses(Passes):
    """The passes of one step in micro-batches of ``size`` samples."""

    size: int
    heads: dict[LastNorm, _Logits] = field(init=False)

    def __post_init__(self) -> None:
        modules = dict(self.replica.model.named_modules())
        for name, module in modules.items():
            norm = isinstance(module, _BatchNorm) and not isinstance(module, LastNorm)
            if norm and (module.training or module.running_mean is None):
                raise MemoryPredictionError(
                    f"micro_batch={self.size}: {name} ({type(module).__name__}) is a BatchNorm in training mode, which "
                    "mixes the samples of a micro-batch, so microbatch.backward refuses the network. Convert it first, "
                    "or leave micro_batch out"
                )
        self.heads = {m: _Logits() for m in modules.values() if isinstance(m, LastNorm) and m.training}

    def run(self, watch: Watch) -> Any:
        """Run all micro-batches; returns the outputs of the whole batch."""
        return self._in_two_passes(watch) if self.heads else self._in_one_pass(watch)

    def _pieces(self) -> list[tuple[tuple, dict[str, Any]]]:
        args, kwargs = self.replica.args, self.replica.kwargs
        samples = batch_size(args, kwargs)

        def piece(start: int) -> tuple[tuple, dict[str, Any]]:
            def cut(tensor: Tensor) -> Tensor:
                return tensor[start : start + self.size] if tensor.dim() and tensor.shape[0] == samples else tensor

            return tree_map_only(Tensor, cut, (args, kwargs))

        return [piece(start) for start in range(0, samples, self.size)]

    def _in_one_pass(self, watch: Watch) -> Any:
        outputs = []
        for args, kwargs in self._pieces():
            with watch.forward():
                output = self.call(args, kwargs)
                outputs.append(tree_map_only(Tensor, lambda t: t.detach().clone(), output))
                value = self.value(output)
                del output
            with watch.backward():
                self.backward(value)
            del value
        return self._joined(outputs)

    def _in_two_passes(self, watch: Watch) -> Any:
        pieces, outputs = self._pieces(), []
        for norm, logits in self.heads.items():
            logits.parts.clear()
            norm.intercept = logits
        with watch.forward(), torch.no_grad():
            for args, kwargs in pieces:
                outputs.append(self.call(args, kwargs))
        with watch.forward():
            whole = self._joined(outputs)
            outputs.clear()
            normed = self._normed()
            leaves, spec = tree_flatten(whole)
            leaves = [t.detach().requires_grad_() if _learns(t) else t for t in leaves]
            value = self.value(tree_unflatten(leaves, spec))
        with watch.backward(), explained("the backward pass", self.replica):
            learning = [i for i, leaf in enumerate(leaves) if _learns(leaf)]
            grads = torch.autograd.grad(value, [leaves[i] for i in learning], allow_unused=True)
            of_logits = [torch.autograd.grad(n, raw, torch.ones_like(n)) for raw, n in normed]
        of_outputs = {i: grad for i, grad in zip(learning, grads, strict=True) if grad is not None}
        del value, leaves, grads
        for start, (args, kwargs) in zip(range(0, len(pieces) * self.size, self.size), pieces, strict=True):
            with watch.forward():
                output = tree_flatten(self.call(args, kwargs))[0]
            with watch.backward(), explained("the backward pass", self.replica):
                parts = [grad[start : start + self.size] for grad in of_outputs.values()]
                torch.autograd.backward([output[i] for i in of_outputs], parts)
            del output, parts
        return whole, normed, of_outputs, of_logits

    def _normed(self) -> list[tuple[Tensor, Tensor]]:
        """The logits of the whole batch and what each LastNorm makes of them."""
        pairs = []
        for norm, logits in self.heads.items():
            raw = torch.cat(logits.parts).requires_grad_()
            logits.parts.clear()
            norm.intercept = None
            pairs.append((raw, norm.forward(raw)))
            norm.intercept = logits
        return pairs

    def _joined(self, outputs: list[Any]) -> Any:
        columns = zip(*(tree_flatten(output)[0] for output in outputs), strict=True)
        leaves = [torch.cat(c) if isinstance(c[0], Tensor) and c[0].dim() else c[0] for c in columns]
        return tree_unflatten(leaves, tree_flatten(outputs[0])[1])


def _learns(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
