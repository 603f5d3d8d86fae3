"""The order of a value's elements, which frameworks may store in different layouts.

Two layouts have one order if they are equal after axes that are next to each other are merged and whole axes are
transposed: [B, T, heads, D] and [B, heads, T, D], or [B, T, heads * D] and [B * T, heads * D], but not
[B, T, D * heads]. Axes of equal lengths keep their order, so that a matrix and its transpose differ, except where one
of three or more moves from the first to the last place, as channels do.

An order is a set of means of the elements, weighted with random numbers that depend on the length of each axis: one
mean for each way of merging axes. Weights of mean 1 make it the same for repetitions along a new axis.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, permutations, product
from typing import NamedTuple

import numpy as np

MAX_SIZE = 1 << 20
"""Number of elements up to which a value has an order."""
LARGEST = 10.0
"""Distance of two weighted means in units of the distance of the elements."""


class Mean(NamedTuple):
    """The mean of the elements in one layout, the lengths of its axes, and whether none of these is merged."""

    mean: float
    lengths: tuple[int, ...]
    whole: bool


Order = tuple[Mean, ...]
"""The means, those of axes that are not merged first; empty for a large value."""


def order(value: np.ndarray) -> Order:
    """Return the order of a value, whose elements are finite.

    >>> x = np.arange(24.0).reshape(2, 3, 4)
    >>> same_order(order(x), order(x.transpose(2, 0, 1)), 1e-10), same_order(order(x), order(x.reshape(6, 4)), 1e-10)
    (True, True)
    >>> same_order(order(x), order(x[:, ::-1]), 1e-10)
    False
    """
    x = _squeezed(value)
    if x.size > MAX_SIZE:
        return ()
    # The other program may not have a repeated axis.
    single = _squeezed(x[tuple(slice(1 if _is_repeated(x, axis) else None) for axis in range(x.ndim))])
    return _order(x, _kept) if single.shape == x.shape else _order(single, _kept) + _order(x, _kept)


def order_of_weights(value: np.ndarray) -> Order:
    """Return the same for a parameter, any of whose axes the frameworks may exchange."""
    return _order(_squeezed(value), permutations) if value.size <= MAX_SIZE else ()


def same_order(one: Order, other: Order, tolerance: float) -> bool:
    """Whether two orders have a mean in common."""
    means = np.subtract.outer([a.mean for a in one], [b.mean for b in other])
    return bool((np.abs(means) <= tolerance).any())


def is_layout(one: Order, other: Order, tolerance: float) -> bool:
    """Whether the layout with order `one` is that of `other` with axes merged or transposed."""
    return same_order(one[:1], other, tolerance)


def same_layout(one: Order, other: Order, tolerance: float) -> bool:
    """Whether one of two layouts is the other with axes merged or transposed, or without an order."""
    return not one or is_layout(one, other, tolerance) or is_layout(other, one, tolerance)


def comparable(one: Order, other: Order) -> bool:
    """Whether two orders have axes of the same lengths, so that they are different unless they have a mean in common.

    >>> heads = order(np.arange(120.0).reshape(2, 3, 4, 5))
    >>> comparable(heads, order(np.zeros((3, 2, 20)))), comparable(heads, order(np.zeros((8, 3, 5))))
    (True, False)
    """
    kinds = [({a.lengths for a in some if a.whole}, {a.lengths for a in some}) for some in (one, other)]
    (whole, any_of_one), (others_whole, any_of_other) = kinds
    return not (whole.isdisjoint(any_of_other) and others_whole.isdisjoint(any_of_one))


def _squeezed(value: np.ndarray) -> np.ndarray:
    return np.squeeze(np.asarray(value, np.float64))


def _is_repeated(x: np.ndarray, axis: int) -> bool:
    first = x.take([0], axis)
    return bool((first == x.take([1], axis)).all() and (first == x).all())


def _kept(axes: list[int]) -> Iterable[tuple[int, ...]]:
    """The exchanges of axes of one length that do not change the order."""
    return [(*axes[i:], *axes[:i]) for i in range(len(axes))] if len(axes) > 2 else [tuple(axes)]


def _order(x: np.ndarray, exchanges: Callable[[list[int]], Iterable[tuple[int, ...]]]) -> Order:
    """The means of `x` with the axes of each length exchanged in the given ways."""
    groups = [[axis for axis, m in enumerate(x.shape) if m == n] for n in dict.fromkeys(x.shape)]
    found: dict[Mean, None] = {}
    for exchanged in product(*map(exchanges, groups)):
        axes = dict(zip(chain(*groups), chain(*exchanged), strict=True))
        for mean, lengths in _means(x.transpose([axes[axis] for axis in range(x.ndim)]), ()):
            found[Mean(mean, tuple(sorted(lengths)), len(lengths) == x.ndim)] = None
    return tuple(found)


def _means(x: np.ndarray, after: tuple[int, ...]) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Weighted means of `x`, the last axes of which are merged in every way; `after` are lengths of axes behind it."""
    if not x.ndim:
        yield float(x), after
    for merged in range(x.ndim):
        rows = x.reshape(*x.shape[: x.ndim - 1 - merged], -1)
        n = rows.shape[-1]
        yield from _means((rows * _weights(n, after.count(n))).mean(-1), (n, *after))


@functools.lru_cache(maxsize=256)
def _weights(n: int, number: int) -> np.ndarray:
    """Weights of mean 1 of the axis of length `n` that `number` axes of this length follow."""
    weights = np.random.default_rng([n, number]).standard_normal(n)
    return 1 + weights - weights.mean()
