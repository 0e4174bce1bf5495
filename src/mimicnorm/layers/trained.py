"""Trained BatchNorms: gamma and beta go on training, the running statistics become constants.

In evaluation mode a BatchNorm is the affine map ``gamma (x - mean) / sigma + beta``. The layer before it takes it up,
and applies ``(gamma / sigma) W`` with the bias ``beta + gamma (b - mean) / sigma``, made in every forward at a plain
layer's memory. W, b, gamma and beta stay parameters: training goes on as with a BatchNorm whose statistics are frozen.
Where no layer can take it up, it stays as an affine map of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from mimicnorm.layers.derive import derive_
from mimicnorm.layers.weight import Centring, wants_plain_expression, widened
from mimicnorm.layers.weight_mean import GradientCentred

_RECOVERABLE = 1e-3  # of |beta|: with a smaller gamma, rounding hides the normalised input in the output


class TrainedNorm(NamedTuple):
    """What a trained BatchNorm computes in evaluation mode."""

    gamma: Parameter | None
    beta: Parameter | None
    mean: Tensor
    var: Tensor
    eps: float


class _HoldsNorm:
    """A module with the parameters and constants of a trained BatchNorm.

    Attributes:
        gamma: Trainable scale per channel, or None.
        beta: Trainable shift per channel, or None.
        norm_mean: Constant; None if there is no BatchNorm.
        norm_var: Constant; None if there is no BatchNorm.
        norm_eps: Added to the variance.
    """

    gamma: Tensor | None
    beta: Tensor | None
    norm_mean: Tensor | None
    norm_var: Tensor | None
    norm_eps: float

    def _hold(self: Any, norm: TrainedNorm | None) -> None:
        gamma, beta, mean, var, eps = norm or (None, None, None, None, 0.0)
        self.register_parameter("gamma", gamma)
        self.register_parameter("beta", beta)
        self.register_buffer("norm_mean", mean)
        self.register_buffer("norm_var", var)
        self.norm_eps = eps


# -- taken up by a layer -----------------------------------------------------------------------------------------


class TrainedLayer(_HoldsNorm, GradientCentred):
    """A trained layer and, if it took one up, the BatchNorm after it: ``gamma (W x + b - mean) / sigma + beta``.

    Row means of W stay where training left them.

    Attributes:
        centring: "backward" (the weight's gradient is centred, MimicNorm) or None.
    """

    added_parameters = ("gamma", "beta")
    residual_scale = None

    @property
    def weight_label(self) -> str:  # pyrefly: ignore[bad-override]
        """What the layer's repr says."""
        return "trained" if self.centring is None else "trained, gradient centred"

    def own_weight(self) -> Tensor | None:
        """Return W if it is applied as it is: there is no BatchNorm, and a hook centres the gradient."""
        return super().own_weight() if self.norm_var is None else None

    def scale_and_bias(
        self, weight: Tensor, bias: Tensor | None, groups: int | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """gamma / sigma, and beta + gamma (b - mean) / sigma."""
        del weight, groups
        if self.norm_mean is None or self.norm_var is None:
            return None, bias
        make = _scale_and_shift if wants_plain_expression() or torch.compiler.is_compiling() else _ScaleAndShift.apply
        return make(self.gamma, self.beta, bias, self.norm_mean, self.norm_var, self.norm_eps)


def _scale_and_shift(
    gamma: Tensor | None, beta: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    scale = torch.rsqrt(widened(var) + eps)
    scale = scale if gamma is None else scale * gamma
    away = -widened(mean) if bias is None else bias - widened(mean)
    return scale, away * scale if beta is None else torch.addcmul(beta.to(scale.dtype), away, scale)


class _ScaleAndShift(torch.autograd.Function):
    """Saves parameters and constants alone, and makes what else it needs again. Differentiable twice."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        *tensors, ctx.eps = given
        ctx.save_for_backward(*tensors)
        return _scale_and_shift(*given)

    @staticmethod
    def backward(ctx: Any, grad_scale: Tensor, grad_shift: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        gamma, beta, bias, mean, var = ctx.saved_tensors
        inverse = torch.rsqrt(widened(var) + ctx.eps)
        away = -widened(mean) if bias is None else bias - widened(mean)
        grads: list[Tensor | None] = [None, None, None]
        if gamma is not None:
            grads[0] = (torch.addcmul(grad_scale, grad_shift, away) * inverse).to(gamma.dtype)
        if beta is not None:
            grads[1] = grad_shift.to(beta.dtype)
        if bias is not None:
            grads[2] = (grad_shift * (inverse if gamma is None else inverse * gamma)).to(bias.dtype)
        return *grads, None, None, None


def keep_(layer: nn.Module, norm: TrainedNorm | None, centring: Centring = None) -> nn.Module:
    """Let a layer take up the trained BatchNorm after it, in place: the same object, the same weight.

    Example:
        >>> norm = nn.BatchNorm1d(2).eval()
        >>> norm.running_mean, norm.running_var = torch.ones(2), 4 * torch.ones(2)
        >>> layer, x = nn.Linear(3, 2), torch.ones(1, 3)
        >>> before = norm(layer(x))
        >>> parts = TrainedNorm(norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.eps)
        >>> torch.allclose(keep_(layer, parts)(x), before, atol=1e-6)
        True
    """
    trained: Any = derive_(layer, TrainedLayer)
    trained._hold(norm)
    trained.centring = centring
    return layer


# -- on its own --------------------------------------------------------------------------------------------------


class TrainedAffine(_HoldsNorm, nn.Module):
    """A trained BatchNorm that no layer takes up: ``gamma (x - mean) / sigma + beta`` per channel.

    The gradient of gamma needs the normalised input. Freeze gamma (``requires_grad_(False)``), and nothing is saved.

    Args:
        norm: What it computes.
        channel_dim: The dimension of the channels.
        before_relu: Whether an in-place ReLU alone reads the output. What is then left in the output's memory is
            saved anyway, and says the normalised input wherever a gradient arrives: ``(y - beta) / gamma``. It is used
            unless a gamma is too small for that.
    """

    def __init__(self, norm: TrainedNorm, channel_dim: int = 1, before_relu: bool = False):
        super().__init__()
        self._hold(norm)
        self.channel_dim = channel_dim
        self.before_relu, self.relu_seen = before_relu, False
        self.saves_output = before_relu and recoverable(norm.gamma, norm.beta)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the affine map; always a fresh tensor."""
        if self.channel_dim != 1 and x.dim() > 2:
            return self._map(x.movedim(self.channel_dim, 1)).movedim(1, self.channel_dim)
        return self._map(x)

    def _map(self, x: Tensor) -> Tensor:
        tensors = (x, self.norm_mean, self.norm_var, self.gamma, self.beta)
        if not torch.is_grad_enabled() or wants_plain_expression() or torch.compiler.is_compiling():
            return F.batch_norm(*tensors, False, 0.0, self.norm_eps)
        return _ApplyAffine.apply(*tensors, self)

    def as_affine(self) -> tuple[Tensor, Tensor]:
        """What it does: as ``Shift.as_affine``."""
        assert self.norm_mean is not None
        assert self.norm_var is not None
        return _scale_and_shift(self.gamma, self.beta, None, self.norm_mean, self.norm_var, self.norm_eps)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.saves_output = self.before_relu and recoverable(self.gamma, self.beta)

    def extra_repr(self) -> str:
        """Show the width."""
        assert self.norm_mean is not None
        return f"{self.norm_mean.numel()}"


def recoverable(gamma: Tensor | None, beta: Tensor | None) -> bool:
    """Tell whether the normalised input can be recovered from the output, to working precision."""
    if gamma is None or gamma.is_meta:
        return False
    least = 0.0 if beta is None else _RECOVERABLE * beta.detach().abs()
    return bool((gamma.detach().abs() > least).all())


class _ApplyAffine(torch.autograd.Function):
    """Saves the input if gamma trains, or the memory of the output after a ReLU has written into it.

    The ReLU passes no gradient on where it has overwritten the output; ``.data`` hides that write from autograd. The
    backward pass is not PyTorch's: for a batch of one with the strides of a permuted tensor, that one is wrong.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, var: Tensor, gamma: Tensor | None, beta: Tensor | None, module: Any
    ) -> Tensor:
        ctx.eps, ctx.module = module.norm_eps, module
        ctx.saves_output = module.saves_output and ctx.needs_input_grad[3]
        y = F.batch_norm(x, mean, var, gamma, beta, False, 0.0, ctx.eps)
        if ctx.saves_output:
            ctx.alias = y.detach()  # its version tells whether somebody wrote into the output
        saved = None if not ctx.needs_input_grad[3] else y.data if ctx.saves_output else x
        ctx.save_for_backward(saved, mean, var, gamma, beta)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        saved, mean, var, gamma, beta = ctx.saved_tensors
        needs_x, _, _, needs_gamma, needs_beta, *_ = ctx.needs_input_grad
        if ctx.saves_output and torch.is_grad_enabled():
            raise RuntimeError(
                "second derivatives need the input of a trained BatchNorm, which is not saved: set saves_output = "
                "False on each mimicnorm.layers.TrainedAffine"
            )
        if ctx.saves_output and not ctx.module.relu_seen and type(saved) is Tensor:  # once: it makes a GPU wait
            if ctx.alias._version > 0 and bool((saved < 0).any()):
                raise RuntimeError(
                    "something else than a ReLU wrote into the output of a trained BatchNorm, from which the gradient "
                    "of gamma is taken: set saves_output = False on that mimicnorm.layers.TrainedAffine"
                )
            ctx.module.relu_seen = True
        shape = [1, -1] + [1] * (grad.dim() - 2)
        dims = [d for d in range(grad.dim()) if d != 1]
        grad_x = grad_gamma = grad_beta = None
        inverse = torch.rsqrt(widened(var) + ctx.eps)
        if needs_x:
            scale = inverse if gamma is None else inverse * gamma
            grad_x = grad * scale.to(grad.dtype).reshape(shape)
        if needs_beta:
            grad_beta = grad.sum(dims, dtype=widened(beta).dtype).to(beta.dtype)
        if needs_gamma:
            middle, factor = mean, inverse
            if ctx.saves_output:  # the normalised input is (y - beta) / gamma
                middle = torch.zeros_like(gamma) if beta is None else beta
                factor = 1 / torch.where(gamma == 0, 1, widened(gamma))
            away = saved - widened(middle).reshape(shape)
            grad_gamma = ((away * grad).sum(dims) * factor).to(gamma.dtype)
        return grad_x, None, None, grad_gamma, grad_beta, None


# -- the original's checkpoints ----------------------------------------------------------------------------------


class OriginalKeys:
    """A hook that lets a converted network load the checkpoints of the network it was made from.

    Args:
        moved: Old keys -> new keys of each tensor; several of either where a module has several names.
        dropped: Old keys that stand for nothing any more.
    """

    def __init__(self, moved: dict[tuple[str, ...], tuple[str, ...]], dropped: list[str]):
        self.moved, self.dropped = moved, dropped

    def __call__(self, module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
        del module
        for old, new in self.moved.items():
            missing = [prefix + key for key in new if prefix + key not in state_dict]
            given = [prefix + key for key in old if prefix + key in state_dict]
            if missing and given:
                values = [state_dict.pop(key) for key in given]
                state_dict.update(dict.fromkeys(missing, values[0]))
        for key in self.dropped:
            state_dict.pop(prefix + key, None)
