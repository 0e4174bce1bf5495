"""Who is who in a recorded network: heads, gates, the owners of each BatchNorm, the last layers of branches."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from mimicnorm.errors import MimicNormError
from mimicnorm.methods import Method
from mimicnorm.surgery import flow, heads
from mimicnorm.surgery.changeable import REPLACED
from mimicnorm.surgery.graph import Graph, Node
from mimicnorm.surgery.ops import Kind
from mimicnorm.surgery.steps import HeadStep, Plan, Refusal

_MATRIX_PRODUCTS = ("einsum", "matmul", "mm", "bmm", "addmm", "baddbmm", "tensordot", "mv")


class Ownership:
    """What a network's layers and BatchNorms are to each other; what refuses goes into the plan.

    Attributes:
        owned: BatchNorm -> the layer calls that own it ("post").
        reached: BatchNorm -> the layer calls it reaches first ("pre").
        roles: Layer -> its first call and its role.
    """

    def __init__(self, model: nn.Module, method: Method, norms: dict[str, nn.Module], left: set[str], graph: Graph):
        self.model, self.method, self.norms, self.left, self.graph = model, method, norms, left, graph
        self.modules = dict(model.named_modules())
        self.plan = Plan(method)
        self.gates = flow.gate_layers(graph)
        self.head_names: set[str] = set()
        self.owned: dict[str, list[Node]] = {}
        self.reached: dict[str, list[Node]] = {}
        self.roles: dict[str, tuple[Node, str]] = {}
        self.bare: list[str] = []  # BatchNorms behind a weight of no layer that can be changed

    def find(self, head: str | Sequence[str] | None) -> None:
        """Give everything its role."""
        self._functional_norms()
        self.find_heads(head)
        self._owners()
        self._branch_last_layers()
        if self.method.zeroes:
            self._zero_heads()
        if self.bare and not self.roles and self.method.instead != "group":
            self.refuse(
                self.bare[0],
                f"{type(self.method).__name__} changes convolutions and linear layers, and no BatchNorm follows one",
                "Put bare weights into nn.Linear or nn.Conv, or use NoNorm() to take the BatchNorms out only",
            )
        elif not self.roles and self.reached and self.method.weights != "keep":
            self.plan.notes.append(
                "no layer is changed: no BatchNorm is beside a convolution or linear layer but the head"
            )

    def refuse(self, name: str, reason: str, remedy: str) -> None:
        """Note why this network cannot be converted as asked."""
        self.plan.refusals.append(Refusal(name, reason, remedy))

    # -- what may stop it ----------------------------------------------------------------------

    def _functional_norms(self) -> None:
        for name in dict.fromkeys(self.graph.functional_norms):
            self.refuse(
                name,
                "calls F.batch_norm on data without being a BatchNorm module, so it cannot be taken out",
                "Use nn.BatchNorm there (in a ModuleList, not a plain list), or convert the rest without this module",
            )
        for name in self.graph.norm_inputs:
            if not self.graph.calls(name) and name not in self.left:
                self.refuse(
                    name,
                    "ran, but in a way that could not be followed",
                    "Leave it out with where=, or use a plain nn.BatchNorm there",
                )

    def find_heads(self, head: str | Sequence[str] | None) -> None:
        """The modules that make the outputs, and which of them get a last BN."""
        evident = heads.find(self.graph)
        if head is not None:
            names = [head] if isinstance(head, str) else list(head) if isinstance(head, (list, tuple, set)) else []
            if not names or not all(isinstance(n, str) for n in names):
                raise MimicNormError(f"head={head!r}; use the qualified name of a module, or a list of names")
            found = [h for n in dict.fromkeys(map(self._first_name, names)) if (h := self._named_head(n)) is not None]
        else:
            fits = not self.method.last_norm or self._are_class_scores(evident)
            found = evident.heads if fits else []
        self.head_names |= {h.module for h in (*found, *evident.heads)}
        if self.method.last_norm:
            for h in found:
                self._check_head(h.module, [other.module for other in found])
            kinds = {h.module: type(self.modules[h.module]).__name__ for h in found}
            self.plan.heads = [HeadStep(h.module, kinds[h.module], h.outputs, h.dim) for h in found]

    def _are_class_scores(self, evident: heads.Heads) -> bool:
        """Whether a last BN fits the heads: on outputs that are not class scores, or not evident, it is refused."""
        remedy = 'Name the module that makes class scores with head="...", or convert without it: last_norm=False'
        if evident.last_norms:
            remedy += (
                f". {evident.last_norms[0]!r} is a BatchNorm on the outputs: it can stay as the last BN, with "
                f"last_norm=False and where=lambda module, name: name != {evident.last_norms[0]!r}"
            )
        if not evident.heads:
            listed = "; ".join((*evident.problems[:3], *["..."][: len(evident.problems) > 3]))
            why = listed or "the output is not a tensor that depends on the input"
            self.refuse("", f"no evident head for the last BN: {why}", remedy)
        elif evident.not_classes is not None:
            self.refuse("", f"a last BN belongs on class scores, and {evident.not_classes}", remedy)
        else:
            self.plan.notes += [f"no last norm there: {p}" for p in evident.problems]
            return True
        return False

    def _first_name(self, name: str) -> str:
        """A shared module goes by the first of its names."""
        try:
            module = self.model.get_submodule(name)
        except AttributeError:
            return name
        return next((n for n, m in self.modules.items() if m is module), name)

    def _check_head(self, name: str, names: list[str]) -> None:
        module = self.modules[name]
        times = sum(n.layer == name or name in n.made_by for n in self.graph.nodes)
        around = [h for h in names if h != name and (h == "" or name.startswith(f"{h}."))]
        if name in self.norms:
            self.refuse(name, "head= names a BatchNorm, and the last BN would take its place", "Name a layer")
        elif around:
            self.refuse(name, f"is inside {around[0] or 'the model'!r}, and both are to be heads", "Name one of them")
        elif "forward" in module.__dict__:
            self.refuse(name, *REPLACED)
        elif hasattr(module, "last_norm"):
            self.refuse(name, "has an attribute 'last_norm' of its own, and the last BN goes by that name", "Rename it")
        if times > 1:
            self.plan.notes.append(
                f"the head {name!r} runs {times} times in a pass: each is normalised by itself in training, and their "
                "running statistics are shared"
            )
        if hasattr(module, "parametrizations"):
            self.plan.notes.append(
                f"the weight of the head {name!r} is parametrized, which cannot be undone on a converted head: do it "
                "before, if ever"
            )

    def _named_head(self, name: str) -> heads.Head | None:
        if name not in self.modules:
            self.refuse(name, "head= names no module of the model", "See model.named_modules() for the names")
            return None
        nodes = [n for n in self.graph.nodes if n.layer == name or name in n.made_by]
        if not nodes:
            self.refuse(name, "head= names a module that returned no tensor in the example's forward", "Name another")
            return None
        made = next((n for n in nodes if n.layer == name), nodes[0])
        if not any(map(heads.reaches_output, nodes)) and name not in self.norms:
            self.refuse(name, "head= names a module whose output goes into further layers", "Name the one behind them")
            return None
        inside = heads.head_layer(made)  # of a container, the layer in it that makes the logits
        if inside is not None:
            self.head_names.add(inside)
        found = heads.head_at(made, name)
        if found is None:
            self.refuse(
                name,
                f"head= names a module whose output {tuple(made.shape)} does not show along which dimension it is wide",
                f"Name the layer inside it{f', {inside!r}' if inside else ''}",
            )
        return found

    # -- owners --------------------------------------------------------------------------------

    def _owners(self) -> None:
        for name in self.norms:
            calls = self.graph.calls(name)
            if name in self.left or not calls:
                continue
            if any(flow.on_raw_input(call) for call in calls):
                self.refuse(
                    name or "(root)",
                    "this BatchNorm normalises the model's own input: data normalisation, not a hidden layer",
                    "Leave it out with where=lambda module, name: name != "
                    f"{name!r}, or normalise the data and remove it",
                )
                continue
            owners = [flow.owner(call) for call in calls]
            if all(o is not None for o in owners):
                self.owned[name] = [o for o in owners if o is not None]
                for o in self.owned[name]:
                    self._take(o, "gate" if o.layer in self.gates else "owner")
            else:
                reached = [layer for call in calls for layer in flow.reached_layers(call)]
                keep = [r for r in reached if r.layer not in self.head_names and r.layer not in self.gates]
                self.reached[name] = keep
                for r in keep:
                    self._take(r, "owner")
                self._note_bare_weight(name, calls[0])

    def _note_bare_weight(self, name: str, call: Node) -> None:
        """Say where the weight before a BatchNorm is of no layer that can be changed."""
        maker = flow.before_norm(call)
        bare = maker.kind is Kind.LAYER or (maker.op in _MATRIX_PRODUCTS and len(maker.inputs) == 1)
        if self.method.weights != "keep" and maker.layer is None and bare:
            self.bare.append(name)
            self.plan.notes.append(
                f"{name}: its input is made by {maker.op} in {maker.where or 'the model itself'}, not by a "
                "convolution or linear layer, so the weight there is neither changed nor given a start"
            )

    def _take(self, call: Node, role: str) -> None:
        assert call.layer is not None
        if call.layer in self.head_names and self.method.last_norm:
            self.refuse(
                call.layer,
                "is the head, yet a BatchNorm follows it",
                'Name the layer that makes the logits with head="...", or leave the last BN out with last_norm=False',
            )
        self.roles.setdefault(call.layer, (call, role))

    def _zero_heads(self) -> None:
        """Let the layers that make the logits be changed, too."""
        for call in self.graph.nodes:
            if call.layer in self.head_names and call.norm is None:
                self.roles.setdefault(call.layer, (call, "head"))

    def _branch_last_layers(self) -> None:
        """The last layer of a pre-activation branch has no BatchNorm behind it, yet it ends what one began."""
        pre = [c for name in self.reached for c in self.graph.calls(name)]
        removed = pre + [c for name in self.owned for c in self.graph.calls(name)]
        groups = [(s.operands, removed) for s in flow.sums(self.graph)]
        # A concat joins whole feature maps as often as branches: there the branch must begin with a BatchNorm.
        concats = [n for n in self.graph.nodes if n.kind is Kind.CONCAT and n.op not in ("overwrite", "stack")]
        groups += [(n.inputs, pre) for n in concats]
        for operands, begins in groups:
            for operand in operands:
                own = flow.own_path(operand, operands)
                for last in flow.ends(operand):
                    outside = last.layer is None or last.layer in self.head_names or last.layer in self.gates
                    if outside or last.layer in self.roles:
                        continue
                    began = any(own >> c.index & 1 for c in begins)
                    if began and any(own >> c.index & 1 and last in flow.reached_layers(c) for c in removed):
                        self._take(last, "branch end")
