"""Roundings between two constants, as in `(x + 12582912.0) - 12582912.0`, which rounds x to an integer.

XLA adds the two constants to each other first, and multiplies those of products (`AlgebraicSimplifier`, up to jaxlib
0.10): x is not rounded, or a product of constants overflows. A barrier between the two operations keeps them apart.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from jaxtrain.torch_import.graph import Graph, Node, Ref, Spec, references
from jaxtrain.torch_import.integer_ranges import is_view, names, packet_of
from jaxtrain.torch_import.ops import RANDOM

KEPT = "jaxtrain.kept.default"
_SUMS, _PRODUCTS = names("add sub rsub"), names("mul div")


def with_kept_roundings(graph: Graph) -> Graph:
    """Put a barrier between two sums with a constant, and between two products with one.

    Args:
      graph: The graph.
    """
    constants = {x.name for x in graph.inputs if x.kind == "constant"}
    made_by: dict[str, Node] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        if constants.issuperset(references((node.args, node.kwargs))) and node.op not in RANDOM:
            constants.add(node.name)
        elif (operand := _repeated(node, made_by, constants)) is not None:
            spec = made_by[operand.name].spec
            kept = Node(f"{node.name}_operand", KEPT, (operand,), {}, spec, module=node.module, source=node.source)
            nodes.append(kept)
            node = replace(node, args=tuple(Ref(kept.name) if x == operand else x for x in node.args))
        made_by[node.name] = node
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def _repeated(node: Node, made_by: Mapping[str, Node], constants: set[str]) -> Ref | None:
    """Return the operand of a sum with a constant that is one itself, up to its layout; of a product likewise."""
    operand = _varying(node, constants)
    before = None if operand is None else made_by.get(operand.name)
    while before is not None and is_view(before) and isinstance(before.args[0], Ref):
        before = made_by.get(before.args[0].name)
    if before is None or _varying(before, constants) is None:
        return None
    return operand if (packet_of(node) in _SUMS) == (packet_of(before) in _SUMS) else None


def _varying(node: Node, constants: set[str]) -> Ref | None:
    """Return the operand of a sum or product in floating point whose other operand is a constant."""
    if packet_of(node) not in _SUMS | _PRODUCTS or len(node.args) < 2 or not _is_float(node.spec):
        return None
    varying = [x for x in node.args[:2] if isinstance(x, Ref) and x.name not in constants]
    if len(varying) != 1 or (packet_of(node) == "div" and varying[0] is node.args[1]):
        return None
    return varying[0]


def _is_float(spec: Any) -> bool:
    return isinstance(spec, Spec) and bool(jnp.issubdtype(jnp.dtype(spec.dtype), jnp.floating))
