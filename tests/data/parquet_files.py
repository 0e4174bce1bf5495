"""Small Parquet files as the hub keeps them."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image


def encoded(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def pictures(count: int, shape: tuple[int, ...] = (32, 32, 3), seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, shape, dtype=np.uint8) for _ in range(count)]


def bright(count: int, shape: tuple[int, ...], mean: float | tuple[float, ...]) -> list[np.ndarray]:
    """Pictures of a given mean: black and white pixels."""
    return [x * np.uint8(255) for x in np.random.default_rng(0).random((count, *shape)) < mean]


def write(path: Path, images: list, labels: list, image: str = "img", label: str = "fine_label") -> Path:
    """Images are arrays, or bytes (or None) as they shall stand in the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cells = [{"bytes": encoded(x) if isinstance(x, np.ndarray) else x, "path": None} for x in images]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    pq.write_table(pa.table({image: pa.array(cells, kind), label: labels, "coarse_label": [0] * len(labels)}), path)
    return path
