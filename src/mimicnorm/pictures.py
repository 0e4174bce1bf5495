"""One canvas for every figure: made without a window system, written whole or not at all."""

from __future__ import annotations

import contextlib
import os
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mimicnorm.errors import PictureError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def canvas(rows: int, columns: int, width: float, height: float, **shared: Any) -> tuple[Figure, Any]:
    """Return a figure of ``width`` x ``height`` inches and its axes: an array of rows, or one row.

    Example:
        >>> figure, (left, right) = canvas(1, 2, 8, 3)
    """
    new_canvas, new_figure = _matplotlib()
    figure = new_figure(figsize=(width, height), layout="constrained")
    new_canvas(figure)
    axes = figure.subplots(rows, columns, squeeze=False, **shared)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes if rows > 1 else axes[0]


def require_picture(path: str | Path) -> Path:
    """Return the path if a figure can be written there. Call it before any long computation."""
    known, path = _matplotlib()[0].get_supported_filetypes(), Path(path)
    if path.suffix[1:].lower() not in known:
        raise PictureError(
            f"cannot draw to {str(path)!r}: {path.suffix!r} is not an image format; end the name in one of "
            f".{', .'.join(sorted(known))}"
        )
    if not path.parent.is_dir():
        raise PictureError(f"cannot draw to {str(path)!r}: there is no directory {str(path.parent)!r}")
    return path


def save(figure: Figure, path: str | Path, *, dpi: int = 100, palette: int | None = 96) -> None:
    """Write a figure; the ending of the path chooses the format.

    A PNG gets a palette: hundreds of translucent lines would make one of several hundred kilobytes.
    """
    path = require_picture(path)
    ending = path.suffix[1:].lower()
    figure.savefig(buffer := BytesIO(), format=ending, dpi=dpi)
    if ending == "png" and palette:
        from PIL import Image

        Image.open(buffer).convert("RGB").quantize(palette).save(buffer := BytesIO(), "PNG", optimize=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(buffer.getvalue())
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise PictureError(f"cannot write {path}: {error.strerror or error}") from error


def svg(figure: Figure) -> str:
    """Return a figure as an ``<svg>`` element for an HTML page: text in the page's font, the same bytes every time."""
    from matplotlib import rc_context

    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "mimicnorm"}):
        figure.savefig(buffer := BytesIO(), format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue().decode()
    return text[text.index("<svg") :]


def _matplotlib() -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PictureError("figures need matplotlib: pip install matplotlib") from error
    return FigureCanvasAgg, Figure
