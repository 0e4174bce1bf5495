"""The verbs of the command line, read by tyro."""

from __future__ import annotations

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


def parse(argv: Sequence[str] | None) -> Any:
    """The verb that was asked for, with its options; ends the process where there is none."""
    short = (tyro.conf.OmitSubcommandPrefixes, tyro.conf.OmitArgPrefixes)
    return tyro.cli(Command, prog="mimicnorm", description=DESCRIPTION, args=argv, config=short)  # pyrefly: ignore
