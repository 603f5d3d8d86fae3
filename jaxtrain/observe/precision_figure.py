"""Draw the magnitudes of values and what a precision loses of them, as figure 3 of Micikevicius et al. 2018.

References:
  Micikevicius et al. 2018, "Mixed Precision Training", arXiv:1710.03740.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from jaxtrain.pages import Cell, Chart, Panel, Region, Strip, Table, bars, between, logarithmic
from jaxtrain.step import KINDS, Magnitudes, PrecisionLosses

_LOW, _HIGH = -42.0, 18.0  # exponents: the bins, and two octaves at either end for what is beyond
_FLOOR = 1e-5  # share of the lowest bar
_SNAP = 0.01  # octaves: a bin that is narrower is drawn with the next
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def precision_figure(losses: PrecisionLosses, title: str, kinds: Sequence[str]) -> Chart | None:
    """Return the histogram of the magnitudes of all layers, and one row for each layer, over the same axis.

    Args:
      losses: The measurement.
      title: Title of the figure.
      kinds: Which attributes of the layers are drawn, added.

    Returns:
      The chart; None if there are no values.
    """
    rows = [(layer.name, _sum([getattr(layer, kind) for kind in kinds])) for layer in losses.layers]
    rows = [(name, found) for name, found in rows if found.total]
    if not rows:
        return None
    every = _sum([found for _, found in rows])
    x = between(_LOW, _HIGH, range(-36, 13, 12), lambda power: "2" + str(power).translate(_SUPERSCRIPTS))
    y = logarithmic([_FLOOR, 1.0], label=lambda share: f"{100 * share:g}%")
    histogram = [(first, last, share) for first, last, share in _bins(every) if share > _FLOOR]
    return Chart(
        title,
        x,
        [
            Panel("", y, [("bar", bars(histogram, x, y))]),
            *(Strip(name, [*_cells(found)], f"{_percent(found.lost)} lost") for name, found in rows),
        ],
        label="magnitude before rounding",
        regions=[*_regions(every)],
        left=124,
        right=84,
    )


def precision_table(losses: PrecisionLosses) -> Table:
    """Return a row for each layer: what it loses and what becomes subnormal, of each kind of values."""
    heading = ["", *(f"{kind.replace('_', ' ')} {what}" for kind in KINDS for what in ("lost", "subnormal"))]
    rows = [[layer.name, *(text for kind in KINDS for text in _texts(getattr(layer, kind)))] for layer in losses.layers]
    return Table(heading, rows, "what each layer loses", numbers=range(1, len(heading)))


def _texts(found: Magnitudes) -> list[str]:
    return [_percent(found.lost), _percent(found.share("subnormal"))] if found.total else ["—", "—"]


def _percent(share: float) -> str:
    return "0" if not share else f"{share:.2%}" if share >= 1e-4 else "< 0.01%"


def _sum(parts: Sequence[Magnitudes]) -> Magnitudes:
    return Magnitudes(parts[0].dtype, tuple(map(sum, zip(*(part.counts for part in parts), strict=True))))


def _bins(found: Magnitudes) -> list[tuple[float, float, float]]:
    """Return (first exponent, last exponent, share of the elements that are not zero) of each bin."""
    ends = [math.log2(edge) if 0 < edge < math.inf else math.inf for edge in found.edges[1:]]
    nonzero = max(found.total - found.zero, 1)
    bins, kept = [], 0
    for (first, last), count in zip(pairwise(ends), found.counts[1:], strict=False):
        kept += count
        if last - first > _SNAP and min(last, _HIGH) > max(first, _LOW):
            bins.append((max(first, _LOW), min(last, _HIGH), kept / nonzero))
            kept = 0
    if kept and bins:
        bins[-1] = (*bins[-1][:2], bins[-1][2] + kept / nonzero)
    return bins


def _cells(found: Magnitudes) -> Iterator[Cell]:
    for first, last, share in _bins(found):
        if share > _FLOOR:
            opacity = min(max(1 + math.log10(share) / -math.log10(_FLOOR), 0.04), 1.0)
            yield Cell(first, last, "bar", opacity, _percent(share))


def _regions(found: Magnitudes) -> Iterator[Region]:
    """Yield the regions in which values become zero, subnormal or overflow, with their shares."""
    nonzero, normal, overflow = (math.log2(limit) for limit in found.limits)
    for css, label, name, first, last in (
        ("zero", "become zero", "underflow", _LOW, nonzero),
        ("subnormal", "subnormal", "subnormal", nonzero, normal),
        ("overflow", "inf", "overflow", overflow, _HIGH),
    ):
        if last > _LOW and first < _HIGH:
            yield Region(first, last, css, f"{label} {_percent(found.share(name))}")
