"""Write a plain network to a file, read it back and compare: ONNX, PyTorch's pt2, or its weights as safetensors."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mimicnorm.deploy.fold import relative_error
from mimicnorm.errors import DeployError
from mimicnorm.layers import Derived
from mimicnorm.surgery.example import call_arguments, tensors_in

Format = Literal["onnx", "pt2", "safetensors"]
FORMATS: tuple[Format, ...] = ("onnx", "pt2", "safetensors")
BATCHES = (1, 2, 5)
"""Batch sizes at which what was written is compared with the network."""

_NORMS = ("BatchNormalization", "InstanceNormalization", "LayerNormalization", "GroupNormalization")
_LARGEST_ERROR = 1e-3  # relative; other kernels round otherwise, and a wrong graph is far off


@dataclass
class Exported:
    """What was written.

    Attributes:
        path: The file.
        to: Its format.
        bytes: Its size.
        errors: For each batch size, the largest difference of an output to the network's, over the largest output.
        opset: Of ONNX, the version of its operators.
        nodes: Of ONNX, how many nodes there are of each type.
    """

    path: Path
    to: str
    bytes: int = 0
    errors: dict[int, float] = field(default_factory=dict)
    opset: int | None = None
    nodes: dict[str, int] = field(default_factory=dict)

    @property
    def norms(self) -> dict[str, int]:
        """The nodes that normalise."""
        return {kind: n for kind, n in self.nodes.items() if kind in _NORMS}

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.to}, {self.bytes / 2**20:.2f} MiB"]
        if self.opset is not None:
            listed = ", ".join(f"{n} {kind}" for kind, n in self.nodes.items())
            left = ", ".join(f"{n} {kind}" for kind, n in self.norms.items()) or "none"
            lines += [f"opset {self.opset}; nodes: {listed}", f"normalisation nodes: {left}"]
        read = ", ".join(f"{error:.1e} at batch {size}" for size, error in self.errors.items())
        return "\n".join([*lines, f"read back, the output differs by {read}" if read else "read back, bit for bit"])


def export(model: nn.Module, to: Format, path: str | Path, *, example: Any) -> Exported:
    """Write a plain network in eval mode to a file; the batch size stays free.

    The file is whole or not there: it is written under another name, read back, compared and renamed.

    Args:
        model: A network without anything of this package, such as ``fold`` gives.
        to: "onnx" (needs the extra ``export``), "pt2" (``torch.export``) or "safetensors" (its state dict).
        path: A file that does not exist.
        example: As for ``convert_``.

    Raises:
        DeployError: The network is in training mode or not folded, cannot be exported, or the file cannot be written.

    Example:
        >>> export(nn.ReLU().eval(), "onnx", "/no/such/folder/relu.onnx", example=(2, 3))
        Traceback (most recent call last):
        ...
        mimicnorm.errors.DeployError: cannot write /no/such/folder/relu.onnx: the folder does not exist
    """
    if to not in FORMATS:
        raise DeployError(f"to={to!r}: use one of {', '.join(FORMATS)}")
    path = require_target(path)
    packages = ("onnx", "onnxscript", "onnxruntime") if to == "onnx" else ()
    for package in packages:
        import_package(package)
    if any(m.training for m in model.modules()):
        raise DeployError("the model is in training mode: call model.eval() first")
    if any(isinstance(m, Derived) or "_mimicnorm" in m.__dict__ for m in model.modules()):
        raise DeployError("the model is converted but not folded: give export mimicnorm.fold(model)")
    done = Exported(path, to)
    args, kwargs = _of_batch(call_arguments(model, example), 2)
    with written(path) as partial, torch.no_grad(), quiet():
        _WRITERS[to](model, args, kwargs, partial, done)
        done.bytes = partial.stat().st_size
    return done


# -- formats -----------------------------------------------------------------------------------------------------


def _onnx(model: nn.Module, args: tuple, kwargs: dict, partial: Path, done: Exported) -> None:
    import onnx

    program = _exported(
        lambda: torch.onnx.export(
            model, args, kwargs=kwargs, dynamo=True, dynamic_shapes=_shapes(model, args, kwargs), verbose=False
        )
    )
    program.save(str(partial), external_data=False)
    saved = onnx.load(str(partial))
    done.opset = next(o.version for o in saved.opset_import if o.domain in ("", "ai.onnx"))
    done.nodes = dict(Counter(node.op_type for node in saved.graph.node).most_common())
    session = session_of(partial)
    names = [given.name for given in session.get_inputs()]

    def run(args: tuple, kwargs: dict) -> list[Tensor]:
        feed = dict(zip(names, (t.cpu().numpy() for t in tensors_in((args, kwargs))), strict=True))
        return [torch.from_numpy(array) for array in session.run(None, feed)]

    _compare(model, run, args, kwargs, done)


def _pt2(model: nn.Module, args: tuple, kwargs: dict, partial: Path, done: Exported) -> None:
    shapes = _shapes(model, args, kwargs)
    program = _exported(lambda: torch.export.export(model, args, kwargs, dynamic_shapes=shapes))
    with open(partial, "wb") as file:
        torch.export.save(program, file)
    with open(partial, "rb") as file:
        loaded = torch.export.load(file).module()
    _compare(model, lambda args, kwargs: tensors_in(loaded(*args, **kwargs)), args, kwargs, done)


def _safetensors(model: nn.Module, args: tuple, kwargs: dict, partial: Path, done: Exported) -> None:
    del args, kwargs, done
    from safetensors.torch import load_file, save_file

    state = {name: t.detach().cpu().contiguous().clone() for name, t in model.state_dict().items()}
    save_file(state, partial, metadata={"format": "pt"})
    read = load_file(partial)
    if read.keys() != state.keys() or not all(torch.equal(read[name], t) for name, t in state.items()):
        raise DeployError("the weights were not read back as they were written")


_WRITERS: dict[str, Callable[[nn.Module, tuple, dict, Path, Exported], None]] = {
    "onnx": _onnx,
    "pt2": _pt2,
    "safetensors": _safetensors,
}


def _exported(export: Callable[[], Any]) -> Any:
    try:
        return export()
    except Exception as error:  # torch.export raises many kinds, for one cause: the network cannot be captured
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DeployError(f"torch cannot export the network: {type(error).__name__}: {reason}") from error


def _shapes(model: nn.Module, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Which dimensions stay free, by argument: the first of every tensor with a sample per row."""
    given = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    batch = torch.export.Dim("batch")
    return pytree.tree_map(lambda t: {0: batch} if isinstance(t, Tensor) and t.dim() and len(t) == 2 else None, given)


def _of_batch(call: tuple[tuple, dict], size: int) -> tuple[tuple, dict]:
    """The arguments of a call with another batch size: samples again from the first on, or fewer."""
    batch = next((len(t) for t in tensors_in(call) if t.dim()), 1)

    def resized(t: Tensor) -> Tensor:
        return t[torch.arange(size) % batch] if t.dim() and len(t) == batch else t

    return pytree.tree_map_only(Tensor, resized, call)


def _compare(model: nn.Module, run: Callable[..., list[Tensor]], args: tuple, kwargs: dict, done: Exported) -> None:
    for size in BATCHES:
        call = _of_batch((args, kwargs), size)
        expected = tensors_in(model(*call[0], **call[1]))
        try:
            pairs = list(zip(expected, run(*call), strict=True))
        except Exception as error:
            raise DeployError(f"what was exported does not run at batch {size}: {error}") from error
        done.errors[size] = max((relative_error(a, b) for a, b in pairs), default=0.0)
        if not done.errors[size] <= _LARGEST_ERROR:
            raise DeployError(
                f"what was exported as {done.to} differs from the network by {done.errors[size]:.1e} at batch {size}"
            )


# -- files and packages ------------------------------------------------------------------------------------------


def require_target(path: str | Path) -> Path:
    """Return the path of a file that can be written; an error if it exists or its folder does not."""
    path = Path(path)
    if path.exists():
        raise DeployError(f"{path} exists: remove it, or write to another file")
    if not path.name or not path.parent.is_dir():
        raise DeployError(f"cannot write {path}: the folder does not exist")
    if not os.access(path.parent, os.W_OK):
        raise DeployError(f"cannot write {path}: the folder is not writable")
    return path


@contextlib.contextmanager
def written(path: Path) -> Iterator[Path]:
    """Give another name in the same folder to write to; rename it at the end, or remove it if anything raises."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        os.replace(partial, path)
    except OSError as error:
        raise DeployError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)


def import_package(name: str) -> Any:
    """Import a package of the extra ``export``."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise DeployError(f"{error.name} is not installed. Install it with: pip install 'mimicnorm[export]'") from error


def session_of(path: Path, threads: int = 0) -> Any:
    """Load an ONNX file into onnxruntime, on the CPU; 0 threads leave their number to it."""
    onnxruntime = import_package("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings of the exporters, which are about themselves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
