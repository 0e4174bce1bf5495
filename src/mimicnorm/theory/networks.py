"""Finite-width networks whose infinite-width limit the kernels describe, to test one against the other."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from mimicnorm.arguments import positive_int
from mimicnorm.errors import TheoryError

from .kernels import Scales, block_scales, require_transition
from .transition import Transition


class NtkLinear(nn.Module):
    """h = sqrt(w2 / fan_in) W a + sqrt(b2) b with standard normal W and b, the rows of W perhaps centred."""

    def __init__(self, fan_in: int, fan_out: int, w2: float, b2: float, centred: bool, rng: torch.Generator):
        """Draw the parameters."""
        super().__init__()
        self.scale, self.bias_scale, self.centred = math.sqrt(w2 / fan_in), math.sqrt(b2), centred
        self.weight = nn.Parameter(torch.randn(fan_out, fan_in, dtype=torch.float64, generator=rng))
        self.bias = nn.Parameter(torch.randn(fan_out, dtype=torch.float64, generator=rng)) if b2 else None

    def forward(self, a: Tensor) -> Tensor:
        """Return the pre-activations."""
        weight = self.weight - self.weight.mean(1, keepdim=True) if self.centred else self.weight
        h = self.scale * (a @ weight.T)
        return h if self.bias is None else h + self.bias_scale * self.bias


class FiniteNetwork(nn.Module):
    """A plain or residual network in the parametrisation of `kernels`, drawn at random.

    ``batch_norm`` puts an affine-free BatchNorm after every layer but the last (after that too with `last_norm`).

    Args:
        inputs: n_0.
        width: of every hidden layer.
        depth: weight layers of a plain network, or blocks of a residual one.
        transition: the layers after the first; its weight-mean gain is made exact for `width`.
        outputs: of the last layer (of a residual network: of its readout).
        residual: scales as for `residual_kernels` makes a residual network; None a plain one.
        layers_per_block: of a residual network.
        readout: end a residual network with one more (activation, layer); without it the output is h itself.
        last_norm: whether BatchNorm follows the last layer, too.
        seed: of the weights.

    Example:
        >>> FiniteNetwork(10, 64, 3, Transition("weight_mean"))(torch.ones(5, 10)).shape
        torch.Size([5, 1])
    """

    def __init__(
        self,
        inputs: int,
        width: int,
        depth: int,
        transition: Transition,
        *,
        outputs: int = 1,
        residual: Scales | None = None,
        layers_per_block: int = 2,
        readout: bool = True,
        last_norm: bool = False,
        first_w2: float = 1.0,
        first_b2: float = 0.0,
        seed: int = 0,
    ):
        """Draw the parameters."""
        super().__init__()
        require_transition(transition)
        depth = positive_int(depth, "depth", error=TheoryError)
        inputs = positive_int(inputs, "inputs", error=TheoryError)
        outputs = positive_int(outputs, "outputs", error=TheoryError)
        least = 2 if transition.kind == "weight_mean" else 1  # centring makes a single weight zero
        width = positive_int(width, f"width of a {transition.kind} network", least=least, error=TheoryError)
        rng = torch.Generator().manual_seed(positive_int(seed, "seed", least=0, error=TheoryError))
        self.inputs = inputs
        plain = residual is None
        self.phi = transition.activation
        self.scales = [] if residual is None else block_scales(residual, depth)
        self.layers_per_block = layers_per_block
        hidden = depth - 1 if plain else depth * layers_per_block + readout
        sizes = [width] * (hidden + 1)
        if plain or readout:
            sizes[-1] = outputs
        batch_norm, b2 = transition.kind == "batch_norm", transition.sigma_b2
        # effective_w2 is free of fan_in: dividing out (n - 1)/n restores it at this width
        w2 = transition.effective_w2 / ((1 - 1 / width) if transition.kind == "weight_mean" else 1)
        layers = [NtkLinear(inputs, sizes[0], first_w2, first_b2, False, rng)]
        layers += [NtkLinear(width, n, w2, b2, transition.kind == "weight_mean", rng) for n in sizes[1:]]
        self.layers = nn.ModuleList(layers)
        norms = [batch_norm and (last_norm or i < hidden) for i in range(hidden + 1)]
        self.norms = nn.ModuleList(
            nn.BatchNorm1d(n, eps=1e-12, affine=False, track_running_stats=False) if norm else nn.Identity()
            for n, norm in zip(sizes, norms, strict=True)
        )

    def hidden(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the pre-activations h^1, h^2, ... (of a residual network: the sum after each block)."""
        if not isinstance(x, Tensor) or x.dim() < 2 or x[0].numel() != self.inputs:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise TheoryError(f"x must be a tensor of samples with {self.inputs} features each, not {got}.")
        steps = zip(self.layers, self.norms, strict=True)

        def layer(a: Tensor) -> Tensor:
            linear, norm = next(steps)
            return norm(linear(a))

        h = layer(x.flatten(1).to(torch.float64))
        yield h
        for scale in self.scales:
            branch = h
            for _ in range(self.layers_per_block):
                branch = layer(self.phi(branch))
            h = h + scale * branch
            yield h
        for linear, norm in steps:  # all others of a plain network, or the readout of a residual one
            h = norm(linear(self.phi(h)))
            yield h

    def forward(self, x: Tensor) -> Tensor:
        """Return the last pre-activations."""
        *_, last = self.hidden(x)
        return last
