"""The verbs of the command line. Only the module of the verb that is asked for is loaded, and tyro for its options."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import mimicnorm
from mimicnorm.errors import NameNotFoundError

VERBS = {
    "compare": "Train one network under several methods and show them side by side.",
    "convert": "Print what conversion does to a network, layer by layer, and the memory it saves.",
    "export": "Fold a network to plain layers and write it to a file: ONNX, pt2 or safetensors; int8 if asked.",
    "memory": "Predict the memory of a training step under several methods.",
    "reproduce": "Run a table or figure of the paper again, and judge its claims.",
    "theory": "Run the paper's theory: gains, figures, Monte Carlo checks, the signal in a network.",
    "train": "Train one recipe, or resume it.",
}
_LINES = "\n".join(f"  {verb:<10} {summary}" for verb, summary in VERBS.items())
HELP = f"""usage: mimicnorm VERB [OPTIONS]

Take BatchNorm out of a network and keep what it was good for.

verbs:
{_LINES}

options:
  -h, --help Show this text; mimicnorm VERB --help shows the options of a verb.
  --version  Show the version."""


def parse(argv: Sequence[str]) -> Any:
    """Return the command of the verb that is asked for, with its options; exit where there is nothing to run."""
    verb, *options = argv or [""]
    if verb in ("-h", "--help"):
        print(HELP)
        raise SystemExit(0)
    if verb == "--version":
        print(f"mimicnorm {mimicnorm.__version__}")
        raise SystemExit(0)
    if verb not in VERBS:
        wrong = f"there is no verb {verb!r}" if verb else "give a verb"
        raise NameNotFoundError(f"{wrong}; mimicnorm --help explains them.", verb, VERBS)
    import tyro

    command = getattr(importlib.import_module(f"mimicnorm.cli.{verb}"), verb.capitalize())
    short = (tyro.conf.OmitSubcommandPrefixes, tyro.conf.OmitArgPrefixes)
    parsed = tyro.cli(command, prog=f"mimicnorm {verb}", args=options, config=short)
    check = getattr(getattr(parsed, "what", parsed), "check_names", None)  # theory has verbs of its own
    if check is not None:
        check()
    return parsed
