"""Parse the command line, run one verb, turn what a user can get wrong into one sentence."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import tyro

from mimicnorm.cli.compare import Compare
from mimicnorm.cli.convert import Convert
from mimicnorm.cli.memory import Memory
from mimicnorm.cli.theory import Theory
from mimicnorm.cli.train import Train

Command = (
    Annotated[Compare, tyro.conf.subcommand("compare")]
    | Annotated[Convert, tyro.conf.subcommand("convert")]
    | Annotated[Memory, tyro.conf.subcommand("memory")]
    | Annotated[Theory, tyro.conf.subcommand("theory")]
    | Annotated[Train, tyro.conf.subcommand("train")]
)

DESCRIPTION = "Take BatchNorm out of a network and keep what it was good for."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (2 for what the user can mend)."""
    short = (tyro.conf.OmitSubcommandPrefixes, tyro.conf.OmitArgPrefixes)
    command: Any = tyro.cli(Command, prog="mimicnorm", description=DESCRIPTION, args=argv, config=short)  # pyrefly: ignore
    from mimicnorm.errors import MimicNormError
    from mimicnorm.theory.errors import TheoryError

    try:
        command.run()
    except (MimicNormError, TheoryError, OSError) as error:
        print(f"mimicnorm: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("mimicnorm: interrupted", file=sys.stderr)
        return 130
    return 0
