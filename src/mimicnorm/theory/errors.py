"""The one error of the theory package, apart from the rest so that theory imports nothing above it."""

from __future__ import annotations


class TheoryError(ValueError):
    """An argument for which the theory has no answer; the message says what is wrong and what to do."""
