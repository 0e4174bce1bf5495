"""Whether a BatchNorm's beta can become its layer's bias, and its residual scalar go into its layers' weights.

If not, the BatchNorm becomes a ``Shift`` or a ``Scale``, which is always right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from mimicnorm.methods.edits import LayerEdit
from mimicnorm.surgery import flow, probe
from mimicnorm.surgery.graph import Graph, Node
from mimicnorm.surgery.roles import Roles


@dataclass(frozen=True)
class Folding:
    """What of a BatchNorm its layers can take up; fields as in ``methods.base.Norm``."""

    removable: bool = False
    has_beta: bool = True
    beta_into: str | None = None
    scale_into: tuple[str, ...] = ()
    obstacle: str = ""


class Folder:
    """Looks at each BatchNorm and its layers.

    Args:
        graph: The network.
        modules: Its modules, by name.
        norms: The names of the BatchNorms to be taken out.
        roles: The layers of each.
        layers: What is planned for them.
        probes: What each layer allows.
    """

    def __init__(
        self,
        graph: Graph,
        modules: Mapping[str, nn.Module],
        norms: Collection[str],
        roles: Roles,
        layers: Mapping[str, LayerEdit],
        probes: Mapping[str, probe.LayerProbe],
    ):
        self.graph, self.modules, self.norms = graph, modules, norms
        self.roles, self.layers, self.probes = roles, layers, probes
        self.uses: Counter[str] = flow.uses(graph)

    def fold(self, name: str) -> Folding:
        """Return what the layers before a BatchNorm can take up."""
        has_beta = getattr(self.modules[name], "bias", None) is not None
        if name not in self.roles.owned:
            return Folding(has_beta=has_beta)
        calls, owned = self.graph.calls(name), self.roles.owned[name]
        _, owners = self.roles.of_norm(name)
        layer = owners[0]
        read_once = all(flow.read_once(o) and not o.tapped for o in owned)
        # Layer and BatchNorm meet in every call of either, and in nothing else: they may be used as one.
        paired = len(owners) == 1 and self.uses[layer] == len(calls) == len(set(owned))
        sharer = self._unused_sibling(name)
        alone = paired and read_once and uses_are_calls(self.graph, layer) and sharer is None
        direct = all(c.inputs[0] is o for c, o in zip(calls, owned, strict=True))
        takes_beta = alone and direct and self._takes_beta(name, layer, owned[0])
        changed = self.layers[layer].action in ("centre", "standardise")
        takes_scale = alone and changed and self.probes[layer].scales
        obstacle = "beta cannot become its layer's bias" if alone else "its layer is also used without it"
        if not has_beta:
            obstacle = "between it and its layer is a view, which an in-place activation must not write into"
        if sharer is not None:
            obstacle = f"{sharer} did not run and may share its layer"
        if not read_once:
            obstacle = "its layer's output is read more than once"
        if any(o.tapped for o in owned):
            obstacle = "a hook or an attribute may keep its layer's output"
        return Folding(
            removable=direct and read_once,
            has_beta=has_beta,
            beta_into=layer if takes_beta else None,
            scale_into=(layer,) if takes_scale else (),
            obstacle=obstacle,
        )

    def _unused_sibling(self, name: str) -> str | None:
        """A BatchNorm beside this one, of its width, that did not run: another domain's norm of the same layer, say."""
        parent, width = name.rpartition(".")[0], probe.channels(self.modules[name])
        unused = (n for n in self.norms if not self.uses[n] and n.rpartition(".")[0] == parent)
        return next((n for n in unused if probe.channels(self.modules[n]) == width), None)

    def _takes_beta(self, name: str, layer: str, call: Node) -> bool:
        """Tell whether a BatchNorm's beta can become (or join) the bias of the layer directly before it."""
        beta, module = getattr(self.modules[name], "bias", None), self.modules[layer]
        channels = 1 if call.op.startswith("conv") else len(call.shape) - 1  # where the layer puts its outputs
        weight: Any = module.weight
        if beta is None or channels != 1 or beta.shape != call.shape[1:2] or beta.dtype != weight.dtype:
            return False
        bias = getattr(module, "bias", None)
        if bias is None or not self.probes[layer].takes_bias:
            return self.probes[layer].takes_bias
        shared = sum(p is bias for m in self.modules.values() for p in m._parameters.values()) > 1
        return bias.requires_grad == beta.requires_grad and not shared  # else one would be frozen or trained by another


def uses_are_calls(graph: Graph, layer: str) -> bool:
    """Tell whether every use of a layer's weight is a call of the layer."""
    return all(call.inside_module for call in graph.calls(layer))
