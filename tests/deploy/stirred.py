"""Converted networks with the numbers of a trained one: nothing at 0 or 1, where a wrong fold would not show."""

from __future__ import annotations

import torch
from torch import nn

from mimicnorm.layers import LastNorm
from mimicnorm.methods import Method
from mimicnorm.surgery.convert import convert


def stirred(model: nn.Module, method: Method, example, **kw) -> nn.Module:
    """Convert, draw every bias, scalar and statistic, and every weight that starts at zero; in eval mode."""
    converted = convert(model, method, example=example, **kw)
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for m in converted.modules():
            for name, p in m._parameters.items():
                if p is None:
                    continue
                if p.numel() == 1 or name == "gain":  # not far from where they start, or deep networks explode
                    p.copy_((p + 0.3 * (p == 0)) * (0.75 + 0.5 * torch.rand(p.shape, generator=g)))
                elif name == "bias":
                    p.copy_(0.1 * torch.randn(p.shape, generator=g))
                elif not p.any():
                    p.copy_(torch.randn(p.shape, generator=g) / p[0].numel() ** 0.5)
            if isinstance(m, LastNorm):
                m.running_mean.copy_(torch.randn(m.running_mean.shape, generator=g))
                m.running_var.copy_(0.5 + torch.rand(m.running_var.shape, generator=g))
    return converted.eval()
