"""``mimicnorm train``: one recipe, every field of it a flag, in a folder that a later call resumes."""

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
    """Train one recipe; run the same command again to resume it."""

    recipe: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RECIPE]")] = None
    """The recipe, such as cifar100-resnet18, cifar100-resnet18-desk or digits-resnet10; or the recipe.json of a run.
    With --init-from it is fine-tune if not given."""
    out: str | None = None
    """The run's folder; runs/RECIPE-METHOD-seedN if not given."""
    data_dir: Path | None = None
    """Where the data is; else the environment variable MIMICNORM_DATA, else the hub."""
    tensorboard: bool = False
    """Write TensorBoard events, too, with the last BN's running variance per class."""
    checkpoint_steps: int = 0
    """Steps between checkpoints, which are also saved at the end of each epoch; 0 is never."""
    checkpoint_seconds: float = 600.0
    """Seconds between checkpoints."""
    device: str = "auto"
    """cpu, cuda, ...; auto is the GPU if there is one."""

    integer: bool = False
    """Train in integers, as --precision int8: see mimicnorm.integer."""

    def run(self) -> None:
        """Train or resume; print how it ended."""
        fields = given_fields(self)
        if self.integer:
            if fields.get("precision", "int8") != "int8":
                raise RecipeError(f"--integer and --precision {fields['precision']}: give one of them")
            fields["precision"] = "int8"
        name = self.recipe or ("fine-tune" if "init_from" in fields else None)
        if name is None:
            raise RecipeError("name a recipe, such as cifar100-resnet18 (mimicnorm train --help), or give --init-from")
        chosen = recipe(name, **fields)
        chosen.check_names()
        integer = chosen.precision == "int8"
        usual = f"{Path(name).stem}-{chosen.method}-seed{chosen.seed}"
        out = folder(self.out, f"{usual}-int8" if integer else usual)

        if integer:
            from mimicnorm.integer.run import train
        else:
            from mimicnorm.training import train

        options = ("data_dir", "tensorboard", "checkpoint_steps", "checkpoint_seconds", "device")
        result = train(chosen, out, **{k: getattr(self, k) for k in options})
        if result.status == "interrupted":
            raise SystemExit(128 + (result.signal or 2))
        top1 = "" if result.top1 is None else f", top-1 {result.top1:.2%}"
        if os.environ.get("RANK", "0") == "0":  # one of torchrun's processes prints
            print(f"{result.status} at step {result.step}{top1}: {out}")


def folder(given: str | None, usual: str) -> Path:
    """Return the folder that --out names, or one under runs; an empty name (an unset variable) is an error."""
    if given is not None and not given.strip():
        raise RecipeError("--out is empty: give a folder, or leave it out")
    return Path("runs") / usual if given is None else Path(given)


def given_fields(options: Any) -> dict[str, Any]:
    """Return the fields of a recipe that were given as flags; a switch counts as given if it is not at its default."""
    fields = [(f, getattr(options, f.name, None)) for f in dataclasses.fields(Recipe)]
    return {f.name: value for f, value in fields if value is not None and (f.type != "bool" or value != f.default)}


def with_recipe_flags(options: type, name: str, without: tuple[str, ...] = ()) -> Any:
    """Add one flag per field of a recipe to options, so that none is written twice; the default is the recipe's."""
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
