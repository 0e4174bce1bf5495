"""Run one verb of the command line; print an error of the user as one message."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit code: 2 for an error that the user can fix, 130 after Ctrl-C, 141 if nobody reads the output.
    """
    try:  # imports are inside: Ctrl-C may come while they load
        from mimicnorm.cli.verbs import parse
        from mimicnorm.errors import MimicNormError

        try:
            parse(sys.argv[1:] if argv is None else argv).run()
            if sys.stdout is not None:  # closed by the shell (>&-)
                sys.stdout.flush()
        except BrokenPipeError:  # the reader has what it wants (| head -1): end as a C program would
            from mimicnorm.training.progress import silence

            silence(sys.stdout)
            return 128 + 13
        except (MimicNormError, OSError) as error:
            print(f"mimicnorm: {error}", file=sys.stderr)
            return 2
    except KeyboardInterrupt:
        print("mimicnorm: interrupted", file=sys.stderr)
        return 130
    return 0
