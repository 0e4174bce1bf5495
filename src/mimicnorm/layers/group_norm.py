"""GroupNorm in the place of a BatchNorm, with the parameters it had (Wu and He 2018)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import Parameter


class GroupNorm(nn.GroupNorm):
    """``nn.GroupNorm`` with given gamma and beta (or none), its channels along any dimension."""

    def __init__(
        self,
        groups: int,
        channels: int,
        gamma: Parameter | None,
        beta: Parameter | None,
        channel_dim: int = 1,
        eps: float = 1e-5,
    ):
        super().__init__(groups, channels, eps, affine=False)
        self.affine = gamma is not None
        self.register_parameter("weight", gamma)
        self.register_parameter("bias", beta)
        self.channel_dim = channel_dim

    def forward(self, input: Tensor) -> Tensor:
        """Normalise each sample's groups of channels."""
        if self.channel_dim == 1 or input.dim() == 2:
            return super().forward(input)
        return super().forward(input.movedim(self.channel_dim, 1)).movedim(1, self.channel_dim)


def group_count(channels: int, positions: int, most: int) -> int:
    """How many groups: the largest number up to ``most`` that divides and leaves 16 values or more to a group.

    Fewer values say nothing once normalised (of two, only the sign of their difference): a BatchNorm on single
    vectors gets fewer groups, down to one.

    Example:
        >>> group_count(64, 49, 32), group_count(24, 49, 32), group_count(64, 1, 32), group_count(8, 1, 32)
        (32, 24, 4, 1)
    """
    fitting = (g for g in range(min(most, channels), 0, -1) if channels % g == 0)
    return next((g for g in fitting if channels // g * positions >= 16), 1)
