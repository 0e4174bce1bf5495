"""Fold a converted network to plain layers, with the output of its eval mode and nothing of this package in it.

Every changed layer says which weight and bias it applies, and every module in a BatchNorm's place (and the last BN)
which factor and addend. The layer before takes them up, or the layer after; the recorded graph shows whether one can.
"""

from __future__ import annotations

import contextlib
import copy
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from mimicnorm.deploy import affine as fold_affine
from mimicnorm.deploy.affine import Affine
from mimicnorm.deploy.place import Calls, Place, calls_of, find_place, is_unpadded, own_class
from mimicnorm.errors import DeployError, ExampleError
from mimicnorm.layers import WEIGHT_LAYERS, Derived, GroupNorm, LastNorm, LastNormed, OriginalKeys, Remains, Reweighted
from mimicnorm.layers.derive import derived_class
from mimicnorm.surgery.example import call_arguments, tensors_in
from mimicnorm.surgery.graph import Graph
from mimicnorm.surgery.isolate import run
from mimicnorm.surgery.operate import become
from mimicnorm.surgery.plan import Plan
from mimicnorm.surgery.record import record_in_mode
from mimicnorm.surgery.unseen import unseen

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # relative to the largest output; 0.05 in half precision


@dataclass
class Folded:
    """A folded network, and where everything went.

    Attributes:
        model: The network: plain layers, eval mode.
        into: What stood apart in the converted network, by name, and the layers that took it up.
        standalone: The names of layers that no other layer could take up: depthwise 1x1 convolutions and their like.
        error: The largest difference of an output to the converted network's, over the largest output.
        error_fp64: The same with both in double precision; only where ``error`` is larger than rounding usually is, as
            the network amplifies it.
    """

    model: nn.Module
    into: dict[str, tuple[str, ...]] = field(default_factory=dict)
    standalone: list[str] = field(default_factory=list)
    error: float = 0.0
    error_fp64: float | None = None

    def __str__(self) -> str:
        lines = [f"{name}: folded into {', '.join(layers)}" for name, layers in self.into.items() if layers]
        lines += [f"{name}: no layer can take it up; a depthwise layer of its own" for name in self.standalone]
        wide = "" if self.error_fp64 is None else f"; in double precision up to {self.error_fp64:.1e}"
        return "\n".join([*lines, f"output as in eval mode up to {self.error:.1e}{wide}"])


def fold(model: nn.Module, *, example: Any = None) -> nn.Module:
    """Return a copy of a converted network that consists of plain layers; the argument is untouched.

    Centring, gains, scalars and shifts are in the weights and biases, and the last BN is in the layer that makes the
    logits. Modules have the classes and names that they had before the conversion. Weights are meant for inference:
    train the converted network.

    Args:
        model: A converted network in eval mode.
        example: As for ``convert_``; if not given, noise of the shape that the network was converted with.

    Raises:
        DeployError: The network is in training mode, was not converted, or cannot be folded.

    Example:
        >>> from mimicnorm import MimicNorm, convert
        >>> net = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(256, 4))
        >>> folded = fold(convert(net, MimicNorm(), example=(2, 8, 6, 6)).eval())
        >>> [type(layer).__name__ for layer in folded]
        ['Conv2d', 'Identity', 'ReLU', 'Flatten', 'Linear']
    """
    return fold_with_report(model, example=example).model


def fold_with_report(model: nn.Module, *, example: Any = None) -> Folded:
    """Fold as ``fold`` does; also report what became of each piece."""
    example = _checked(model, example)
    try:
        folded = Folded(copy.deepcopy(model))
    except Exception as error:
        raise DeployError(f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error})") from error
    with torch.no_grad():
        _Folding(folded, example).carry_out()
    folded.error, allowed = _compare(model, folded.model, example)
    if not folded.error <= allowed:
        if all(p.dtype is torch.float64 for p in model.parameters()):
            raise DeployError(
                f"the folded network's output differs from the converted one's by {folded.error:.1e}, in double "
                "precision: a layer uses its weight in a way that was not seen. Nothing was changed"
            )
        # Either the fold is wrong, or the network amplifies rounding: double precision tells.
        wide = pytree.tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, example)
        folded.error_fp64 = fold_with_report(copy.deepcopy(model).double(), example=wide).error
    return folded


def fuse(model: nn.Module) -> nn.Module:
    """Fold BatchNorms into the convolutions before them by PyTorch's own fusion: the baseline of a folded network.

    The network must be traceable by ``torch.fx`` and in eval mode; the argument is untouched.
    """
    from torch.fx.experimental.optimization import fuse as fx_fuse

    if any(m.training for m in model.modules()):
        raise DeployError("the model is in training mode: call model.eval() first")
    try:
        return fx_fuse(model).eval()
    except Exception as error:  # tracing runs the user's forward
        raise DeployError(f"PyTorch cannot fuse the network: {type(error).__name__}: {error}") from error


def _checked(model: Any, example: Any) -> Any:
    """Refuse what cannot be folded; return the example."""
    if not isinstance(model, nn.Module):
        raise DeployError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    if isinstance(model, (DistributedDataParallel, DataParallel, torch._dynamo.OptimizedModule)):
        raise DeployError(f"the model is wrapped in {type(model).__name__}: fold the plain module inside")
    converted = [m for m in model.modules() if isinstance(m, Derived) or "_mimicnorm" in m.__dict__]
    if not converted:
        raise DeployError(
            f"{type(model).__name__} was not converted by mimicnorm, so there is nothing to fold. Convert it first; a "
            "network with BatchNorms is fused by torch.fx.experimental.optimization.fuse"
        )
    training = [name for name, m in model.named_modules() if m.training]
    if training:
        raise DeployError(f"{training[0] or 'the model'} is in training mode: call model.eval() first")
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise DeployError("the model is on the meta device and has no weights: load them first")
    if example is not None:
        return example
    shape = getattr(model.__dict__.get("_mimicnorm"), "example_shape", None)
    if shape is None:
        raise DeployError("what the model takes is not known: give fold an example=, as for convert_")
    return shape


class _Folding:
    """One fold, in place.

    Args:
        folded: Holds the copy of the network, and gets the report.
        example: What the network runs on.
    """

    def __init__(self, folded: Folded, example: Any):
        self.folded, self.model, self.example = folded, folded.model, example
        self.modules = dict(self.model.named_modules())

    def carry_out(self) -> None:
        changed = {n: m for n, m in self.modules.items() if isinstance(m, Derived) or parametrize.is_parametrized(m)}
        beside = {name: self._make_plain(name, module) for name, module in changed.items()}
        graphs = [record_in_mode(self.model, self.example, training=False)]
        apart = {name: m for name, m in self.modules.items() if hasattr(m, "as_affine")}
        shifts = {name: m for name, m in apart.items() if not isinstance(m, LastNorm)}
        idle = shifts and any(isinstance(m, WEIGHT_LAYERS) and not graphs[0].calls(n) for n, m in self.modules.items())
        if idle or any(not calls_of(graphs[0], name) for name in apart):  # auxiliary heads run in training mode alone
            with contextlib.suppress(ExampleError):  # it may take other inputs in training mode
                graphs.append(record_in_mode(self.model, self.example, training=True))
        self.used = {n for g in graphs for node in g.nodes for n in (node.layer, *node.made_by) if n is not None}
        self.used |= set().union(*(g.used_elsewhere for g in graphs))
        self.widths = {name: w if (w := _affine(m).width) > 1 else 0 for name, m in shifts.items()}
        for name, module in apart.items():
            self._fold(name, module, graphs)
        for name, (first, last) in beside.items():
            self._wrap(name, first, last)
        for name, module in self.model.named_modules():
            self._finish(name, module)

    # -- changed layers ------------------------------------------------------------------------

    def _make_plain(self, name: str, module: Any) -> tuple[Affine, Affine]:
        """Give a layer the weight and bias that it applies, and its own class again; a head stays a head.

        Returns:
            What it does before and after the map itself, and cannot take up.
        """
        nothing = Affine(None, None)
        if not isinstance(module, Reweighted):
            _strip(module)
            return nothing, nothing
        layer: Any = module
        first, last = Affine(None, getattr(layer, "input_bias", None)), nothing
        weight, bias = layer.weight, layer.bias
        if layer.scales_output:
            last = Affine(layer.residual_scale, None)
        else:
            weight, bias = layer.effective_weight(), layer.effective_bias()
        added = layer.added_parameters
        _strip(layer)
        fold_affine.set_(layer, weight, bias)
        for parameter in added:
            layer._parameters.pop(parameter, None)
        for statistic in ("norm_mean", "norm_var"):
            layer._buffers.pop(statistic, None)
        for constant in ("standardisation", "scales_output", "scales_bias", "centring", "norm_eps"):
            layer.__dict__.pop(constant, None)
        if not first.is_identity and is_unpadded(layer):
            fold_affine.before(layer, first)
            self.folded.into[f"{name}.input_bias"] = (name,)
            first = nothing
        return first, last

    def _wrap(self, name: str, first: Affine, last: Affine) -> None:
        """Put layers of their own before and after a layer, which moves one level down."""
        if first.is_identity and last.is_identity:
            return
        layer: Any = self.modules[name]
        inner = copy.copy(layer)
        inner.__dict__.update({k: type(v)() for k, v in layer.__dict__.items() if k.endswith("_hooks")})
        channels = layer.weight.shape[1] * getattr(layer, "groups", 1), layer.weight.shape[0]
        channels = channels[::-1] if getattr(layer, "transposed", False) else channels
        around = []
        for affine, n in zip((first, last), channels, strict=True):
            shape = torch.Size((1, n, *layer.weight.shape[2:]))
            around.append(None if affine.is_identity else fold_affine.standalone(affine, shape, layer, name))
        become(layer, nn.Sequential(*filter(None, (around[0], inner, around[1]))).eval())
        self.folded.standalone.append(name)

    # -- what stands apart ---------------------------------------------------------------------

    def _fold(self, name: str, module: Any, graphs: list[Graph]) -> None:
        affine = _affine(module)
        calls, graph = next(((c, g) for g in graphs if (c := calls_of(g, name))), ([], graphs[0]))
        place = find_place(graph, self.modules, calls, affine) if calls else None
        if name in self.widths and place is not None and place.layers:
            width = self.widths[name] or calls[0][0].shape[affine.channel_dim]
            if unseen(name, width, self.modules, self.widths, self.used, reads=not place.after) is not None:
                place = None
        shapes = [x.shape for x, _ in calls] or [self._expected_shape(name, affine)]
        if isinstance(module, LastNorm):
            self._unhead(name, place, calls)
        elif place is None:
            if any(len(shape) != len(shapes[0]) for shape in shapes):
                raise DeployError(f"{name} runs on tensors of different ranks: no plain layer does")
            like = module if any(True for _ in module.parameters()) else self.model
            become(module, fold_affine.standalone(affine, shapes[0], like, name).eval())
            self.folded.standalone.append(name)
        else:
            become(module, nn.Identity().eval())
        if place is not None:
            for layer in place.layers:
                (fold_affine.after if place.after else fold_affine.before)(self.modules[layer], affine)
            self.folded.into[name] = place.layers

    def _expected_shape(self, name: str, affine: Affine) -> torch.Size:
        """The shape of what a module takes that never ran: as the class of its BatchNorm says."""
        for root, model in self.modules.items():
            done: Plan | None = model.__dict__.get("_mimicnorm")
            for edit in () if done is None else done.norms:
                if f"{root}.{edit.name}".lstrip(".") in (name, name.removesuffix(".instead")):
                    rank = 2 + int(edit.kind[-2]) if edit.kind[-2:] in ("1d", "2d", "3d") else 4
                    return torch.Size((1, affine.width, *[1] * (rank - 2)))
        raise DeployError(f"{name} did not run on the example: give fold an example= on which it runs")

    def _unhead(self, name: str, place: Place | None, calls: Calls) -> None:
        """Take the last BN out of its head."""
        head_name = name.rpartition(".")[0]
        head: Any = self.modules[head_name]
        if place is None or not isinstance(head, LastNormed):
            reads = (
                f"it reads {calls[0][0].op} {tuple(calls[0][0].shape)}" if calls else "it did not run on the example"
            )
            raise DeployError(
                f"{head_name or 'the model'}: its last BN cannot be folded into a layer, since {reads}. Convert with "
                "head= naming the convolution or linear layer that makes the class scores, or fold an example= that "
                "reaches it"
            )
        head.__class__ = own_class(head)  # pyrefly: ignore
        del head.last_norm

    def _finish(self, name: str, module: Any) -> None:
        """Leave no class and no attribute of this package."""
        module.__dict__.pop("_mimicnorm", None)
        for key, hook in list(module._load_state_dict_pre_hooks.items()):
            if isinstance(getattr(hook, "hook", hook), OriginalKeys):
                del module._load_state_dict_pre_hooks[key]
        if type(module) is Remains:
            module.__class__ = nn.Sequential  # pyrefly: ignore
        elif type(module) is GroupNorm and module.channel_dim == 1:
            module.__class__ = nn.GroupNorm  # pyrefly: ignore
            del module.channel_dim
        package, _, rest = type(module).__module__.partition(".")
        if package == "mimicnorm" and not rest.startswith("models"):  # networks of the package are the user's choice
            raise DeployError(f"{name or 'the model'}: a {type(module).__name__} has no counterpart in torch.nn")


def _affine(module: Any) -> Affine:
    """What a module that stands apart does."""
    scale, shift = module.as_affine()
    return Affine(scale, shift, module.dim if isinstance(module, LastNorm) else getattr(module, "channel_dim", 1))


# -- layers ------------------------------------------------------------------------------------------------------


def _strip(layer: Any) -> None:
    """Give a module the class it had before the conversion, its parametrized tensors as values; a head stays a head."""
    headed = isinstance(layer, LastNormed)
    while "mixin" in type(layer).__dict__ or parametrize.is_parametrized(layer):
        if "mixin" in type(layer).__dict__:
            layer.__class__ = type(layer).base
            continue
        # not remove_parametrizations: it writes into the class, which the original shares
        values = {name: getattr(layer, name).detach().clone() for name in layer.parametrizations}
        learned = {name for name, made in layer.parametrizations.items() if made._parameters}
        del layer._modules["parametrizations"]
        layer.__class__ = type(layer).__bases__[0]
        for name, value in values.items():
            if name in learned:
                layer.register_parameter(name, nn.Parameter(value))
            else:
                layer.register_buffer(name, value)
    if headed:
        layer.__class__ = derived_class(LastNormed, type(layer))  # pyrefly: ignore


# -- the outputs -------------------------------------------------------------------------------------------------


def _compare(model: nn.Module, folded: nn.Module, example: Any) -> tuple[float, float]:
    """Run both; return the largest difference of an output over the largest output, and what rounding usually makes."""
    outputs = []
    for net in (model, folded):
        try:
            args, kwargs = call_arguments(model, example)
            call = (lambda args, kwargs, net=net: net(*args, **kwargs), (args, kwargs))
            outputs.append(tensors_in(run(net, *call, training=False, seed=0, modes=(torch.no_grad(),))))
        except Exception as error:
            which = "the model" if net is model else "the folded model"
            raise DeployError(f"{which} raised on the example: {type(error).__name__}: {error}") from error
    differences = [relative_error(a, b) for a, b in zip(*outputs, strict=True)]
    kinds = [t.dtype for t in outputs[0] if t.is_floating_point()]
    allowed = max((_TOLERANCE.get(kind, 0.05) for kind in kinds), default=0.0)
    return next((d for d in differences if math.isnan(d)), max(differences, default=0.0)), allowed


def relative_error(expected: Tensor, got: Tensor) -> float:
    """The largest difference over the largest expected value."""
    if expected.shape != got.shape or expected.numel() == 0:
        return 0.0 if expected.shape == got.shape else float("inf")
    expected, got = expected.double(), got.double()
    return float((expected - got).abs().max() / expected.abs().max().clamp_min(torch.finfo(torch.float32).tiny))
