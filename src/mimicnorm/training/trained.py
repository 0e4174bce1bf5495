"""Trained weights that a run starts from, out of a file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor, nn

from mimicnorm.errors import RecipeError


def load_trained(model: nn.Module, path: Path, sha256: str, heads: Sequence[str]) -> list[str]:
    """Load the weights in a file into a network; nothing is changed if they are those of another one.

    Args:
        model: The network, before its conversion.
        path: A safetensors file with its state dict.
        sha256: What the file's content must be.
        heads: Names of the layers that make the logits. Those that the file does not have, or has for another number of
            classes, stay as they are.

    Returns:
        The heads that were not loaded.
    """
    given, wanted = _read(path, sha256), model.state_dict()
    fresh = [head for head in heads if not _has_all(given, wanted, head)]
    known = {k: v for k, v in given.items() if not any(_is_of(k, head) for head in fresh)}
    needed = {k: v for k, v in wanted.items() if not any(_is_of(k, head) for head in fresh)}
    problems = [
        *_listed("it lacks", [k for k in needed if k not in known and not k.endswith("num_batches_tracked")]),
        *_listed("it has besides", sorted(k for k in known if k not in needed)),
        *_listed("of another shape", [k for k in needed if k in known and known[k].shape != needed[k].shape]),
    ]
    if problems:
        raise RecipeError(
            f"init_from: {path} does not hold the weights of this network before its conversion: {'; '.join(problems)}"
        )
    model.load_state_dict(known, strict=False)
    return fresh


def _read(path: Path, sha256: str) -> dict[str, Tensor]:
    try:
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != sha256:
            raise RecipeError(f"init_from: {path} has changed since this run was begun")
        return safetensors.torch.load(content)
    except OSError as error:
        raise RecipeError(f"init_from: {path} cannot be read: {error.strerror}") from error
    except SafetensorError as error:
        raise RecipeError(
            f"init_from: {path} is not a safetensors file ({error}). Write one with "
            "safetensors.torch.save_file(model.state_dict(), path)"
        ) from error


def _has_all(given: dict[str, Tensor], wanted: dict[str, Tensor], head: str) -> bool:
    keys = [k for k in wanted if _is_of(k, head)]
    return all(k in given and given[k].shape == wanted[k].shape for k in keys)


def _is_of(key: str, head: str) -> bool:
    return key.startswith(f"{head}.")


def _listed(what: str, keys: list[str]) -> list[str]:
    shown = ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
    return [f"{what} {shown}"] if keys else []
