"""The order of a value's elements, which frameworks may store in different layouts.

Two layouts hold a value in one order if they are equal after axes that are next to each other are merged and whole axes
are transposed: [B, T, heads, D] and [B, heads, T, D], or [B, T, heads * D] and [B * T, heads * D], but not
[B, T, D * heads]. Axes of equal lengths keep their order, so that a matrix and its transpose differ, except where one
of three or more moves from the first to the last place, as channels do.

An order is a set of means of the elements, weighted with random numbers that depend on the length of each axis: one
mean for each way of merging axes. Weights of mean 1 make it the same for repetitions along a new axis.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, permutations, product

import numpy as np

Order = tuple[float, ...]
"""The weighted means, that of the most axes first."""
LARGEST = 10.0
"""Size of the weights: that of the distance of two means, in units of the distance of the elements."""


def order(value: np.ndarray) -> Order:
    """Return the order of a value, whose elements are finite.

    >>> x = np.arange(24.0).reshape(2, 3, 4)
    >>> same_order(order(x), order(x.transpose(2, 0, 1)), 1e-10), same_order(order(x), order(x.reshape(6, 4)), 1e-10)
    (True, True)
    >>> same_order(order(x), order(x[:, ::-1]), 1e-10)
    False
    """
    x = _squeezed(value)
    # The number of a repeated axis must not count.
    repeated = [i for i, n in enumerate(x.shape) if x.shape.count(n) > 1 and (x == x.take([0], i)).all()]
    kinds = (
        [x] if not repeated else [_squeezed(x[tuple(slice(1 if i in repeated else None) for i in range(x.ndim))]), x]
    )
    return tuple(dict.fromkeys(mean for kind in kinds for mean in _order(kind, _kept)))


def order_of_weights(value: np.ndarray) -> Order:
    """Return the same for a parameter, any of whose axes the frameworks may exchange."""
    return _order(_squeezed(value), permutations)


def same_order(one: Order, other: Order, tolerance: float) -> bool:
    """Whether two orders have a mean in common."""
    return bool((np.abs(np.subtract.outer(one, other)) <= tolerance).any())


def _squeezed(value: np.ndarray) -> np.ndarray:
    return np.squeeze(np.asarray(value, np.float64))


def _kept(axes: list[int]) -> Iterable[tuple[int, ...]]:
    """The exchanges of axes of one length that do not change the order."""
    return [(*axes[i:], *axes[:i]) for i in range(len(axes))] if len(axes) > 2 else [tuple(axes)]


def _order(x: np.ndarray, exchanges: Callable[[list[int]], Iterable[tuple[int, ...]]]) -> Order:
    """The means of `x` with the axes of each length exchanged in the given ways."""
    groups = [[axis for axis, m in enumerate(x.shape) if m == n] for n in dict.fromkeys(x.shape)]
    found: dict[float, None] = {}
    for exchanged in product(*map(exchanges, groups)):
        axes = dict(zip(chain(*groups), chain(*exchanged), strict=True))
        found.update(dict.fromkeys(_means(x.transpose([axes[axis] for axis in range(x.ndim)]), Counter())))
    return tuple(found)


def _means(x: np.ndarray, seen: Counter[int]) -> Iterator[float]:
    """Weighted means of `x`, the last axes of which are merged in every way; `seen` counts the axes of each length."""
    if not x.ndim:
        yield float(x)
    for merged in range(x.ndim):
        rows = x.reshape(*x.shape[: x.ndim - 1 - merged], -1)
        n = rows.shape[-1]
        yield from _means((rows * _weights(n, seen[n])).mean(-1), seen + Counter([n]))


@functools.cache
def _weights(n: int, number: int) -> np.ndarray:
    """Weights of mean 1 of the axis of length `n` that `number` axes of this length follow."""
    weights = np.random.default_rng([n, number]).standard_normal(n)
    return 1 + weights - weights.mean()
