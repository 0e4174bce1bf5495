"""Random networks: residual, many-operand, concatenated, shared, pre-activation, gated, in-place."""

from __future__ import annotations

import invariants
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from mimicnorm.methods import MimicNorm

WIDTH = 4
STEPS = ("conv", "pre", "relu", "residual", "many", "concat", "shared", "gate", "pool", "project", "view", "split")


class Random(nn.Module):
    """A stem, the steps drawn, a head; every step keeps the width."""

    def __init__(self, steps: list[str], inplace: bool, linear: bool):
        super().__init__()
        self.steps, self.inplace, self.linear = steps, inplace, linear
        self.convs = nn.ModuleDict({str(i): nn.ModuleList(self.make() for _ in range(3)) for i in range(len(steps))})
        self.norms = nn.ModuleDict({str(i): nn.ModuleList(self.norm() for _ in range(3)) for i in range(len(steps))})
        self.join = nn.ModuleDict({str(i): self.make(2 * WIDTH) for i, s in enumerate(steps) if s == "concat"})
        self.stem, self.stem_norm = self.make(), self.norm()
        self.shared = self.make()
        self.head = nn.Linear(WIDTH, 3) if linear else nn.Conv2d(WIDTH, 3, 1)

    def make(self, i: int = WIDTH) -> nn.Module:
        return nn.Linear(i, WIDTH) if self.linear else nn.Conv2d(i, WIDTH, 3, padding=1, bias=False)

    def norm(self) -> nn.Module:
        return nn.BatchNorm1d(WIDTH) if self.linear else nn.BatchNorm2d(WIDTH)

    def act(self, x):
        return F.relu(x, inplace=self.inplace)

    def forward(self, x):
        x = self.act(self.stem_norm(self.stem(x)))
        for i, step in enumerate(self.steps):
            c, n = self.convs[str(i)], self.norms[str(i)]
            if step == "conv":
                x = self.act(n[0](c[0](x)))
            elif step == "pre":
                x = x + c[1](self.act(n[1](c[0](self.act(n[0](x))))))
            elif step == "relu":
                x = F.relu(x)
            elif step == "residual":
                y = n[1](c[1](self.act(n[0](c[0](x)))))
                if self.inplace:
                    y += x
                    x = self.act(y)
                else:
                    x = F.relu(x + y)
            elif step == "many":
                x = F.relu(n[0](c[0](x)) + n[1](c[1](x)) + n[2](x))
            elif step == "concat":
                x = self.act(n[2](self.join[str(i)](torch.cat((x, self.act(n[0](c[0](x)))), 1))))
            elif step == "shared":
                x = self.act(n[1](self.shared(self.act(n[0](self.shared(x))))))
            elif step == "gate":
                y = n[0](c[0](x))
                pooled = y if self.linear else y.mean((2, 3), keepdim=True)
                x = F.relu(x + y * torch.sigmoid(c[1](pooled)))
            elif step == "pool" and not self.linear:
                x = F.max_pool2d(x, 3, 1, 1)
            elif step == "project":
                x = F.relu(n[0](c[0](x)) + n[2](c[2](F.relu(n[1](c[1](x))))))
            elif step == "view":
                y = c[0](x)
                x = self.act(n[0](y.flatten(1).view_as(y)))
            elif step == "split":
                a, b = n[0](c[0](x)).chunk(2, 1)
                x = torch.cat((F.relu(a), b), 1)
        return self.head(x) if self.linear else self.head(x).mean((2, 3))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    steps=st.lists(st.sampled_from(STEPS), min_size=1, max_size=4),
    inplace=st.booleans(),
    linear=st.booleans(),
    residual=st.sampled_from(["sqrt", "linear", None]),
)
def test_random_networks_convert_with_all_invariants(steps, inplace, linear, residual):
    torch.manual_seed(0)
    model = Random(steps, inplace, linear)
    x = torch.randn((4, WIDTH) if linear else (4, WIDTH, 5, 5))
    model(x).square().sum().backward()
    reached = {n.rpartition(".")[0] for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for m in model.modules():
        if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d)):
            m.reset_running_stats()
    method = MimicNorm(min_fan_in=3, residual=residual)
    invariants.surgery_removes_normalisation_and_nothing_else(model, x)
    invariants.no_sample_sees_another(
        invariants.convert(model, MimicNorm(min_fan_in=3, residual=residual, last_norm=False), example=x), x
    )
    converted = invariants.convert(model, method, example=x)
    invariants.nothing_is_lost(model, converted)
    converted.train()
    F.cross_entropy(converted(x), torch.tensor([0, 1, 2, 0])).backward()
    for name, p in converted.named_parameters():
        if name.rpartition(".")[0] in reached:
            assert p.grad is not None, name
            assert p.grad.isfinite().all(), name
