"""``mimicnorm train``: one recipe, every field of it a flag, in a folder that can be gone on with."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import tyro

from mimicnorm.errors import RecipeError
from mimicnorm.training.recipes import Recipe, recipe


@dataclass
class Options:
    """Train one recipe; the same command again goes on where it stopped."""

    recipe: Annotated[str, tyro.conf.Positional]
    """The recipe, such as cifar100-resnet18, cifar100-resnet18-desk or digits-resnet10."""
    out: str | None = None
    """The run's folder; runs/RECIPE-METHOD-seedN if not given."""
    data_dir: Path | None = None
    """Where the data is; else the environment variable MIMICNORM_DATA, else the hub."""
    tensorboard: bool = False
    """Write TensorBoard events, too, with the last BN's running variance per class."""
    checkpoint_steps: int = 0
    """Save every so many steps, beside the end of each epoch."""
    checkpoint_seconds: float = 600.0
    """Save when this long has passed."""
    device: str = "auto"
    """cpu, cuda, ...; auto is the GPU if there is one."""

    def run(self) -> None:
        """Train, or go on; say how it ended."""
        from mimicnorm.training import train

        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(Recipe)}
        chosen = recipe(self.recipe, **{k: v for k, v in given.items() if v is not None})
        out = folder(self.out, f"{self.recipe}-{chosen.method}-seed{chosen.seed}")
        options = ("data_dir", "tensorboard", "checkpoint_steps", "checkpoint_seconds", "device")
        result = train(chosen, out, **{k: getattr(self, k) for k in options})
        if result.status == "interrupted":
            raise SystemExit(128 + (result.signal or 2))
        top1 = "" if result.top1 is None else f", top-1 {result.top1:.2%}"
        if os.environ.get("RANK", "0") == "0":  # of torchrun's processes, one speaks
            print(f"{result.status} at step {result.step}{top1}: {out}")


def folder(given: str | None, usual: str) -> Path:
    """The folder that --out names, or one under runs; an empty name (an unset variable) is none."""
    if given is not None and not given.strip():
        raise RecipeError("--out is empty: give a folder, or leave it out")
    return Path("runs") / usual if given is None else Path(given)


def with_recipe_flags(options: type, name: str, without: tuple[str, ...] = ()) -> Any:
    """Options with one flag per field of a recipe, so that none is written twice; what is not given stays."""
    types = get_type_hints(Recipe)
    body: Any = ast.parse(inspect.getsource(Recipe)).body[0]
    pairs = zip(body.body, body.body[1:], strict=False)
    texts = {ast.unparse(a.target): " ".join(t.value.value.split()) for a, t in pairs if isinstance(a, ast.AnnAssign)}
    flags: list[Any] = []
    for f in dataclasses.fields(Recipe):
        if f.name in without:
            continue
        if types[f.name] is bool:  # the same in all recipes, so that --compile and --no-compile can be flags
            flags.append((f.name, Annotated[bool, tyro.conf.arg(help=texts[f.name])], f.default))
            continue
        described = Annotated[types[f.name] | None, tyro.conf.arg(help=f"{texts[f.name]} The recipe's if not given.")]
        flags.append((f.name, described, None))
    made = dataclasses.make_dataclass(name, flags, bases=(options,))
    made.__doc__ = options.__doc__
    return made


Train: Any = with_recipe_flags(Options, "Train")
