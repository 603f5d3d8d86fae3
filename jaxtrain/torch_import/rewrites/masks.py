"""Recognize causal masks that a module computes, so that attention is computed by kernels for causal attention.

`transformers` computes its masks by comparing positions, which gives the fused kernels of GPUs an array [T, S] where
the argument `is_causal` would do. The parts of a mask that depend on no input are evaluated here, once.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxtrain.torch_import.graph import GETITEM, Graph, Node, Ref, Spec, references, without_unused
from jaxtrain.torch_import.interpret import interpret
from jaxtrain.torch_import.ops import RANDOM, TABLE

ATTENTION = "aten.scaled_dot_product_attention.default"
_AND = "aten.logical_and.default"
_CONJUNCTIONS = (_AND, "aten.__and__.Tensor", "aten.bitwise_and.Tensor")
_REPETITIONS = ("aten.expand.default", "aten.clone.default", "aten.alias.default")
_LARGEST = 2**26
"""Elements of the largest mask that is evaluated. A comparison of positions is not, whatever its size."""


class Band(NamedTuple):
    """A mask in which each query attends to the keys from `first` up to `end`, int [T] each, and to one at least."""

    first: np.ndarray
    end: np.ndarray


class Simplified(NamedTuple):
    """A mask as arguments of attention, with the rest of the mask and the nodes that compute it."""

    arguments: dict[str, Any]
    rest: Ref | None
    nodes: tuple[Node, ...]


def with_causal_attention(graph: Graph, constants: Mapping[str, Any], ops: Collection[str]) -> Graph:
    """Replace causal and sliding-window masks by the arguments `is_causal` and `window` of attention.

    Args:
      graph: The graph.
      constants: Tensors of the module, by name.
      ops: Operations that the user defines, which are called with PyTorch's arguments.

    Returns:
      The graph. Of a mask that is causal in part, such as one of padding, only the rest remains.
    """
    if ATTENTION in ops:
        return graph
    known = _Known(graph, constants)
    found = (_mask(node) for node in graph.nodes)
    masks = {mask: _simplified(mask, known) for mask in dict.fromkeys(found) if mask is not None}
    # The rest of a mask is computed after the mask: the layers that use it stay alike.
    rests = {mask.name: simplified.nodes for mask, simplified in masks.items()}
    nodes = [node for x in graph.inputs for node in rests.get(x.name, ())]
    for node in graph.nodes:
        mask = _mask(node)
        nodes += [node if mask is None else _with_mask(node, masks[mask]), *rests.get(node.name, ())]
    return without_unused(replace(graph, nodes=tuple(nodes)), RANDOM)


def _mask(node: Node) -> Ref | None:
    """Return the mask of a node if it is attention without `is_causal`."""
    if node.op != ATTENTION or node.kwargs.get("is_causal", len(node.args) > 5 and node.args[5]):
        return None
    mask = node.kwargs.get("attn_mask", node.args[3] if len(node.args) > 3 else None)
    return mask if isinstance(mask, Ref) else None


def _with_mask(node: Node, mask: Simplified) -> Node:
    dropout = node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0)
    kwargs = {**node.kwargs, "attn_mask": mask.rest, "dropout_p": dropout, **mask.arguments}
    return replace(node, args=node.args[:3], kwargs=kwargs)


def _simplified(mask: Ref, known: "_Known") -> Simplified:
    """Return a mask without its causal factors; as it is, if it has none."""
    t, s = known.shape(mask)[-2:]
    factors = list(dict.fromkeys(known.factors(mask)))
    bands = {factor: band for factor in factors if (band := known.band(factor, t, s)) is not None}
    arguments = _arguments(list(bands.values()), t, s)
    if arguments is None:
        return Simplified({}, mask, ())
    rest: Ref | None = None
    nodes: list[Node] = []
    for factor in factors:
        if factor in bands:
            continue
        if rest is not None:
            shape = np.broadcast_shapes(known.shape(rest), known.shape(factor))
            nodes.append(Node(f"{mask.name}_rest_{len(nodes)}", _AND, (rest, factor), {}, Spec(shape, "bool")))
            known.add(nodes[-1])
            factor = Ref(nodes[-1].name)
        rest = factor
    return Simplified(arguments, rest, tuple(nodes))


def _arguments(bands: Sequence[Band], t: int, s: int) -> dict[str, Any] | None:
    """Return the arguments of attention for the conjunction of masks [T, S]; None if there are none."""
    if not bands:
        return None
    first, end = np.max([x.first for x in bands], 0), np.min([x.end for x in bands], 0)
    if (first == 0).all() and (end == s).all():
        return {}
    own = np.arange(t) + 1
    if (end != np.minimum(own, s)).any():
        return None
    window = int(t - first[-1])
    if (first != np.maximum(own - window, 0)).any():
        return None
    return {"is_causal": True} if window >= t else {"is_causal": True, "window": window}


class _Known:
    """The values of a graph that depend on no input, parameter or state."""

    def __init__(self, graph: Graph, constants: Mapping[str, Any]) -> None:
        self._graph, self._constants = graph, constants
        self._nodes = {node.name: node for node in graph.nodes}
        self._shapes = {x.name: x.spec.shape for x in graph.inputs}
        on_meta = {name for name, x in constants.items() if isinstance(x, jax.ShapeDtypeStruct)}
        self._known = {x.name for x in graph.inputs if x.kind == "constant" and x.target not in on_meta}
        for node in graph.nodes:
            pure = node.op == GETITEM or (node.op in TABLE and node.op not in RANDOM)
            if pure and self._known.issuperset(references((node.args, node.kwargs))):
                self._known.add(node.name)

    def add(self, node: Node) -> None:
        """Add a node of a mask."""
        self._nodes[node.name] = node

    def shape(self, value: Ref) -> tuple[int, ...]:
        """Return the shape of a value."""
        node = self._nodes.get(value.name)
        return self._shapes[value.name] if node is None or not isinstance(node.spec, Spec) else node.spec.shape

    def factors(self, mask: Ref) -> Iterator[Ref]:
        """Yield the masks whose conjunction a mask is."""
        node = self._nodes.get(mask.name)
        if node is not None and node.op in _CONJUNCTIONS:
            for factor in node.args:
                yield from self.factors(factor)
        elif node is not None and node.op in _REPETITIONS:
            yield from self.factors(node.args[0])
        else:
            yield mask

    def band(self, mask: Ref, t: int, s: int) -> Band | None:
        """Return a mask as a band [T, S]; None if it is none or depends on an input."""
        if mask.name not in self._known:
            return None
        node = self._nodes.get(mask.name)
        if node is not None and node.op in _COMPARISONS and all(isinstance(x, Ref) for x in node.args):
            x, y = (_same_for_all_rows(self._value(arg)) for arg in node.args)
            if x is not None and y is not None and (found := compared(node.op, x, y, t, s)) is not None:
                return found
        if math.prod(self.shape(mask)) > _LARGEST:
            return None
        value = _same_for_all_rows(self._value(mask))
        return None if value is None else _evaluated(np.broadcast_to(value, (t, s)))

    def _value(self, name: Ref) -> np.ndarray:
        nodes = tuple(node for node in self._graph.nodes if node.name in self._known)
        needed = without_unused(Graph((), nodes, name, {}), ())
        names = {name.name, *references([(node.args, node.kwargs) for node in needed.nodes])}
        graph = replace(needed, inputs=tuple(x for x in self._graph.inputs if x.name in names))
        constants = {x.target: self._constants[x.target] for x in graph.inputs}

        @jax.jit
        def value(constants: Mapping[str, Any]) -> Any:
            return interpret(graph, params={}, state={}, constants=constants, inputs=(), rng=None, ops={})[0]

        # One program, rather than one of each operation; its result is a value under jit too.
        return np.asarray(value.lower(constants).compile()(constants))


def _same_for_all_rows(x: np.ndarray) -> np.ndarray | None:
    """Return an array [..., T, S] as [T, S], where either may be 1; None if it varies along other axes."""
    x = x.reshape(1, 1) if x.ndim < 1 else np.atleast_2d(x)
    flat = x.reshape(-1, *x.shape[-2:])
    return flat[0] if len(flat) and (flat == flat[:1]).all() else None


_SWAPPED = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt", "eq": "eq"}
_COMPARISONS = {f"aten.{name}.Tensor": name for name in _SWAPPED}


def compared(op: str, x: np.ndarray, y: np.ndarray, t: int, s: int) -> Band | None:
    """Return the comparison of one number of each query with one of each key, which do not decrease."""
    name = _COMPARISONS[op]
    if x.shape[0] == 1 and y.shape[1] == 1:
        x, y, name = y, x, _SWAPPED[name]
    if x.shape[1] != 1 or y.shape[0] != 1 or (np.diff(y[0]) < 0).any():
        return None
    query, key = np.broadcast_to(x[:, 0], t), np.broadcast_to(y[0], s)
    left, right = np.searchsorted(key, query, "left"), np.searchsorted(key, query, "right")
    start, stop = np.zeros_like(left), np.full_like(left, s)
    bands = {"ge": (start, right), "gt": (start, left), "eq": (left, right), "le": (left, stop), "lt": (right, stop)}
    band = Band(*bands[name])
    return band if (band.first < band.end).all() else None


def _evaluated(mask: np.ndarray) -> Band | None:
    """Return a mask, bool or added to the scores, as a band."""
    visible = mask
    if mask.dtype != bool:
        visible = mask == 0
        if not (visible | (mask <= np.finfo(mask.dtype).min)).all():
            return None
    band = Band(visible.argmax(-1), visible.shape[-1] - visible[:, ::-1].argmax(-1))
    whole = visible.sum(-1) == band.end - band.first
    return band if whole.all() and visible.any(-1).all() else None
