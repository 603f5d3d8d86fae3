"""float64 inside modules of float32, which JAX does not have by default.

What has no gradient, such as positions and frequencies, is computed in float64 whatever JAX's mode is
(`jaxtrain.torch_import.ops.int64`). What has one needs JAX's x64 mode, and is refused without it.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from jaxtrain.errors import UserError
from jaxtrain.torch_import.graph import CUSTOM, DETACH, GETITEM, Dtype, Graph, Input, Node, Spec, references
from jaxtrain.torch_import.integer_ranges import is_view, names, packet_of
from jaxtrain.torch_import.ops import RANDOM, TABLE
from jaxtrain.torch_import.ops.int64 import FLOAT64, INT64, has_64_bits
from jaxtrain.torch_import.refusals import refusal

REMEDY = 'call jax.config.update("jax_enable_x64", True) before the import, or use float32, as module.float() does'

_PROMOTING = names("cat concat concatenate stack where masked_fill copy index_put scatter")
"""Operations that are not elementwise, or not called so, and that take several dtypes."""


def with_float64(graph: Graph, ops: Collection[str]) -> Graph:
    """Compute in float64 what is float64 in PyTorch and does not depend on parameters.

    Args:
      graph: The graph.
      ops: Operations with functions of the user.
    """
    wide = {x.name for x in graph.inputs if x.spec.dtype in FLOAT64}
    wide |= {node.name for node in graph.nodes if _is_wide(node.spec)}
    given = {x.spec.dtype for x in graph.inputs if x.kind in ("param", "input")}
    if not wide or (has_64_bits() and "float32" not in given):
        return graph  # A module of float64 is evaluated in x64 mode alone.
    depends, nodes = {x.name for x in graph.inputs if x.kind == "param"}, []
    for node in graph.nodes:
        operands = {*references((node.args, node.kwargs))}
        if operands & depends and node.op != DETACH:
            depends.add(node.name)
        elif (node.name in wide or operands & wide) and node.op in TABLE and node.op not in (*ops, *RANDOM):
            node = _in_float64(node)
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def refuse_float64(graph: Graph) -> None:
    """Raise `UserError` for what a graph computes in float64, if JAX has none."""
    if has_64_bits():
        return
    for node in _without_functions(graph):
        if _is_wide(node.spec):
            raise refusal("float64 in a gradient, which JAX computes in float32 by default", REMEDY, node.source)
    for x in graph.inputs:
        if x.kind == "state" and x.spec.dtype in FLOAT64:
            raise UserError(
                f"buffer {x.target!r} changes and is {x.spec.dtype}, which JAX holds in 32 bits by default: {REMEDY}"
            )


def refuse_float64_params(dtypes: Mapping[str, str]) -> None:
    """Raise `UserError` for parameters in float64, if JAX has none.

    Args:
      dtypes: Their dtypes by name.
    """
    if has_64_bits():
        return
    for name, dtype in dtypes.items():
        if dtype in FLOAT64:
            raise UserError(f"parameter {name!r} is {dtype}, which JAX holds in 32 bits by default: {REMEDY}")


def refuse_float64_inputs(graph: Graph) -> None:
    """Raise `UserError` for the first operation that computes with inputs in float64, with which a graph was captured.

    Of shapes alone PyTorch does not refuse products of float32 and float64. A module with one does not take float64.
    """
    values: tuple[Input | Node, ...] = (*graph.inputs, *graph.nodes)
    specs: dict[str, Any] = {x.name: x.spec for x in values}
    for node in graph.nodes:
        read = [specs[name] for name in references((node.args, node.kwargs))]
        dtypes = {x.dtype for x in read if isinstance(x, Spec)}
        if node.promoted is None and packet_of(node) not in _PROMOTING and {"float32", "float64"} <= dtypes:
            return
    for node in graph.nodes:
        if _is_wide(node.spec) and not is_view(node):
            raise refusal(
                "the example batch is float64, in which PyTorch computes this, and JAX in float32 by default",
                'pass float32 arrays, or call jax.config.update("jax_enable_x64", True) before the import',
                node.source,
            )


def refuse_rounded(params: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise `UserError` for parameters in float32 of a module in float64, as a step casts them by default.

    Args:
      params: The parameters of a step.
      own: Those of the module.
    """
    for name, x in own.items():
        if x.dtype.name in FLOAT64 and name in params and params[name].dtype.name not in FLOAT64:
            raise UserError(
                f"the module's parameters are {x.dtype}, those given are {params[name].dtype}: use "
                'train_step(…, precision="fp64"), or import module.float()'
            )


def _is_wide(spec: Any) -> bool:
    specs = spec if isinstance(spec, tuple) else (spec,)
    return any(isinstance(x, Spec) and x.dtype in FLOAT64 for x in specs)


def _without_functions(graph: Graph) -> Iterator[Node]:
    """Yield the nodes of a graph that are evaluated in JAX's mode, and those of the graphs in it."""
    for node in graph.nodes:
        inner = [x for x in node.kwargs.values() if isinstance(x, Graph)]
        for part in inner:
            yield from _without_functions(part)
        if (not inner and node.op not in (INT64, GETITEM)) or node.op == CUSTOM:
            yield node


def _in_float64(node: Node) -> Node:
    args, kwargs = _with_names((node.args, node.kwargs))
    if isinstance(node.spec, Spec) and jnp.issubdtype(jnp.dtype(node.spec.dtype), jnp.inexact):
        kwargs["result"] = node.spec.dtype
    if node.op == INT64:
        return replace(node, args=args, kwargs=kwargs)
    if node.promoted is not None:
        kwargs["promoted"] = node.promoted
    return replace(node, op=INT64, args=(node.op, *args), kwargs={**kwargs, "narrow": True}, promoted=None)


def _with_names(value: Any) -> Any:
    """Return arguments with 64-bit dtypes by their names, which are 32-bit ones otherwise."""
    if isinstance(value, tuple):
        return tuple(map(_with_names, value))
    if isinstance(value, dict):
        return {key: _with_names(item) for key, item in value.items()}
    return value.name if isinstance(value, Dtype) and value.name in ("int64", *FLOAT64) else value
