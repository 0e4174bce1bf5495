"""The last BN folded into the loss (the paper's conclusion), for networks converted without a LastNorm."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mimicnorm.layers import LastNorm
from mimicnorm.methods import LastBN
from mimicnorm.methods.mimicnorm import LogitScale


class LastNormCrossEntropy(nn.CrossEntropyLoss):
    """Cross-entropy of the logits after a LastNorm: same value and gradient as a LastNorm in the head.

    The network's own output stays the raw logits; ``normalise`` gives what to predict from. The optimizer needs the
    parameters of this loss, too: ``mimicnorm.param_groups(model, loss_fn, weight_decay=...)``.

    Args:
        num_classes: The number of logits per sample.
        eps: Of the LastNorm.
        momentum: Of the LastNorm.
        logit_scale: Of the LastNorm; "auto" is on below 140 classes, as in ``MimicNorm`` (give True where a sample has
            many predictions).
        **cross_entropy: As for ``nn.CrossEntropyLoss``: weight, ignore_index, reduction, label_smoothing.

    Example:
        >>> loss_fn = LastNormCrossEntropy(10, label_smoothing=0.1)
        >>> logits, targets = torch.randn(64, 10), torch.randint(10, (64,))
        >>> bool(loss_fn(logits, targets) == loss_fn(1000 * logits + 5, targets).round(decimals=4))  # doctest: +SKIP
        True
    """

    def __init__(
        self,
        num_classes: int,
        *,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        logit_scale: LogitScale = "auto",
        **cross_entropy: Any,
    ):
        super().__init__(**cross_entropy)
        scaled = bool(LastBN(logit_scale=logit_scale).scales_logits(num_classes, dense=False))
        self.last_norm = LastNorm(num_classes, eps=eps, momentum=momentum, logit_scale=scaled)

    def normalise(self, logits: Tensor) -> Tensor:
        """The logits as the loss sees them."""
        return self.last_norm(logits)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Normalise, then cross-entropy."""
        return super().forward(self.normalise(input), target)
