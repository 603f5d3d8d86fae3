"""Keep values between convolutions with the channels on the last axis, as XLA computes convolutions.

PyTorch has the channels on the second axis. XLA:CPU transposes the operands and the result of each such convolution,
and what lies between two of them runs over rows of a few pixels, which is slower than over channels.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from jaxtrain.torch_import.graph import GETITEM, REPEAT, Graph, Node, Ref, Spec, references
from jaxtrain.torch_import.ops import RANDOM
from jaxtrain.torch_import.rewrites.layers import mapped

PERMUTE, CAT = "aten.permute.default", "aten.cat.default"
_CONVOLUTIONS = frozenset(
    f"aten.{name}"
    for name in (
        *(f"conv{rank}d.{overload}" for rank in (1, 2, 3) for overload in ("default", "padding")),
        *("conv_transpose1d.default", "conv_transpose2d.input", "conv_transpose3d.input"),
    )
)
_NORMS = frozenset(
    f"aten.{name}.default"
    for name in ("batch_norm", "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training")
)
_POOLS = {
    f"aten.{kind}_pool{rank}d.default": rank + 2
    for kind in ("max", "avg", "adaptive_avg", "_adaptive_avg")
    for rank in (1, 2, 3)
}
"""Pools, with the number of axes of several images."""


def with_channels_last(graph: Graph, ops: Collection[str]) -> Graph:
    """Return a graph in which convolutions and what is computed from them have the channels on the last axis.

    These are normalizations and pools of channels, elementwise operations and concatenations. Values are transposed
    where another operation takes them, and parameters, inputs and outputs stay as they are.

    Args:
      graph: The graph.
      ops: Operations that the user defines, which are called with PyTorch's arguments.
    """
    return _Rewriting(graph, ops, ()).graph()


def _axes_last(rank: int) -> tuple[int, ...]:
    """Return the axes [N, *space, C] of an array [N, C, *space]."""
    return (0, *range(2, rank), 1)


def _axes_second(rank: int) -> tuple[int, ...]:
    """Return the axes [N, C, *space] of an array [N, *space, C]."""
    return (0, rank - 1, *range(1, rank - 1))


def _permuted(spec: Spec, axes: Sequence[int]) -> Spec:
    return replace(spec, shape=tuple(spec.shape[axis] for axis in axes))


def _last(spec: Spec) -> Spec:
    return _permuted(spec, _axes_last(len(spec.shape)))


class _Rewriting:
    """A graph being rewritten, node by node."""

    def __init__(self, graph: Graph, ops: Collection[str], last: Collection[str]) -> None:
        """Start with the inputs named in `last` having the channels last."""
        self._given, self._ops, self._last = graph, ops, {*last}
        self._last_results: dict[str, Collection[int]] = {}  # places among several results, by node
        self._inputs = tuple(replace(x, spec=_last(x.spec)) if x.name in last else x for x in graph.inputs)
        self._specs: dict[str, Any] = {x.name: x.spec for x in self._inputs}
        self._nodes: list[Node] = []

    def graph(self) -> Graph:
        """Return the graph, with outputs and state in PyTorch's layout."""
        self._rewrite()
        outputs, state = mapped((self._given.outputs, self._given.state), lambda ref: self._to_second(ref, "result"))
        return Graph(self._inputs, tuple(self._nodes), outputs, state)

    def body(self, carries_last: Sequence[bool]) -> Graph:
        """Return the graph of a layer, given whether each value that it passes on has the channels last."""
        self._rewrite()
        carries, stacked = self._given.outputs
        moves = [self._to_last if last else self._to_second for last in carries_last]
        carries = tuple(move(ref, "result") for move, ref in zip(moves, carries, strict=True))
        stacked = tuple(self._to_second(ref, "result") for ref in stacked)
        return Graph(self._inputs, tuple(self._nodes), (carries, stacked), {})

    def _rewrite(self) -> None:
        for node in self._given.nodes:
            self._add(self._rewritten(node))

    def _add(self, node: Node) -> None:
        self._nodes.append(node)
        self._specs[node.name] = node.spec

    def _rewritten(self, node: Node) -> Node:
        """Return a node in the layout of its arguments."""
        if node.op == GETITEM:
            whole, place = node.args
            return self._with_last(node) if place in self._last_results.get(whole.name, ()) else node
        if node.op == REPEAT:
            return self._repeated(node)
        if node.op not in self._ops:
            if self._is_of_channels(node):
                x, *others = node.args
                args, kwargs = (self._to_last(x, node.name), *others), {**node.kwargs, "channels_last": True}
                return self._with_last(replace(node, args=args, kwargs=kwargs))
            if self._is_elementwise(node):
                args, kwargs = mapped((node.args, node.kwargs), lambda ref: self._to_last(ref, node.name))
                return self._with_last(replace(node, args=args, kwargs=kwargs))
            if node.op == CAT and any(map(self._is_last, node.args[0])):
                return self._concatenation(node)
        args, kwargs = mapped((node.args, node.kwargs), lambda ref: self._to_second(ref, node.name))
        return replace(node, args=args, kwargs=kwargs)

    def _is_of_channels(self, node: Node) -> bool:
        if node.op in _CONVOLUTIONS:
            return self._rank(node.args[0]) == self._rank(node.args[1])  # an image alone has no first axis
        if node.op not in _NORMS and node.op not in _POOLS:
            return False
        return self._is_last(node.args[0]) and _POOLS.get(node.op, 0) in (0, self._rank(node.args[0]))

    def _is_elementwise(self, node: Node) -> bool:
        """Return whether an operation works on each element, of arrays some of which have the channels last."""
        if node.promoted is None or not isinstance(node.spec, Spec) or node.op in RANDOM:
            return False
        refs = [Ref(name) for name in references((node.args, node.kwargs))]
        ranks = (0, len(node.spec.shape))
        return any(map(self._is_last, refs)) and all(self._rank(ref) in ranks for ref in refs)

    def _concatenation(self, node: Node) -> Node:
        parts, *dim = node.args
        assert isinstance(node.spec, Spec)
        axes = _axes_last(len(node.spec.shape))
        place = axes.index(dim[0] % len(axes)) if dim else 0
        return self._with_last(replace(node, args=(mapped(parts, lambda ref: self._to_last(ref, node.name)), place)))

    def _repeated(self, node: Node) -> Node:
        """Return a loop that carries each value in the layout of its initial one."""
        init, stacks, closed = node.args
        stacks = mapped(stacks, lambda ref: self._to_second(ref, node.name))
        given, last = (*init, *stacks, *closed), [self._is_last(ref) for ref in init]
        body = node.kwargs["body"]
        inputs = [x.name for x in body.inputs if self._is_last(given[int(x.target)])]
        body = _Rewriting(body, self._ops, inputs).body(last)
        self._last_results[node.name] = [i for i, is_last in enumerate(last) if is_last]
        assert isinstance(node.spec, tuple)
        spec = tuple(_last(x) if x and i in self._last_results[node.name] else x for i, x in enumerate(node.spec))
        return replace(node, args=(init, stacks, closed), kwargs={**node.kwargs, "body": body}, spec=spec)

    def _with_last(self, node: Node) -> Node:
        """Return a node whose result, the first one of several, has the channels last."""
        if isinstance(node.spec, Spec):
            self._last.add(node.name)
            return replace(node, spec=_last(node.spec))
        assert node.spec is not None
        assert node.spec[0] is not None
        self._last_results[node.name] = [0]
        return replace(node, spec=(_last(node.spec[0]), *node.spec[1:]))

    def _is_last(self, value: Any) -> bool:
        return isinstance(value, Ref) and value.name in self._last

    def _rank(self, ref: Ref) -> int:
        return len(self._specs[ref.name].shape)

    def _to_last(self, ref: Ref, user: str) -> Ref:
        """Return a value with the channels last, as an argument of `user`; a number as it is."""
        return ref if self._is_last(ref) or not self._rank(ref) else self._permute(ref, user, _axes_last)

    def _to_second(self, ref: Ref, user: str) -> Ref:
        """Return a value in PyTorch's layout, as an argument of `user`."""
        return self._permute(ref, user, _axes_second) if self._is_last(ref) else ref

    def _permute(self, ref: Ref, user: str, axes_of: Callable[[int], tuple[int, ...]]) -> Ref:
        """Add a transpose for each user by itself, so that it belongs to the user's layer."""
        name, axes = f"{ref.name}_in_{user}", axes_of(self._rank(ref))
        if name not in self._specs:
            self._add(Node(name, PERMUTE, (ref, axes), {}, _permuted(self._specs[ref.name], axes)))
        return Ref(name)
