"""A kernel of attention in a program for a mesh, whose devices compute some rows, and some heads, each.

A program for several devices is divided by XLA, which knows nothing of a kernel and would let every device compute all.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

ROWS, HEADS, GROUPS, MEMBERS = "rows", "heads", "groups", "members"
AXES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("q", "dq"), (ROWS, "queries", HEADS, "width")),
    **dict.fromkeys(("k", "dk"), (ROWS, "keys", GROUPS, "width")),
    **dict.fromkeys(("v", "dv"), (ROWS, "keys", GROUPS, "values")),
    **dict.fromkeys(("out", "cotangent"), (ROWS, "queries", HEADS, "values")),
    **dict.fromkeys(("mask", "bias", "dbias"), (ROWS, HEADS, "queries", "keys")),
    **dict.fromkeys(("sinks", "dsinks"), (ROWS, HEADS)),
    **dict.fromkeys(("q_segments", "q_positions"), (ROWS, "queries")),
    **dict.fromkeys(("k_segments", "k_positions"), (ROWS, "keys")),
    "statistics": (ROWS, HEADS, "queries", "statistics"),
    "rng": (ROWS, "words"),
}
"""The axes of the arrays of attention and of their gradients, by name. Any may have size 1 where all share it."""


def partitioned(
    kernel: Callable[..., Sequence[Any]], names: Sequence[str], results: Sequence[str], *arrays: Any
) -> list[Any]:
    """Run a kernel, in a program for a mesh on each device with its rows and heads.

    Args:
      kernel: A function of the arrays that treats rows and, in groups, heads independently of each other.
      names: The names of the arrays, of which q and k are the first.
      results: The names of what it returns; none may be a sum over rows or heads.
      *arrays: The arrays.

    Returns:
      What the kernel returns for all rows and heads.
    """
    heads, groups = arrays[0].shape[2], arrays[1].shape[2]
    # A dropout mask depends on the numbers of the heads.
    is_divided_by_head = "rng" not in names
    parts = [*names, *results]

    def spec(name: str, shape: tuple[int, ...], of_rows: Any, of_heads: Any) -> P:
        placed = {ROWS: of_rows, HEADS: of_heads, GROUPS: of_heads}
        return P(*(placed.get(axis) if size > 1 else None for axis, size in zip(AXES[name], shape, strict=True)))

    def partition(mesh: Any, arg_shapes: Any, result_shapes: Any) -> Any:
        own = (*arg_shapes[0].sharding.spec, None, None, None)
        over_heads = own[2] if is_divided_by_head and groups % _size(mesh, own[2]) == 0 else None
        both = [
            NamedSharding(mesh, spec(name, x.shape, own[0], over_heads))
            for name, x in zip(parts, (*arg_shapes, *result_shapes), strict=True)
        ]
        return mesh, whole, tuple(both[len(names) :]), tuple(both[: len(names)])

    def rule(mesh: Any, arg_types: Any, result_types: Any) -> SdyShardingRule:
        del mesh
        of_heads = HEADS if groups == 1 else GROUPS if groups == heads else CompoundFactor(GROUPS, MEMBERS)
        mappings = [
            _mapping(str(i), AXES[name], x.shape, of_heads)
            for i, (name, x) in enumerate(zip(parts, (*arg_types, *result_types), strict=True))
        ]
        used = dict.fromkeys(factor for mapping in mappings for axis in mapping for factor in _factors(axis))
        divided = {ROWS, GROUPS} if is_divided_by_head else {ROWS}
        sizes = {MEMBERS: heads // groups} if MEMBERS in used else {}
        return SdyShardingRule(
            tuple(mappings[: len(names)]),
            tuple(mappings[len(names) :]),
            need_replication_factors=tuple(factor for factor in used if factor not in divided),
            **sizes,
        )

    def whole(*arrays: Any) -> tuple[Any, ...]:
        return tuple(kernel(*arrays))

    divided = custom_partitioning(jax.jit(whole))
    divided.def_partition(partition=partition, sharding_rule=rule)
    return list(divided(*arrays))


def _size(mesh: Any, axes: Any) -> int:
    return math.prod(mesh.shape[axis] for axis in _factors(axes or ()))


def _mapping(name: str, axes: Sequence[str], shape: Sequence[int], of_heads: Any) -> ArrayMapping:
    """Return the factors of an array; an axis of size 1, which may be shared, has its own."""
    kinds = (of_heads if axis == HEADS else axis for axis in axes)
    return ArrayMapping(
        *(kind if size > 1 else f"one{name}x{i}" for i, (kind, size) in enumerate(zip(kinds, shape, strict=True)))
    )


def _factors(axis: Any) -> tuple[str, ...]:
    return (axis,) if isinstance(axis, str) else tuple(axis)
