"""Run one verb of the command line, turn what a user can get wrong into an error message."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (2 for what the user can mend)."""
    mendable: tuple[type[Exception], ...] = (OSError,)
    try:
        from mimicnorm.cli.verbs import parse  # all imports are in here: Ctrl-C may come while they load

        command = parse(argv)
        from mimicnorm.errors import MimicNormError, TheoryError

        mendable = (MimicNormError, TheoryError, OSError)
        command.run()
        if sys.stdout is not None:  # closed by the shell (>&-)
            sys.stdout.flush()
    except BrokenPipeError:  # the reader has what it wants (| head -1): end as a C program would
        from mimicnorm.training.progress import silence

        silence(sys.stdout)
        return 128 + 13
    except mendable as error:
        print(f"mimicnorm: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("mimicnorm: interrupted", file=sys.stderr)
        return 130
    return 0
