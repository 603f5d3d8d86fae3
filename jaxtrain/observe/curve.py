"""Curves drawn with text characters."""

from collections.abc import Mapping, Sequence

HEIGHT = 10
_EIGHTHS = "▁▂▃▄▅▆▇█"


def curve(points: Sequence[tuple[float, float]], references: Mapping[str, float], width: int) -> str:
    """Draw points as an area of block characters, with a dotted line at every reference below the curve's top.

    Args:
      points: (x, y), in the order of x; at least one.
      references: Levels of y by name.
      width: Characters, without the labels of the axis.

    Example:
      >>> print(curve([(0, 2.0), (1, 1.0), (2, 0.0)], {}, width=6).splitlines()[0].rstrip())
         2.00 ┤█
    """
    (first, *_), (last, *_) = points[0], points[-1]
    low, high = min(y for _, y in points), max(y for _, y in points)
    low = min([low, *(r for r in references.values() if r < high)])
    span = (high - low) or abs(high) or 1.0
    floor = low - span / HEIGHT  # so that the lowest value is visible
    heights = [(y - floor) / (high - floor) * HEIGHT for y in _resample(points, width)]
    dotted = {int((r - floor) / (high - floor) * HEIGHT) for r in references.values() if r < high}
    rows = []
    for level in reversed(range(HEIGHT)):
        value = floor + (level + 1) / HEIGHT * (high - floor)
        cells = "".join(_cell(h - level, "·" if level in dotted else " ") for h in heights)
        rows.append(f"{value:7.2f} ┤{cells}")
    ends = f"{first:g}", f"step {last:g}"
    rows.append(f"{'':7} └{'─' * width}")
    rows.append(f"{'':9}{ends[0]}{ends[1]:>{width - len(ends[0])}}")
    return "\n".join(rows)


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values in one line of at most `width` characters, scaled from their lowest to their highest.

    >>> sparkline([4.0, 2.0, 1.0, 1.0], width=4)
    '█▃▁▁'
    """
    if not values:
        return ""
    resampled = _resample(list(enumerate(values)), min(width, len(values)))
    low, high = min(resampled), max(resampled)
    return "".join(_EIGHTHS[round((value - low) / (high - low or 1.0) * 7)] for value in resampled)


def _cell(fill: float, empty: str) -> str:
    if fill <= 0:
        return empty
    return _EIGHTHS[min(int(fill * 8), 7)]


def _resample(points: Sequence[tuple[float, float]], width: int) -> list[float]:
    """Return `width` values from the first point to the last, by linear interpolation."""
    first, last = points[0][0], points[-1][0]
    xs = [first + (last - first) * i / max(width - 1, 1) for i in range(width)]
    values, j = [], 0
    for x in xs:
        while j < len(points) - 2 and points[j + 1][0] < x:
            j += 1
        (x0, y0), (x1, y1) = points[j], points[min(j + 1, len(points) - 1)]
        share = (x - x0) / (x1 - x0) if x1 > x0 else 0.0
        values.append(y0 + share * (y1 - y0))
    return values
