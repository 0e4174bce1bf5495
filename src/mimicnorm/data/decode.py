"""Images through Pillow: what is wrong with one is said with its place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from mimicnorm.data.requirements import require
from mimicnorm.errors import DataError


@contextlib.contextmanager
def opened(file: Path | IO[bytes], where: str) -> Iterator[Any]:
    """An encoded image, to be decoded inside; ``where`` names it by its file and row."""
    pil = require("PIL.Image")
    try:
        with pil.open(file) as image:
            yield image
    except DataError:
        raise
    except pil.UnidentifiedImageError as error:
        raise DataError(f"{where} does not decode (no format that Pillow knows)") from error
    except (OSError, SyntaxError, ValueError, pil.DecompressionBombError) as error:
        raise DataError(f"{where} does not decode ({error})") from error
