"""Draw the magnitudes of values and what a precision loses of them, as figure 3 of Micikevicius et al. 2018.

References:
  Micikevicius et al. 2018, "Mixed Precision Training", arXiv:1710.03740.
"""

import math
from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise

import numpy as np

from jaxtrain.step import KINDS, Magnitudes, PrecisionLosses

_WIDTH, _LEFT, _RIGHT, _TOP = 630, 118, 62, 62
_HISTOGRAM, _ROW, _GAP = 150, 15, 30
_AXIS = (-42.0, 18.0)  # exponents: the bins, and two octaves at either end for what is beyond
_FLOOR = 1e-5  # share of the lowest bar
_SNAP = 0.01  # octaves: a bin that is narrower is drawn with the next


def precision_figure(losses: PrecisionLosses, title: str, kinds: Sequence[str]) -> str:
    """Return an SVG: the histogram of the magnitudes of all layers, and one row for each layer, over the same axis.

    Args:
      losses: The measurement.
      title: Title of the figure.
      kinds: Which attributes of the layers are drawn, added.
    """
    rows = [(layer.name, _sum([getattr(layer, kind) for kind in kinds])) for layer in losses.layers]
    rows = [(name, found) for name, found in rows if found.total]
    if not rows:
        return ""
    every = _sum([found for _, found in rows])
    height = _TOP + _HISTOGRAM + _GAP + _ROW * len(rows) + 40
    label = escape(_summary(title, every))
    parts = [
        f'<svg class="magnitudes" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{label}">',
        f'<text class="title" x="0" y="14">{escape(title)}</text>',
        *_regions(every, height),
        *_histogram(every),
        *_layers(rows),
        *_axis(height),
        "</svg>",
    ]
    return "".join(parts)


def precision_table(losses: PrecisionLosses) -> list[list[str]]:
    """Return a heading and a row for each layer: what it loses and what becomes subnormal, of each kind of values."""
    heading = ["", *(f"{kind.replace('_', ' ')} {what}" for kind in KINDS for what in ("lost", "subnormal"))]
    rows = [[layer.name, *(cell for kind in KINDS for cell in _cells(getattr(layer, kind)))] for layer in losses.layers]
    return [heading, *rows]


def _cells(found: Magnitudes) -> list[str]:
    return [_percent(found.lost), _percent(found.share("subnormal"))] if found.total else ["—", "—"]


def _percent(share: float) -> str:
    return "0" if not share else f"{share:.2%}" if share >= 1e-4 else "< 0.01%"


def _summary(title: str, found: Magnitudes) -> str:
    shares = ", ".join(f"{_percent(found.share(name))} {name}" for name in ("underflow", "subnormal", "overflow"))
    return f"{title} in {found.dtype}: {shares}"


def _sum(parts: Sequence[Magnitudes]) -> Magnitudes:
    return Magnitudes(parts[0].dtype, tuple(map(sum, zip(*(part.counts for part in parts), strict=True))))


def _bins(found: Magnitudes) -> list[tuple[float, float, float]]:
    """Return (first exponent, last exponent, share of the elements that are not zero) of each bin."""
    ends = [math.log2(edge) if 0 < edge < math.inf else math.inf for edge in found.edges[1:]]
    low, high = _AXIS
    nonzero = max(found.total - found.zero, 1)
    bins, kept = [], 0
    for (first, last), count in zip(pairwise(ends), found.counts[1:], strict=False):
        kept += count
        if last - first > _SNAP and min(last, high) > max(first, low):
            bins.append((max(first, low), min(last, high), kept / nonzero))
            kept = 0
    if kept and bins:
        bins[-1] = (*bins[-1][:2], bins[-1][2] + kept / nonzero)
    return bins


def _x(exponent: float) -> float:
    low, high = _AXIS
    share = (min(max(exponent, low), high) - low) / (high - low)
    return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)


def _regions(found: Magnitudes, height: int) -> Iterator[str]:
    """Yield the shaded regions in which values become zero, subnormal or overflow, with their shares."""
    nonzero, normal, overflow = (math.log2(limit) for limit in found.limits)
    low, high = _AXIS
    regions = (("zero", "underflow", low, nonzero), ("subnormal", "subnormal", nonzero, normal))
    for css, name, first, last in (*regions, ("overflow", "overflow", overflow, high)):
        if last > low and first < high:
            begin, end = _x(first), _x(last)
            width, middle = round(end - begin, 1), round((begin + end) / 2, 1)
            yield f'<rect class="{css}" x="{begin}" y="{_TOP - 16}" width="{width}" height="{height - _TOP - 18}"/>'
            for y, text in ((_TOP - 36, _label(css)), (_TOP - 22, escape(_percent(found.share(name))))):
                yield f'<text x="{middle}" y="{y}" text-anchor="middle">{text}</text>'


def _label(css: str) -> str:
    return {"zero": "become zero", "subnormal": "subnormal", "overflow": "inf"}[css]


def _histogram(found: Magnitudes) -> Iterator[str]:
    bottom, decades = _TOP + _HISTOGRAM, -math.log10(_FLOOR)

    def y(share: float) -> float:
        return round(bottom - _HISTOGRAM * (1 + math.log10(max(share, _FLOOR)) / decades), 1)

    for power in range(round(-decades), 1):
        label = f"{100 * 10.0**power:g}%"
        yield f'<line class="rule" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(10.0**power)}" y2="{y(10.0**power)}"/>'
        yield f'<text x="{_LEFT - 6}" y="{y(10.0**power) + 4}" text-anchor="end">{label}</text>'
    for first, last, share in _bins(found):
        if share > _FLOOR:
            width, tall = round(_x(last) - _x(first) - 1, 1), round(bottom - y(share), 1)
            yield f'<rect class="bar" x="{_x(first)}" y="{y(share)}" width="{width}" height="{tall}"/>'


def _layers(rows: Sequence[tuple[str, Magnitudes]]) -> Iterator[str]:
    top = _TOP + _HISTOGRAM + _GAP
    for i, (name, found) in enumerate(rows):
        y = top + i * _ROW
        yield f'<text x="{_LEFT - 6}" y="{y + 11}" text-anchor="end">{escape(name)}</text>'
        for first, last, share in _bins(found):
            if share > _FLOOR:
                opacity = round(float(np.clip(1 + math.log10(share) / -math.log10(_FLOOR), 0.04, 1)), 2)
                box = f'x="{_x(first)}" y="{y}" width="{round(_x(last) - _x(first), 1)}" height="{_ROW - 1}"'
                yield f'<rect class="bar" {box} opacity="{opacity}"><title>{escape(_percent(share))}</title></rect>'
        yield f'<text class="lost" x="{_WIDTH - _RIGHT + 4}" y="{y + 11}">{escape(_percent(found.lost))}</text>'
    yield f'<text x="{_WIDTH - _RIGHT + 4}" y="{top - 6}">lost</text>'


def _axis(height: int) -> Iterator[str]:
    bottom = height - 40
    for exponent in range(-40, 17, 8):
        yield f'<line class="rule" x1="{_x(exponent)}" x2="{_x(exponent)}" y1="{_TOP}" y2="{bottom + 3}"/>'
        text = f'2<tspan dy="-4" font-size="9">{exponent}</tspan>'
        yield f'<text x="{_x(exponent)}" y="{bottom + 17}" text-anchor="middle">{text}</text>'
    yield f'<text x="{_x(-12)}" y="{bottom + 32}" text-anchor="middle">magnitude before rounding</text>'
