"""Integers beyond int32: PyTorch's are int64, JAX's int32.

The ranges of all integers of a graph follow from those of its inputs, which are int32, and from its constants. An
operation whose result may leave int32 is computed in int64 (`jaxtrain.torch_import.ops.int64`), as is what reads it,
up to the first result that fits again: `(ids * 1000003 + before) % 50` multiplies and adds in 64 bits. Sums, products
and bits wrap, so a result that only they and indices read stays in 32 bits: `positions + 2` is exact wherever PyTorch
finds its row.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxtrain.torch_import.graph import COND, CUSTOM, GETITEM, Dtype, Graph, Node, references
from jaxtrain.torch_import.integer_ranges import (
    INT32,
    INT64_RANGE,
    Range,
    fits,
    is_integer,
    is_view,
    names,
    packet_of,
    ranges_of,
)
from jaxtrain.torch_import.ops import RANDOM, TABLE
from jaxtrain.torch_import.ops.int64 import INT64, holds_int64
from jaxtrain.torch_import.refusals import refusal

_WRAPPING = names(
    "add sub rsub mul neg sum cumsum bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift __and__ __or__ "
    "__xor__ __lshift__ where masked_fill fill copy to _to_copy type_as"
)
"""Operations whose results in 32 bits are those in 64 bits, wrapped."""
_INDEXED = names(
    "index _unsafe_index gather take_along_dim index_select take embedding scatter scatter_add index_copy index_add "
    "index_put _unsafe_index_put index_fill one_hot cross_entropy_loss nll_loss nll_loss_nd nll_loss2d "
    "nll_loss_forward nll_loss2d_forward _embedding_bag _embedding_bag_forward_only ctc_loss"
)
"""Operations that read integers as indices. PyTorch raises an error for those that are outside."""


def with_int64(
    graph: Graph, constants: Mapping[str, Any], ops: Collection[str], inputs: Range = INT32, *, inner: bool = False
) -> Graph:
    """Compute in int64 what may leave int32.

    Args:
      graph: The graph.
      constants: Its buffers and other constants, by target.
      ops: Operations with functions of the user.
      inputs: Least and largest value of its integer inputs.
      inner: Whether it is a part of another graph, which reads its outputs as they are.

    Returns:
      The same graph with the operation `INT64` in place of each that needs 64 bits.

    Raises:
      UserError: A buffer that changes, or a function of the user, would receive such an integer, where JAX has no
        integers of 64 bits.
    """
    has_int64 = jax.dtypes.canonicalize_dtype(np.int64) == np.int64
    for x in graph.inputs:
        if not has_int64 and x.kind == "state" and holds_int64(constants.get(x.target)):
            raise refusal(
                f"buffer {x.target!r} changes and holds integers beyond int32, JAX's widest by default",
                "hold them in float32, or as a remainder",
            )
    ranges = ranges_of(graph, constants, inputs)
    wide = {name for name, found in ranges.items() if not fits(found)}
    if not wide and not any(_has_large_number(node) for node in graph.nodes) and not _has_custom(graph):
        return graph
    exact = _read_exactly(graph, wide, ranges)
    nodes = [_replaced(node, exact, ranges, ops) for node in graph.nodes]
    if has_int64:
        return replace(graph, nodes=tuple(nodes))
    sources = {node.name: node.source for node in graph.nodes}
    for name, ref in graph.state.items():
        if ref.name in exact and not inner:
            raise refusal(
                f"buffer {name!r} may hold integers beyond int32, JAX's widest by default",
                "take a remainder, as in `% 2**31`, or hold them in float32",
                sources.get(ref.name, ""),
            )
    return replace(graph, nodes=tuple(nodes))


def _large(value: Any) -> bool:
    """Return whether an argument has a Python integer beyond int32; ends of slices are not among them."""
    if isinstance(value, tuple | list):
        return any(map(_large, value))
    return isinstance(value, int) and not INT32[0] <= value <= INT32[1]


def _has_large_number(node: Node) -> bool:
    return not is_view(node) and any(map(_large, (*node.args, *node.kwargs.values())))


def _has_custom(graph: Graph) -> bool:
    return any(node.op in (COND, CUSTOM) for node in graph.nodes)


def _read_exactly(graph: Graph, wide: Collection[str], ranges: Mapping[str, Any]) -> set[str]:
    """Return the values beyond int32 that are read as numbers, and not as indices or modulo 2**32 alone."""
    exact = {name for name in references((graph.outputs, graph.state)) if name in wide}
    constants = {x.name for x in graph.inputs if x.name in wide}
    exact |= constants
    for node in reversed(graph.nodes):
        if node.name in wide and (_has_large_number(node) or constants & {*references((node.args, node.kwargs))}):
            exact.add(node.name)
        operands = {*references((node.args, node.kwargs))}
        of_integers = all(ranges[name] is not None for name in (node.name, *operands))
        wraps = packet_of(node) in _WRAPPING and of_integers and getattr(node.spec, "dtype", "") != "bool"
        if node.name in exact or not (wraps or packet_of(node) in _INDEXED or is_view(node)):
            exact |= operands & {*wide}
    return exact


def _replaced(node: Node, exact: Collection[str], ranges: Mapping[str, Any], ops: Collection[str]) -> Node:
    reads = bool({*references((node.args, node.kwargs))} & {*exact})
    if node.op == GETITEM:
        return node
    if node.op in (COND, CUSTOM):
        inside = INT64_RANGE if reads else INT32
        graphs = {
            key: with_int64(value, {}, ops, inside, inner=True) if isinstance(value, Graph) else value
            for key, value in node.kwargs.items()
        }
        return replace(node, kwargs=graphs)
    if not reads and node.name not in exact and not _has_large_number(node):
        return node
    if node.op in ops or node.op not in TABLE:
        if not reads:
            return node
        raise refusal(f"{node.op} receives integers that may be beyond int32", "take a remainder before", node.source)
    if not reads and node.promoted is not None and not is_integer(node.promoted):
        return replace(node, args=_as_floats(node.args), kwargs=_as_floats(node.kwargs))
    if node.op in RANDOM:
        raise refusal("random integers beyond int32", "draw a smaller range", node.source)
    args, kwargs = _with_wide_dtypes((node.args, node.kwargs))
    if node.promoted is not None:
        kwargs["promoted"] = node.promoted
    if node.name not in exact:
        kwargs["narrow"] = True
    return replace(node, op=INT64, args=(node.op, *args), kwargs=kwargs, promoted=None)


def _with_wide_dtypes(value: Any) -> Any:
    """Return arguments with int64 by its name, which is int32 otherwise."""
    if isinstance(value, tuple):
        return tuple(map(_with_wide_dtypes, value))
    if isinstance(value, dict):
        return {key: _with_wide_dtypes(item) for key, item in value.items()}
    return "int64" if value == Dtype("int64") else value


def _as_floats(value: Any) -> Any:
    """Return the arguments of an operation on floats with floats for integers beyond int32."""
    if isinstance(value, tuple):
        return tuple(map(_as_floats, value))
    if isinstance(value, dict):
        return {key: _as_floats(item) for key, item in value.items()}
    return float(value) if _large(value) else value
