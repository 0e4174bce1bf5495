"""What a user can get wrong, one class each, under one base.

Every message says what is wrong, where (qualified name, shape), and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MimicNormError(ValueError):
    """Base of every error that a user can cause and fix."""


class ExampleError(MimicNormError):
    """The model does not run on the example input; ``where`` is the module in which it raised."""

    def __init__(self, message: str, where: str = ""):
        super().__init__(message)
        self.where = where


class RefusedError(MimicNormError):
    """A network cannot be converted as asked; ``refusals`` lists every reason, by qualified name."""

    def __init__(self, message: str, refusals: tuple = ()):
        super().__init__(message)
        self.refusals = tuple(refusals)


class InitError(MimicNormError):
    """The initial weights cannot be set."""


class CheckError(MimicNormError):
    """A converted network is no longer whole."""


class MicroBatchError(MimicNormError):
    """The batch cannot be split, or its samples are not independent."""


class MemoryPredictionError(MimicNormError):
    """The memory of a network cannot be predicted, or a budget cannot be met."""


class CompressionError(MimicNormError):
    """Activations cannot be saved as asked, or what was saved cannot serve."""


class NameNotFoundError(MimicNormError):
    """A model, method or option name is not known; the message suggests similar ones, or lists all of a short list.

    Args:
        message: What is wrong, as a sentence.
        name: What was given.
        known: What could have been.
    """

    def __init__(self, message: str, name: str = "", known: Iterable[str] = ()):
        known = list(known)
        lower = {k.lower(): k for k in known}
        similar = [lower[k] for k in difflib.get_close_matches(name.lower(), lower, n=4, cutoff=0.5)]
        hint = f" Did you mean {', '.join(similar)}?" if similar else ""
        list_all = known and len(known) < (12 if similar else 60)
        super().__init__(message + hint + (f" Known: {', '.join(known)}." if list_all else ""))


class NonFiniteError(MicroBatchError):
    """Logits or loss of a micro-batch are NaN or infinite: training has diverged."""


class RecipeError(MimicNormError):
    """A recipe's fields do not fit each other, the data, or the run that is to be resumed."""


class CheckpointError(MimicNormError):
    """A run's folder cannot be written, or what is in it cannot be read."""


class DataError(MimicNormError):
    """A data set cannot be read; the message names the file and the row."""


class DeployError(MimicNormError):
    """A network cannot be folded, exported or quantised, or the file cannot be written."""


class IntegerError(MimicNormError):
    """A network has no integer form; ``refusals`` lists (qualified name, reason)."""

    def __init__(self, message: str, refusals: Iterable[tuple[str, str]] = ()):
        super().__init__(message)
        self.refusals = tuple(refusals)


class TheoryError(MimicNormError):
    """An argument for which the theory has no answer."""


class PictureError(MimicNormError):
    """A figure cannot be drawn or written."""
