"""Torch's own losses: which of them are means over samples is known without a try."""

from __future__ import annotations

import functools
import inspect
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mimicnorm.microbatch.batches import samples_in
from mimicnorm.microbatch.loss import LastNormCrossEntropy

_OF_CLASSES = {F.cross_entropy, F.nll_loss, nn.CrossEntropyLoss, nn.NLLLoss, LastNormCrossEntropy}
_OF_VALUES = {F.binary_cross_entropy, F.binary_cross_entropy_with_logits, nn.BCELoss, nn.BCEWithLogitsLoss}
_BROADCASTING = {
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.kl_div),
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.KLDivLoss),
}


@dataclass(frozen=True)
class Verdict:
    """Whether the loss of a batch is the mean (or sum) of the losses of its parts, and if not, why."""

    in_pieces: bool
    why: str = ""


def judge(loss_fn: Any, targets: Any, as_sum: bool) -> Verdict | None:
    """What is known of a loss: torch's, as modules, functions or partials of them; None if nothing is.

    Args:
        loss_fn: The loss.
        targets: All that it will be given.
        as_sum: Whether it has to be a sum over samples, else a mean.
    """
    loss, keywords, has_arguments = unwrapped(loss_fn)
    is_module = isinstance(loss, nn.Module)
    kind = type(loss) if is_module else loss
    home = (getattr(kind, "__module__", None) or "").partition(".")[0]
    if has_arguments or (home != "torch" and kind is not LastNormCrossEntropy):
        return None
    if is_module and (loss._forward_hooks or loss._forward_pre_hooks):
        return None
    options = loss if is_module else SimpleNamespace(**_defaults(loss) | keywords)
    reduction = _reduction(options)
    if reduction == "none" or (reduction in ("mean", "batchmean", "sum") and (reduction == "sum") != as_sum):
        return Verdict(False, f'reduction="{reduction}"')
    weighted = getattr(options, "weight", None) is not None
    if kind in _OF_CLASSES:
        return Verdict(True) if as_sum else _of_classes(options, weighted, targets)
    if weighted or getattr(options, "pos_weight", None) is not None:
        return None  # of a weight's shape depends whether it is one of the samples
    if kind in _OF_VALUES:
        return Verdict(True)
    # Targets of one value per sample may meet outputs of shape (n, 1): each output is then compared with all targets.
    several = all(math.prod(t.shape[1:]) > 1 for t in samples_in(targets))
    return Verdict(True) if kind in _BROADCASTING and several else None


def _of_classes(options: Any, weighted: bool, targets: Any) -> Verdict:
    """Cross-entropy divides by the weight of the classes that are there; given probabilities, by the samples."""
    classes = [t for t in samples_in(targets) if isinstance(t, Tensor) and not t.is_floating_point()]
    if classes and weighted:
        return Verdict(False, "class weights")
    if any(bool((t == options.ignore_index).any()) for t in classes):
        return Verdict(False, f"targets to ignore ({options.ignore_index})")
    return Verdict(True)


def unwrapped(loss_fn: Any) -> tuple[Any, dict[str, Any], bool]:
    """The module or function inside partials, ``torch.compile`` and a module's bound ``forward``.

    Returns:
        It, the keywords that partials give it, and whether they give it positional arguments as well.
    """
    keywords: dict[str, Any] = {}
    has_arguments = False
    while True:
        owner = getattr(loss_fn, "__self__", None)
        compiled = getattr(loss_fn, "_orig_mod", getattr(loss_fn, "_torchdynamo_orig_callable", None))
        if isinstance(loss_fn, functools.partial):
            has_arguments = has_arguments or bool(loss_fn.args)
            keywords, loss_fn = {**loss_fn.keywords, **keywords}, loss_fn.func
        elif compiled is not None:
            loss_fn = inspect.unwrap(compiled)  # a partial is wrapped once more
        # Another method of a module is a function of the user's: it may use no more than a part of the module.
        elif isinstance(owner, nn.Module) and loss_fn.__name__ in ("forward", "_wrapped_call_impl", "_call_impl"):
            loss_fn = owner
        else:
            return loss_fn, keywords, has_arguments


def mixes_samples(loss_fn: object) -> bool:
    """Whether a loss is a module with batch statistics of its own."""
    loss, _, _ = unwrapped(loss_fn)
    return isinstance(loss, nn.Module) and any(isinstance(m, _BatchNorm) and m.training for m in loss.modules())


def _defaults(function: Any) -> dict[str, Any]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # written in C
        return {}
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def _reduction(options: Any) -> Any:
    """How a loss puts its values together, by today's argument or by the two that came before it."""
    if getattr(options, "reduce", None) is False:
        return "none"
    return "sum" if getattr(options, "size_average", None) is False else getattr(options, "reduction", None)
