"""Tensors, the leaves of a pytree that they can fill, and the cheapest assignment of one to the other."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment

from jaxtrain.interop import (
    AS_IS,
    CONV,
    LAYER,
    LINEAR,
    Layout,
    bias_to_heads,
    leaves,
    linear_after_flatten,
    linear_from_heads,
    linear_to_heads,
)

Shape = tuple[int, ...]
Convolution = torch.nn.modules.conv._ConvNd
OWNERS = (torch.nn.Linear, Convolution)
"""Modules whose weight has its axes in another order in JAX."""
WORDS = {"weight": "kernel", "scale": "kernel", "embedding": "kernel", "gamma": "kernel", "beta": "bias"}
WORDS |= {"running_mean": "mean", "running_var": "var", "num_batches_tracked": "count"}


@dataclass(frozen=True)
class Unit:
    """A tensor, or a stack of one tensor from each layer, that one leaf may hold.

    Attributes:
      name: Name as in a table.
      tensors: Names of the tensors.
      shape: Shape of each tensor.
      owner: The class of `OWNERS` whose weight it is.
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


Choice = Mapping[str, tuple[Unit, Layout]]


class Side:
    """Tensors, and the leaves that they must fill."""

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

    def layouts(self, unit: Unit, path: str) -> list[Layout]:
        """The layouts in which `unit` can fill the leaf, the likeliest first; heads get a separate axis only where
        nothing else fits."""
        if path in self.of_heads and (shape := self._each(unit, path)):
            return _of_heads(unit.shape, shape)
        return self._whole(unit, path)

    def _each(self, unit: Unit, path: str) -> Shape | None:
        """Shape of the leaf, per layer if `unit` is a stack; None if the number of layers differs."""
        shape = self.leaves[path]
        if not unit.stacked:
            return shape
        return shape[1:] if shape[:1] == (len(unit.tensors),) else None

    def _whole(self, unit: Unit, path: str) -> list[Layout]:
        shape = self._each(unit, path)
        if shape is None:
            return []
        found = [AS_IS] if shape == unit.shape else []
        if len(shape) == 2 and shape == unit.shape[::-1]:
            found = [LINEAR, *found] if unit.owner is torch.nn.Linear else [*found, LINEAR]
            found += [linear_after_flatten(*image) for image in _images(shape[0], self.channels)]
        if len(shape) == len(unit.shape) > 2 and shape == (*unit.shape[2:], unit.shape[1], unit.shape[0]):
            found = [CONV] if unit.owner is Convolution or not found else found
        return found

    def ambiguous(self) -> bool:
        """Return whether a unit or a leaf has several options."""
        options = [[len(self.layouts(unit, path)) for path in self.leaves] for unit in self.units]
        return any(sum(row) > 1 for row in [*options, *zip(*options, strict=True)])

    def faults(self) -> list[str]:
        """Lines for what is left over under every assignment."""
        chosen = self.assigned(by_names)
        taken = {unit.name for unit, _ in chosen.values()}
        return [f"no tensor for {path} {shape}" for path, shape in self.leaves.items() if path not in chosen] + [
            f"no leaf for {unit.name} {unit.shape}" for unit in self.units if unit.name not in taken
        ]

    def assigned(self, costs: "Costs") -> Choice:
        """The cheapest assignment of units to leaves, without pairs that no layout fits."""
        paths = sorted(self.leaves, key=_natural)
        impossible = 1e6
        prices = np.full((len(self.units), len(paths)), impossible)
        best: dict[tuple[int, int], Layout] = {}
        for i, unit in enumerate(self.units):
            for j, path in enumerate(paths):
                if layouts := self.layouts(unit, path):
                    ways = costs(self, unit, path, layouts)
                    best[i, j] = layouts[int(np.argmin(ways))]
                    misplaced = abs(i / len(self.units) - j / len(paths))
                    prices[i, j] = min(ways) + 0.02 * (_unlike(unit.name, path) + 0.3 * misplaced)
        pairs = zip(*linear_sum_assignment(prices), strict=True)
        return {paths[j]: (self.units[i], best[i, j]) for i, j in pairs if (i, j) in best}


Costs = Callable[[Side, Unit, str, list[Layout]], list[float]]
"""Cost of each layout of a unit for a leaf, 0 to 1."""


def by_names(side: Side, unit: Unit, path: str, layouts: list[Layout]) -> list[float]:
    """Return equal costs, so that names and order decide."""
    del side, unit, path
    return [0.0] * len(layouts)


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


def _images(features: int, channels: set[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (channels, height, width) of images that flatten to `features`, the squarest first."""
    for n in sorted(channels):
        pixels = features // n if features % n == 0 else 0
        heights = [height for height in range(1, pixels + 1) if pixels % height == 0 and pixels > 1]
        yield from ((n, h, pixels // h) for h in sorted(heights, key=lambda h: (max(h, pixels // h), h)))


def _of_heads(theirs: Shape, ours: Shape) -> list[Layout]:
    """Layouts of an attention projection whose heads have a separate axis in JAX."""
    match theirs, ours:
        case (n,), (heads, size) if n == heads * size:
            return [bias_to_heads(heads, size)]
        case (n, n_in), (same, heads, size) if (n, n_in) == (heads * size, same):
            return [linear_to_heads(heads, size)]
        case (n_out, n), (heads, size, same) if (n_out, n) == (same, heads * size):
            return [linear_from_heads(heads, size)]
    return []


def _unlike(torch_name: str, path: str) -> float:
    """Dissimilarity of the words of two names, 0 to 1; numbers are an order, not words."""
    ours, theirs = ([WORDS.get(w, w) for w in re.split(r"[./]", name)] for name in (path, torch_name))
    ends = ours[-1] != theirs[-1]
    text, other = (re.sub(r"[^a-z]+", " ", " ".join(words).lower()).strip() for words in (ours, theirs))
    return (ends + 1 - SequenceMatcher(None, text, other).ratio()) / 2


def _natural(path: str) -> list[tuple[int, str]]:
    """Sort key that puts layer 10 after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path)]
