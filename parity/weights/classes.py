"""The layout of a tensor whose values leave it open: the one that other tensors of its class have.

The loss of a wrong model tells a square kernel from its transpose no better than chance, but kernels of one class have
one layout, and the shapes of those that are not square show it.
"""

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from jaxtrain.interop import Layout
from parity.weights.assignment import Choice, Costs, Side, Unit

UNDECIDED = 0.25
"""Largest difference of the costs of two layouts, more than two decades of the loss's change, that says nothing."""
STEP = 1e-3
"""Difference of the costs of the layout chosen and of the next."""


def by_class(costs: Costs, choices: Iterable[tuple[Side, Choice]]) -> Costs:
    """Return costs whose cheapest layout is the one of its class where values leave it open.

    Args:
      costs: What values say.
      choices: The leaves with the tensors chosen for them.
    """
    pairs: dict[tuple[type | None, str], list[dict[str, float]]] = defaultdict(list)
    for side, choice in choices:
        for path, match in choice.items():
            layouts = side.layouts(match.unit, path)
            ways = costs(side, match.unit, path, layouts)
            excess = {layout.source: way - min(ways) for layout, way in zip(layouts, ways, strict=True)}
            pairs[_class(match.unit, path)].append(excess)

    def decided(side: Side, unit: Unit, path: str, layouts: list[Layout]) -> list[float]:
        ways = np.array(costs(side, unit, path, layouts))
        alike = pairs[_class(unit, path)]
        totals = np.array([sum(pair.get(layout.source, 1.0) for pair in alike) for layout in layouts])
        best = int(np.argmin(np.where(ways < ways.min() + UNDECIDED, totals, np.inf)))
        low = float(ways.min())
        return [low if i == best else max(float(way), low + STEP) for i, way in enumerate(ways)]

    return decided


def _class(unit: Unit, path: str) -> tuple[type | None, str]:
    """Layers of one type; tensors of others, where leaves have the same name: "kernel" or "embedding"."""
    return unit.owner, "" if unit.owner else path.rpartition("/")[2]
