"""Render an example's image and a confusion matrix as pixels."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
"""uint8[H, W], gray, or uint8[H, W, 3], RGB."""

READABLE = 40
"""Most classes of a confusion matrix that is still readable."""
_CELL, _MARGIN, _LETTER = 28, 6, 7
_LIGHT = (255, 255, 255)
_DARK = (23, 78, 166)


def image_of(example: Mapping[str, Any]) -> Pixels | None:
    """Return the example's image; None if it has no displayable one.

    uint8 pixels are shown as they are, others scaled from min(lowest, 0) to max(highest, 1).

    >>> image_of({"image": np.array([[[0.0], [0.5], [1.0]]])}).tolist()
    [[0, 128, 255]]
    >>> image_of({"tokens": np.arange(3)})
    """
    values = example.get("image")
    if values is None or values.ndim != 3 or values.shape[-1] not in (1, 3):
        return None
    if values.dtype == np.uint8:
        return values[..., 0] if values.shape[-1] == 1 else values
    low, high = min(float(values.min()), 0.0), max(float(values.max()), 1.0)
    pixels = np.round((values - low) / (high - low) * 255).astype(np.uint8)
    return pixels[..., 0] if pixels.shape[-1] == 1 else pixels


def confusion_picture(counts: NDArray[np.int64], names: Sequence[str]) -> Pixels:
    """Draw a confusion matrix: one row per target, darker cells for larger shares of the row.

    Args:
      counts: int64[n, n], by target and predicted class.
      names: The n classes.

    Returns:
      uint8[H, W, 3].

    >>> picture = confusion_picture(np.array([[9, 1], [0, 5]]), ["cat", "dog"])
    >>> picture.shape == (_CELL * 2 + 2 * _MARGIN + _CELL, _CELL * 2 + 2 * _MARGIN + 3 * _LETTER, 3)
    True
    """
    from PIL import Image, ImageDraw

    n = len(names)
    left = _MARGIN + _LETTER * max(map(len, names))
    top = _CELL
    picture = Image.new("RGB", (left + _CELL * n + _MARGIN, top + _CELL * n + 2 * _MARGIN), "white")
    draw = ImageDraw.Draw(picture)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    for row, name in enumerate(names):
        y = top + _CELL * row
        draw.text((left - _MARGIN // 2, y + _CELL // 2), name, fill="black", anchor="rm")
        draw.text((left + _CELL * row + _CELL // 2, top - _MARGIN), _short(name), fill="black", anchor="ms")
        for column in range(n):
            x, share = left + _CELL * column, float(shares[row, column])
            shade = tuple(round(light + share * (dark - light)) for light, dark in zip(_LIGHT, _DARK, strict=True))
            draw.rectangle((x, y, x + _CELL - 2, y + _CELL - 2), fill=shade)
            if counts[row, column]:
                ink = "white" if share > 0.5 else "black"
                draw.text((x + _CELL // 2, y + _CELL // 2), _count(counts[row, column]), fill=ink, anchor="mm")
    return np.asarray(picture)


def _short(name: str) -> str:
    """Cut a name to the width of a column."""
    return name[: _CELL // _LETTER]


def _count(number: int) -> str:
    """Format a count in at most four characters.

    >>> [_count(n) for n in (7, 999, 12_345, 3_400_000)]
    ['7', '999', '12k', '3M']
    """
    thousands = 0
    while number >= 1000:
        number, thousands = number // 1000, thousands + 1
    return f"{number}{['', 'k', 'M', 'G'][thousands]}"
