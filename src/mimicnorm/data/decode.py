"""Images through Pillow: an error names the image that does not decode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from mimicnorm.errors import DataError


@contextlib.contextmanager
def opened(file: Path | IO[bytes], where: str) -> Iterator[Any]:
    """Open an encoded image, to be decoded inside the block; ``where`` names its file and row in errors."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(file) as image:
            yield image
    except DataError:
        raise
    except UnidentifiedImageError as error:
        raise DataError(f"{where} does not decode (not a format that Pillow knows)") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{where} does not decode ({error})") from error
