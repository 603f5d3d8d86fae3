"""Tensors, the leaves of a pytree that they can fill, and the cheapest assignment of one to the other."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from jaxtrain.interop import LAYER, Layout, leaves, linear_after_flatten
from parity.weights.layouts import Shape, head_layouts, whole_layouts
from parity.weights.name_evidence import Name, name_prices, natural, sibling_prices

REVISIONS = 5
"""How often an assignment is revised so that the tensors of a module stay together."""


@dataclass(frozen=True)
class Unit:
    """A tensor, or a stack of one tensor from each layer, that one leaf may hold.

    Attributes:
      name: Name as in a table.
      tensors: Names of the tensors.
      shape: Shape of each tensor.
      owner: The class of `parity.weights.layouts.OWNERS` whose weight it is.
    """

    name: str
    tensors: tuple[str, ...]
    shape: Shape
    owner: type | None

    @property
    def stacked(self) -> bool:
        """Whether it has one tensor per layer."""
        return LAYER in self.name

    @property
    def lookalikes(self) -> str:
        """A key that is equal for tensors that could be mistaken for each other."""
        return f"{sorted(self.shape) if len(self.shape) == 2 else self.shape} {len(self.tensors) * self.stacked}"


@dataclass(frozen=True)
class Match:
    """The tensor and layout chosen for a leaf.

    Attributes:
      unit: The tensor, or stack of tensors.
      layout: Its layout.
      cost: What values say against it, 0 to 1.
      rivals: Names of the tensors that values say as little against, and names no more.
    """

    unit: Unit
    layout: Layout
    cost: float
    rivals: tuple[str, ...]


Choice = Mapping[str, Match]
Costs = Callable[["Side", Unit, str, list[Layout]], list[float]]
"""Cost of each layout of a unit for a leaf, 0 to 1."""


class Side:
    """Tensors, and the leaves that they must fill.

    Args:
      shapes: Shapes of the tensors by name.
      like: Pytree of the leaves.
      owners: The class of `parity.weights.layouts.OWNERS` whose weight a tensor is, by name.
      channels: Numbers of channels of images that a linear layer may flatten; empty for none.
    """

    def __init__(self, shapes: Mapping[str, Shape], like: Any, owners: Mapping[str, type], channels: set[int]) -> None:
        self.like = like
        self.leaves = {path: tuple(leaf.shape) for path, leaf in leaves(like)}
        self.channels = channels
        plain = [Unit(name, (name,), shape, owners.get(name)) for name, shape in shapes.items()]
        stacks = [Unit(name, of, shapes[of[0]], owners.get(of[0])) for name, of in _stacks(shapes).items()]
        whole = {path for path in self.leaves if any(self._whole(unit, path) for unit in [*plain, *stacks])}
        self.of_heads = self.leaves.keys() - whole
        filled = {path for path in self.leaves for unit in plain if self.layouts(unit, path)}
        stacks = [unit for unit in stacks if any(self.layouts(unit, path) for path in self.leaves.keys() - filled)]
        within = {name for unit in stacks for name in unit.tensors}
        self.units = [unit for unit in plain if unit.name not in within] + stacks
        order = {name: i for i, name in enumerate(shapes)}
        self.units.sort(key=lambda unit: order[unit.tensors[0]])
        self.paths = sorted(self.leaves, key=natural)

    def layouts(self, unit: Unit, path: str) -> list[Layout]:
        """Return the layouts in which `unit` can fill the leaf, the likeliest first; heads get a separate axis only
        where nothing else fits."""
        if path in self.of_heads and (shape := self._each(unit, path)):
            return head_layouts(unit.shape, shape)
        return self._whole(unit, path)

    def _each(self, unit: Unit, path: str) -> Shape | None:
        """Shape of the leaf, per layer if `unit` is a stack; None if the number of layers differs."""
        shape = self.leaves[path]
        if not unit.stacked:
            return shape
        return shape[1:] if shape[:1] == (len(unit.tensors),) else None

    def _whole(self, unit: Unit, path: str) -> list[Layout]:
        shape = self._each(unit, path)
        return [] if shape is None else whole_layouts(unit.shape, shape, unit.owner, self.channels)

    @property
    def flattened(self) -> set[str]:
        """The `Unit.lookalikes` of the linear layers that may follow a flattened image."""
        return {
            unit.lookalikes
            for unit in self.units
            for path in self.leaves
            if any(layout.source.startswith(linear_after_flatten.__name__) for layout in self.layouts(unit, path))
        }

    @property
    def ambiguous(self) -> bool:
        """Whether a unit or a leaf has several options."""
        options = [[len(self.layouts(unit, path)) for path in self.leaves] for unit in self.units]
        return any(sum(row) > 1 for row in [*options, *zip(*options, strict=True)])

    def faults(self, buffers: Mapping[str, Shape]) -> list[str]:
        """Return lines for what is left over under every assignment; `buffers` are PyTorch's."""
        chosen = self.assigned(no_costs)
        taken = {match.unit.name for match in chosen.values()}
        without_tensor = [
            f"no tensor for {path} {shape}" + (", in PyTorch a buffer" if path.replace("/", ".") in buffers else "")
            for path, shape in self.leaves.items()
            if path not in chosen
        ]
        return without_tensor + [
            f"no leaf for {unit.name} {unit.shape}" for unit in self.units if unit.name not in taken
        ]

    def assigned(self, costs: Costs, *, trust_names: bool = True) -> Choice:
        """Return the cheapest assignment of units to leaves, without pairs that no layout fits.

        Args:
          costs: What values say.
          trust_names: Whether names that both sides share decide before values; otherwise names decide only what
            values leave open.
        """
        fits = np.array([[bool(self.layouts(unit, path)) for path in self.paths] for unit in self.units])
        if not fits.size:
            return {}
        values, layouts = self._values(costs, fits)
        names = name_prices(*self._names, fits, [unit.lookalikes for unit in self.units])
        prices = values + (names if trust_names else np.minimum(names, 0.1 * np.minimum(names, 1)))
        chosen = _cheapest(prices, fits)
        for _ in range(REVISIONS):
            revised = _cheapest(prices + sibling_prices(*self._names, chosen), fits)
            if revised == chosen:
                break
            chosen = revised
        rivals = self._rivals(chosen, np.where(fits, prices, np.inf))
        owners = {j: i for i, j in chosen.items()}
        return {
            self.paths[j]: Match(
                self.units[i], layouts[i, j], float(values[i, j]), tuple(self.units[k].name for k in rivals[i])
            )
            for j, i in sorted(owners.items())
        }

    @cached_property
    def _names(self) -> tuple[list[Name], list[Name]]:
        return [Name.read(unit.name) for unit in self.units], [Name.read(path) for path in self.paths]

    def _values(self, costs: Costs, fits: np.ndarray) -> tuple[np.ndarray, dict[tuple[int, int], Layout]]:
        """The cost of each pair in its cheapest layout, and that layout."""
        values, best = np.zeros(fits.shape), {}
        for i, j in zip(*np.nonzero(fits), strict=True):
            layouts = self.layouts(self.units[i], self.paths[j])
            ways = costs(self, self.units[i], self.paths[j], layouts)
            values[i, j], best[i, j] = min(ways), layouts[int(np.argmin(ways))]
        return values, best

    def _rivals(self, chosen: Mapping[int, int], prices: np.ndarray) -> dict[int, list[int]]:
        """For each unit those that could be exchanged with it for a price higher by less than `MARGIN`.

        A module is exchanged as a whole: one tensor that is told apart tells its siblings apart too.
        """
        rivals = {
            i: [
                k
                for k, other in chosen.items()
                if k != i and prices[k, j] + prices[i, other] < prices[i, j] + prices[k, other] + MARGIN
            ]
            for i, j in chosen.items()
        }
        parents = [name.parent for name in self._names[0]]

        def decided(i: int, k: int) -> bool:
            siblings = [s for s in rivals if s != i and parents[s] == parents[i] != parents[k]]
            return any(parents[k] not in {parents[r] for r in rivals[s]} for s in siblings)

        return {i: [k for k in found if not decided(i, k)] for i, found in rivals.items()}


MARGIN = 0.05
"""Assignments whose prices differ by less are equally good."""


def no_costs(side: Side, unit: Unit, path: str, layouts: list[Layout]) -> list[float]:
    """Return equal costs, so that names and order decide."""
    del side, unit, path
    return [0.0] * len(layouts)


def _cheapest(prices: np.ndarray, fits: np.ndarray) -> dict[int, int]:
    """Return {row: column} of the cheapest assignment of as many fitting pairs as possible."""
    rows, columns = linear_sum_assignment(np.where(fits, prices, 1e6))
    return {int(i): int(j) for i, j in zip(rows, columns, strict=True) if fits[i, j]}


def _stacks(shapes: Mapping[str, Shape]) -> dict[str, tuple[str, ...]]:
    """{"h.{layer}.fc": ("h.0.fc", "h.1.fc")}: names that differ in one number, which counts from 0, alike in shape."""
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for name in shapes:
        parts = name.split(".")
        for i, part in enumerate(parts):
            if part.isdigit():
                found[".".join([*parts[:i], LAYER, *parts[i + 1 :]])][int(part)] = name
    return {
        template: tuple(names[i] for i in range(len(names)))
        for template, names in found.items()
        if sorted(names) == list(range(len(names))) and len({shapes[name] for name in names.values()}) == 1
    }
