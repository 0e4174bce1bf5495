"""The command line: one verb each. Nothing here imports torch until a command runs."""

from mimicnorm.cli.main import main

__all__ = ["main"]
