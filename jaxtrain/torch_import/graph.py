"""The graph of a captured module: operations on named values, with the line of PyTorch code that each comes from.

A graph holds no tensor and needs no PyTorch: `jaxtrain.torch_import.interpret` evaluates it, and `to_json` writes it to
a file.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

GETITEM = "getitem"
"""Operation that selects one of several results."""
DETACH, SELECT, STACK = "aten.detach.default", "aten.select.int", "aten.stack.default"
CUSTOM = "jaxtrain.custom_function.default"
"""A call of `torch.autograd.Function`. Its keyword arguments are the graphs `forward` and `backward`, `outputs`, the
number of results of `forward` before what it saves, `has_gradient`, for each argument, and names: that of the class,
`function`, those of the `arguments` of `forward`, and of the `gradients` that `backward` takes."""
REPEAT = "jaxtrain.repeat.default"
"""Layers with the same operations. Its arguments are three tuples: initial values that each layer replaces, arrays of
which each layer takes its slice along the first axis, and values that all layers take. Its keyword arguments are the
graph `body` of a layer, whose inputs are these in turn, and the `length`, the number of layers. The outputs of `body`
are two tuples: the replaced values, and results that are stacked along a first axis; those of the operation are the
last replaced values, then the stacks."""

_LIKE = frozenset(
    f"aten.{name}.default"
    for name in (
        *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like"),
        *("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"),
    )
)
"""Operations that read the shape and the dtype of a tensor alone."""
GRADIENT = "jaxtrain.gradient.default"
"""A call of `torch.autograd.grad`: the gradients of outputs with respect to inputs, given those of the outputs. Its
arguments are three tuples of values of the graph: outputs, inputs, and gradients of the outputs."""
LEAF = "jaxtrain.leaf.default"
"""A tensor from the point where it requires a gradient, as by `x.requires_grad_()`: the same values without history."""
COND = "jaxtrain.cond.default"
"""Two ways to the same results. Its arguments are a condition and a tuple of values that the ways read, its keyword
arguments two graphs of these values, `holds` and `otherwise`."""
ASSUMED = "jaxtrain.assumed.default"
"""1 where values of the graph are the `answers` that `forward` read of the example, else NaN. The keyword argument
`sources` has the line of PyTorch code that reads each."""

RECOMPUTED = "jaxtrain.recomputed.default"
"""An elementwise formula whose intermediate values the backward pass computes again, in low precision. Its keyword
argument is the formula's `graph`."""


@dataclass(frozen=True)
class Ref:
    """A value of the graph, by name."""

    name: str


@dataclass(frozen=True)
class Dtype:
    """A dtype as an argument, by NumPy's name ("float32", "bfloat16", "bool")."""

    name: str


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of a value."""

    shape: tuple[int, ...]
    dtype: str


def dtype_of(name: str) -> np.dtype:
    """Return a dtype by name; a 64-bit one in 32 bits where JAX has no 64-bit types."""
    return jax.dtypes.canonicalize_dtype(jnp.dtype(name))


@dataclass(frozen=True)
class Node:
    """One operation.

    Attributes:
      name: Name of its result.
      op: Overload of the operation, as "aten.gelu.default", or `GETITEM`.
      args: Positional arguments: `Ref`, `Dtype`, numbers, strings, None, and tuples of them.
      kwargs: Keyword arguments, likewise.
      spec: Of its result; a tuple for several results, with None for those that are no tensors.
      promoted: Dtype that an elementwise operation converts its arguments to; None for other operations.
      module: Path of the module that calls it, as "encoder.layers.0"; "" for the outermost.
      source: Line of the user's PyTorch code, as "model.py:12: y = F.gelu(x)"; "" if unknown.
      in_float32: Whether autocast is disabled around it.
    """

    name: str
    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    spec: "Spec | tuple[Spec | None, ...] | None"
    promoted: str | None = None
    module: str = ""
    source: str = ""
    in_float32: bool = False


@dataclass(frozen=True)
class Input:
    """An input of the graph.

    Attributes:
      name: Name of its value.
      kind: "param", "state" (a buffer that changes), "constant" (one that does not) or "input".
      target: Name of the parameter or buffer in the module, or index of the input among the batch's leaves.
      spec: Its shape and dtype.
    """

    name: str
    kind: str
    target: str
    spec: Spec


@dataclass(frozen=True)
class Graph:
    """A captured forward pass.

    Attributes:
      inputs: What it reads.
      nodes: Operations in the order of evaluation.
      outputs: The result: dicts and tuples with `Ref`, numbers, strings or None as leaves.
      state: The value of each buffer that the pass changes, by the buffer's name.
    """

    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    outputs: Any
    state: dict[str, Ref]

    def to_json(self) -> str:
        """Return the graph as JSON."""
        return json.dumps(encode(self))

    @classmethod
    def from_json(cls, text: str) -> "Graph":
        """Return the graph of `to_json`."""
        graph = decode(json.loads(text))
        if not isinstance(graph, cls):
            raise ValueError("not the JSON of a graph")
        return graph


class Line(NamedTuple):
    """A line of the user's code that is being executed."""

    file: str
    number: int
    function: str


class ModuleCall(NamedTuple):
    """A call of a module.

    Attributes:
      key: PyTorch's name of the call, different for each call of a module.
      path: Path of the module; "" for the outermost, None for the function that calls it.
      lines: The lines executed in this call, outermost first, without those of PyTorch and of inner modules.
    """

    key: str
    path: str | None
    lines: tuple[Line, ...]


class Assumption(NamedTuple):
    """A value of a graph that is read as a Python number or condition, and is taken as the same for every batch.

    Attributes:
      value: The value in the graph.
      answer: What it was for the example.
      source: The line of PyTorch code that reads it.
      is_branch: Whether it is a condition that the code itself asks for, whose other answer is another path.
      is_random: Whether it depends on random numbers.
    """

    value: Ref
    answer: bool | int | float
    source: str
    is_branch: bool = False
    is_random: bool = False

    def __str__(self) -> str:
        return f"{self.source} reads {self.answer}"


class Captured(NamedTuple):
    """A captured forward pass.

    Attributes:
      graph: Its graph.
      constants: The tensors that it reads besides parameters and state, by the targets of the graph's constants.
      origins: The calls of modules around each operation of PyTorch, outermost first, by the operation's name.
      unused: Parameters that have no gradient in PyTorch although the graph depends on them, as a bias whose energy is
        differentiated.
      assumptions: Values that it reads as Python numbers and conditions of the example.
      left_out: Attributes of the module that each call changes and that nothing depends on.
    """

    graph: Graph
    constants: dict[str, np.ndarray]
    origins: Mapping[str, tuple[ModuleCall, ...]] = MappingProxyType({})
    unused: frozenset[str] = frozenset()
    assumptions: tuple["Assumption", ...] = ()
    left_out: tuple[str, ...] = ()


def references(value: Any) -> Iterator[str]:
    """Yield the names of the graph's values in an argument."""
    if isinstance(value, Ref):
        yield value.name
    elif isinstance(value, dict):
        yield from references(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from references(item)


def resolved(value: Any, of: Callable[[str], Any]) -> Any:
    """Return an argument with dtypes for their names, and `of(name)` in place of each value of the graph."""
    if isinstance(value, Ref):
        return of(value.name)
    if isinstance(value, Dtype):
        return dtype_of(value.name)
    if isinstance(value, tuple):
        return tuple(resolved(item, of) for item in value)
    if isinstance(value, dict):
        return {key: resolved(item, of) for key, item in value.items()}
    return value


def without_unused(graph: Graph, kept: Collection[str]) -> Graph:
    """Return a graph without the nodes whose results it does not use.

    Args:
      graph: The graph.
      kept: Operations that stay, used or not.
    """
    used, nodes = {*references((graph.outputs, graph.state))}, []
    for node in reversed(graph.nodes):
        if node.name in used or node.op in kept:
            nodes.append(node)
            used.update(references((node.args, node.kwargs)))
    return replace(graph, nodes=tuple(reversed(nodes)))


def read_state(graph: Graph, optional: Collection[str]) -> frozenset[str]:
    """Return the state of a graph that its outputs or the state of later calls depend on.

    Args:
      graph: The graph.
      optional: The state that is left out if nothing else depends on it.
    """
    kept = {name: ref for name, ref in graph.state.items() if name not in optional}
    while True:
        read = without_unused(replace(graph, state=kept), ()).nodes
        used = {*references((graph.outputs, kept, [(node.args, node.kwargs) for node in read]))}
        targets = {x.target for x in graph.inputs if x.kind == "state" and x.name in used}
        new = {name: ref for name, ref in graph.state.items() if name in kept or name in targets}
        if new == kept:
            return frozenset(kept)
        kept = new


def has_gradient_inside(graph: Graph) -> bool:
    """Return whether a graph differentiates the operations between two of its values, which then stay as they are."""
    return any(node.op == GRADIENT for node in graph.nodes)


def without_gradient(graph: Graph) -> frozenset[str]:
    """Return the names of the parameters that no output of the graph has a gradient of."""
    return frozenset(x.target for x in graph.inputs if x.kind == "param") - frozenset().union(*with_gradient(graph))


def with_gradient(graph: Graph) -> tuple[frozenset[str], ...]:
    """Return the names of the parameters that outputs have a gradient of, for each combination of conditions' paths."""
    params = [x for x in graph.inputs if x.kind == "param"]
    # A tied weight is several inputs.
    return tuple({frozenset(x.target for x in params if x.name in reached): None for reached in _reached(graph)})


def _reached(graph: Graph) -> set[frozenset[str]]:
    """Return the values that outputs have a gradient of, for each combination of conditions' paths."""
    items = [node for node in graph.nodes if node.op == GETITEM]
    found = {frozenset(references(graph.outputs))}
    for node in reversed(graph.nodes):
        if node.op in {DETACH, LEAF, *_LIKE} or not _has_gradient(node.spec):
            continue
        if node.op != COND:
            read = frozenset(references((node.args, node.kwargs)))
            found = {reached | read if node.name in reached else reached for reached in found}
            continue
        results = {x.name: x.args[1] for x in items if x.args[0] == Ref(node.name)}
        found = {
            reached | operands
            for reached in found
            for operands in _operands(node, [i for name, i in results.items() if name in reached])
        }
    return found


def _operands(node: Node, results: Sequence[int]) -> set[frozenset[str]]:
    """Return the operands of a condition that some of its results have a gradient of, for each of its paths."""
    return {
        frozenset(node.args[1][int(x.target)].name for x in path.inputs if x.name in reached)
        for path in node.kwargs.values()
        for reached in _reached(replace(path, outputs=tuple(path.outputs[i] for i in results)))
    }


def _has_gradient(spec: Any) -> bool:
    """Return whether a result with these shapes and dtypes has a gradient."""
    if not isinstance(spec, Spec):
        return True
    return bool(jnp.issubdtype(jnp.dtype(spec.dtype), jnp.inexact))


_CLASSES = {cls.__name__: cls for cls in (Ref, Dtype, Spec, Node, Input, Graph)}


def encode(value: Any) -> Any:
    """Return a value as JSON; a dataclass as an object with its class, a dict as a list of pairs."""
    if type(value) in _CLASSES.values():
        return {"class": type(value).__name__, **{f.name: encode(getattr(value, f.name)) for f in fields(value)}}
    if isinstance(value, dict):
        return {"class": "dict", "items": [[key, encode(item)] for key, item in value.items()]}
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    return value


def decode(value: Any) -> Any:
    """Return the value of `encode`; lists are tuples."""
    if isinstance(value, list):
        return tuple(decode(item) for item in value)
    if not isinstance(value, dict):
        return value
    name = value["class"]
    if name == "dict":
        return {key: decode(item) for key, item in value["items"]}
    return _CLASSES[name](**{key: decode(item) for key, item in value.items() if key != "class"})
