"""Run one verb of the command line; print an error of the user as one message."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit code: 2 for an error that the user can fix, 130 after Ctrl-C, 141 if nobody reads the output.
    """
    pressed: list[int] = []

    def interrupt(number: int, _frame: Any) -> None:
        pressed.append(number)
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    handles = before is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    if handles:
        signal.signal(signal.SIGINT, interrupt)
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        pass
    except Exception:
        if not pressed:  # an import that Ctrl-C cuts short may raise something else: numpy's does
            raise
    finally:
        if handles:
            signal.signal(signal.SIGINT, before)
    print("mimicnorm: interrupted", file=sys.stderr)
    return 130


def _run(argv: Sequence[str]) -> int:
    from mimicnorm.cli.verbs import parse  # here, since Ctrl-C may come while it loads
    from mimicnorm.errors import MimicNormError

    try:
        parse(argv).run()
        if sys.stdout is not None:  # closed by the shell (>&-)
            sys.stdout.flush()
    except BrokenPipeError:  # the reader has what it wants (| head -1): end as a C program would
        from mimicnorm.training.progress import silence

        silence(sys.stdout)
        return 128 + 13
    except (MimicNormError, OSError) as error:
        print(f"mimicnorm: {error}", file=sys.stderr)
        return 2
    return 0
