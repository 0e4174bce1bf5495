"""SIGTERM and Ctrl-C as a wish: the step is finished and saved first."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Stopping:
    """Notes SIGTERM and SIGINT while inside; a second Ctrl-C stops at once.

    Attributes:
        signal: The number of the signal that came, if one did.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python sets no handlers
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
