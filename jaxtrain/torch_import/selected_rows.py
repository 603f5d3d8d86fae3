"""Rows that a mask selects, as `x[mask]`, in arrays of fixed size.

In a captured graph the number of selected rows is a prime number, by which an axis of them is known
(`capture.values.row_selections`). Here such an axis becomes as long as the mask has elements: the selected rows
come first, in their order, and the rows after them are padding. Every operation leaves ones (zeros of integers)
there, so that padding is neither inf nor NaN wherever it is read, and has no gradient. Reductions leave it out, and
writing to places drops it. An operation that is not known to keep rows apart is refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isqrt, prod
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxtrain.errors import UserError
from jaxtrain.torch_import.graph import GETITEM, Captured, Dtype, Input, Node, Ref, Spec, references, without_unused
from jaxtrain.torch_import.integer_ranges import names, packet_of
from jaxtrain.torch_import.ops import RANDOM
from jaxtrain.torch_import.refusals import refusal

PLACES = "jaxtrain.places.default"
"""The places of the true elements of a mask. Its arguments are the mask and the prime number of them."""
_FIRST = 2**24
_REMEDY = "use a mask of fixed shape, as torch.where does"


def prime(i: int) -> int:
    """Return the i-th prime number above all sizes of arrays that a program has.

    >>> prime(0)
    16777259
    """
    n = _FIRST
    for _ in range(i + 1):
        n += 1
        while any(n % factor == 0 for factor in range(2, isqrt(n) + 1)):
            n += 1
    return n


class EqualCountsError(UserError):
    """Two masks are to select the same number of rows, or one a given number, which depends on values."""


class Rows(NamedTuple):
    """An axis of selected rows.

    Attributes:
      axis: The axis.
      number: The prime number.
      each: The elements of the axis for each row, which are next to each other.
    """

    axis: int
    number: int
    each: int


class Selection(NamedTuple):
    """A mask.

    Attributes:
      mask: Its value in the graph.
      size: The number of its elements.
      rows: The value that is the number of the true ones.
    """

    mask: Ref
    size: int
    rows: Ref


def with_selected_rows(captured: Captured) -> Captured:
    """Return a captured graph whose selected rows are in arrays of fixed size.

    Args:
      captured: The graph as it is captured.

    Returns:
      The same graph without `PLACES`; the same object, if there are none.

    Raises:
      UserError: An operation does not keep rows apart, or the result has as many rows as a mask selects.
    """
    graph = captured.graph
    if not any(node.op == PLACES for node in graph.nodes):
        return captured
    rewritten = _Rewritten(captured)
    for node in graph.nodes:
        rewritten.add(node)
    for name in references((graph.outputs, graph.state)):
        rewritten.refuse_rows(name)
    results = graph.outputs, tuple(x.value for x in captured.assumptions)
    nodes = without_unused(replace(graph, nodes=tuple(rewritten.nodes), outputs=results), RANDOM).nodes
    origins = {**captured.origins, **rewritten.origins}
    return captured._replace(graph=replace(graph, nodes=nodes), origins=origins)


class _Rewritten:
    """The nodes of a graph, rewritten one after another."""

    def __init__(self, captured: Captured) -> None:
        graph = captured.graph
        self.nodes: list[Node] = []
        self.origins: dict[str, Any] = {}
        self._of = captured.origins
        values: tuple[Input | Node, ...] = (*graph.inputs, *graph.nodes)
        self._specs: dict[str, Any] = {x.name: x.spec for x in values}
        self._sources = {node.name: node for node in graph.nodes}
        self._selections: dict[int, Selection] = {}
        self._made: dict[Any, Ref] = {}
        self._places: set[str] = set()
        """Integers that are places, from 0 on."""
        self._node = graph.nodes[0]
        self._count = 0

    def add(self, node: Node) -> None:
        """Add a node of the captured graph."""
        self._node = node
        if node.op == PLACES:
            self._add_places(node)
        elif not any(map(self._rows, [node.spec, *map(self._specs.get, references((node.args, node.kwargs)))])):
            self.nodes.append(node)
        elif node.op == GETITEM:
            self.finish()
        else:
            rule = _RULES.get(packet_of(node)) or (_by_element if node.promoted is not None else None)
            if rule is None:
                raise self.refused()
            rule(self, node)

    def refused(self, what: str = "") -> UserError:
        """Return the error of the node that is being added."""
        what = what or f"{self._node.op} of rows that a mask selects, whose number depends on values"
        return refusal(what, _REMEDY, self._node.source)

    def unequal(self) -> EqualCountsError:
        """Return the error of rows of one mask where as many of another one are needed."""
        what = "two masks are to select the same number of rows, which depends on values"
        return EqualCountsError(str(refusal(what, "use one mask", self._node.source)))

    def refuse_rows(self, name: str) -> None:
        """Refuse a result of the graph that has as many rows as a mask selects."""
        if self._rows(self._specs[name]):
            source = self._sources[name].source
            raise refusal("the shape of a result depends on a tensor's value", _REMEDY, source)

    # Sizes.

    def rows_in(self, size: int) -> tuple[int, int] | None:
        """Return the prime number that a size is of, and the rest; None of an ordinary size."""
        found = [number for number in self._selections if size % number == 0]
        if not found or not size:
            return None
        rest = size // found[0]
        if len(found) > 1 or rest >= _FIRST:
            raise self.refused()
        return found[0], rest

    def _rows(self, spec: Any) -> list[Rows]:
        if isinstance(spec, tuple):
            return [rows for part in spec for rows in self._rows(part)]
        shape = spec.shape if isinstance(spec, Spec) else ()
        return [Rows(axis, *found) for axis, n in enumerate(shape) if (found := self.rows_in(n))]

    def rows(self, value: Any) -> list[Rows]:
        """Return the axes of selected rows of an argument."""
        return self._rows(self._specs[value.name]) if isinstance(value, Ref) else []

    def shape(self, value: Any) -> tuple[int, ...]:
        """Return the captured shape of an argument."""
        spec = self._specs[value.name] if isinstance(value, Ref) else None
        return spec.shape if isinstance(spec, Spec) else ()

    def dtype(self, value: Ref) -> str:
        """Return the dtype of an argument."""
        return str(self._specs[value.name].dtype)

    def fixed(self, value: Any) -> Any:
        """Return sizes, numbers and specs with the lengths of arrays in place of prime numbers."""
        if isinstance(value, Spec):
            return replace(value, shape=self.fixed(value.shape))
        if isinstance(value, tuple):
            return tuple(map(self.fixed, value))
        if isinstance(value, dict):
            return {name: self.fixed(x) for name, x in value.items()}
        if type(value) is int and (found := self.rows_in(value)):
            return self._selections[found[0]].size * found[1]
        return value

    # Values.

    def call(
        self, op: str, args: tuple[Any, ...], spec: Spec, promoted: str | None = None, name: str = "", **kwargs: Any
    ) -> Ref:
        """Add an operation on fixed sizes and return its result, to which it gives its captured spec."""
        name = name or f"{self._node.name}_row{self._number()}"
        node = replace(
            self._node, name=name, op=f"aten.{op}", args=args, kwargs=kwargs, spec=self.fixed(spec), promoted=promoted
        )
        self.nodes.append(node)
        self._specs[name] = spec
        self.origins[name] = self._of.get(self._node.name, ())
        return Ref(name)

    def _number(self) -> int:
        self._count += 1
        return self._count

    def core(self, args: Any = None, kwargs: Any = None, spec: Any = None, name: str = "") -> Ref:
        """Add the operation of the captured node on fixed sizes, with other arguments where they are given."""
        node = self._node
        args, kwargs = node.args if args is None else args, node.kwargs if kwargs is None else kwargs
        name, spec = name or f"{node.name}_row{self._number()}", node.spec if spec is None else spec
        args, kwargs, fixed = self.fixed((args, kwargs, spec))
        self.nodes.append(replace(node, name=name, args=args, kwargs=kwargs, spec=fixed))
        self._specs[name] = spec
        self.origins[name] = self._of.get(node.name, ())
        return Ref(name)

    def finish(self, args: Any = None, kwargs: Any = None) -> None:
        """Add the operation of the captured node, with ones in the padding of its result."""
        if isinstance(self._node.spec, tuple) or not self._rows(self._node.spec):
            self.core(args, kwargs, name=self._node.name)
        else:
            self.clean(self.core(args, kwargs))

    def clean(self, value: Ref) -> None:
        """Make a value with ones in its padding the result of the captured node."""
        self.filled(value, self.rows(value), self.padding(self.dtype(value)), self._node.name)

    def padding(self, dtype: str) -> Any:
        """Return what is in the padding of arrays of a dtype."""
        return 1 if jnp.issubdtype(jnp.dtype(dtype), jnp.inexact) else False if dtype == "bool" else 0

    def filled(self, value: Ref, axes: Sequence[Rows], fill: Any, name: str = "") -> Ref:
        """Return a value with another one in the padding of some axes."""
        spec = self._specs[value.name]
        op = "where.self" if isinstance(fill, Ref) else "where.ScalarOther"
        for i, rows in enumerate(axes):
            last = name if i == len(axes) - 1 else ""
            value = self.call(op, (self.valid(rows, len(spec.shape)), value, fill), spec, name=last)
        return value

    def valid(self, rows: Rows, ndim: int) -> Ref:
        """Return a mask of the rows that are no padding, to be broadcast."""
        key, size = ("valid", *rows, ndim), rows.number * rows.each
        if key not in self._made:
            spec = Spec((size,), "bool")
            places, count = self.positions(rows), self.count(rows.number, rows.each)
            found = self.call("lt.Tensor", (places, count), spec, promoted="int64")
            shape = tuple(size if i == rows.axis else 1 for i in range(ndim))
            self._made[key] = self.call("view.default", (found, self.fixed(shape)), replace(spec, shape=shape))
        return self._made[key]

    def positions(self, rows: Rows) -> Ref:
        """Return the places of the elements of an axis, int64."""
        key, size = ("positions", rows.number, rows.each), rows.number * rows.each
        if key not in self._made:
            self._made[key] = self.call("arange.default", (self.fixed(size),), Spec((size,), "int64"))
        return self._made[key]

    def count(self, number: int, each: int) -> Ref:
        """Return the number of elements that are no padding, int64."""
        count, key = self._selections[number].rows, ("count", number, each)
        if each != 1 and key not in self._made:
            self._made[key] = self.call("mul.Tensor", (count, each), Spec((), "int64"), promoted="int64")
        return count if each == 1 else self._made[key]

    def elements(self, shape: Sequence[int], dtype: str) -> Ref:
        """Return the number of elements of a captured shape that are no padding, as a floating-point number."""
        found, rest = [], 1
        for n in shape:
            rows = self.rows_in(n)
            found += [rows[0]] if rows else []
            rest *= rows[1] if rows else n
        (first, *others) = found
        total = self.count(first, rest)
        for number in others:
            total = self.call("mul.Tensor", (total, self.count(number, 1)), Spec((), "int64"), promoted="int64")
        dtype = "float32" if dtype in ("bfloat16", "float16") else dtype
        return self.call("_to_copy.default", (total,), Spec((), dtype), dtype=Dtype(dtype))

    def divide(self, total: Ref, count: Ref) -> None:
        """Make a quotient the result of the captured node."""
        self.result(self.call("div.Tensor", (total, count), self._specs[total.name], self.dtype(count)))

    def result(self, value: Ref) -> None:
        """Make the last value that was added the result of the captured node, with ones in its padding."""
        if self.rows(value):
            self.clean(value)
        else:
            self.nodes[-1] = replace(self.nodes[-1], name=self._node.name)

    def rows_of(self, spec: Any) -> list[Rows]:
        """Return the axes of selected rows of a spec."""
        return self._rows(spec)

    def is_hidden(self, number: float) -> bool:
        """Return whether a number was computed from a prime number, of which there is no true value then."""
        return any(
            abs(x / p - round(x / p)) * p < 3 and round(x / p) > 0
            for p in self._selections
            for x in (abs(number), 1 / abs(number) if number else 0)
            if x < 2**52
        )

    def mark_places(self) -> None:
        """Mark the result of the captured node as places from 0 on."""
        self._places.add(self._node.name)

    def is_place(self, value: Any) -> bool:
        """Return whether integers are places from 0 on."""
        return value.name in self._places

    # Nodes.

    def _add_places(self, node: Node) -> None:
        mask, number = node.args
        size = prod(self.fixed(self.shape(mask)))
        known = self._selections.get(number)
        if known is not None and not self._is_same(known.mask, mask):
            raise self.unequal()
        if known is None:
            count = self.call("sum.default", (mask,), Spec((), "int64"))
            self._selections[number] = Selection(mask, size, count)
        spec = self._specs[node.name]
        found = self.call("nonzero_static.default", (mask,), spec, name=node.name, size=size, fill_value=0)
        self._places.add(found.name)

    def _is_same(self, x: Any, y: Any) -> bool:
        """Return whether two arguments are computed by the same operations of the same values."""
        if isinstance(x, tuple) and isinstance(y, tuple):
            return len(x) == len(y) and all(map(self._is_same, x, y))
        if not (isinstance(x, Ref) and isinstance(y, Ref)) or x == y:
            return bool(x == y)
        a, b = self._sources.get(x.name), self._sources.get(y.name)
        if a is None or b is None or a.op != b.op or a.op in RANDOM:
            return False
        return self._is_same((a.args, *a.kwargs.values()), (b.args, *b.kwargs.values()))

    def move(self, **changed: Any) -> None:
        """Add an operation that moves elements and leaves the padding of selected rows as it is."""
        self.core(name=self._node.name, **changed)
        if any(self.is_place(Ref(name)) for name in references(self._node.args)):
            self._places.add(self._node.name)


Rule = Callable[[_Rewritten, Node], None]
_RULES: dict[str, Rule] = {}
"""How operations are rewritten, by name, besides elementwise ones."""


def _rule(text: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names(text), rule))
        return rule

    return register


def _argument(node: Node, place: int, name: str, default: Any = None) -> Any:
    return node.kwargs.get(name, node.args[place] if len(node.args) > place else default)


def _axes(given: Any, ndim: int) -> tuple[int, ...]:
    """Return the axes that an argument names; None and () are all."""
    chosen = (given,) if isinstance(given, int) else tuple(range(ndim)) if given is None or given == () else given
    return tuple(axis % ndim for axis in chosen) if ndim else ()


def _is_broadcast(to: _Rewritten, node: Node) -> bool:
    """Return whether the operands of a node are as its result, which may repeat those of one row."""
    shape = node.spec.shape if isinstance(node.spec, Spec) else ()
    for name in references((node.args, node.kwargs)):
        own = to.shape(Ref(name))
        if any(n not in (1, whole) for n, whole in zip(reversed(own), reversed(shape), strict=False)):
            return False
    return True


@_rule(
    "where masked_fill _to_copy copy lift_fresh_copy zeros_like ones_like full_like empty_like fill zero "
    "dropout native_dropout"
)
def _by_element(to: _Rewritten, node: Node) -> None:
    numbers = [x for x in (*node.args, *node.kwargs.values()) if isinstance(x, int | float)]
    if any(map(to.is_hidden, numbers)) or not _is_broadcast(to, node):
        raise to.refused()
    if packet_of(node) == "_to_copy" and to.is_place(node.args[0]):
        to.move()
    else:
        to.finish()


@_rule("unsqueeze permute transpose t clone detach alias contiguous lift_fresh movedim")
def _moved(to: _Rewritten, node: Node) -> None:
    to.move()


@_rule("squeeze")
def _squeezed(to: _Rewritten, node: Node) -> None:
    x = node.args[0]
    chosen = _axes(node.args[1] if len(node.args) > 1 else None, len(to.shape(x)))
    if any(rows.axis in chosen for rows in to.rows(x)):
        raise refusal(
            "squeeze removes the axis of the rows that a mask selects where there is one row",
            "give it another axis, as squeeze(-1)",
            node.source,
        )
    to.move()


@_rule("view _unsafe_view reshape flatten unflatten")
def _viewed(to: _Rewritten, node: Node) -> None:
    before, after = to.shape(node.args[0]), node.spec.shape  # type: ignore[union-attr]
    own = {(rows.number, prod(before[: rows.axis])) for rows in to.rows(node.args[0])}
    if {(rows.number, prod(after[: rows.axis])) for rows in to.rows_of(node.spec)} != own:
        raise to.refused()
    to.move()


@_rule("expand")
def _expanded(to: _Rewritten, node: Node) -> None:
    to.finish()


@_rule("repeat")
def _repeated(to: _Rewritten, node: Node) -> None:
    x, repeats = node.args
    ndim = len(to.shape(x))
    if any(repeats[rows.axis - ndim] != 1 for rows in to.rows(x)):
        raise to.refused()
    to.finish()


@_rule("cat stack unbind split split_with_sizes chunk flip select")
def _along_another_axis(to: _Rewritten, node: Node) -> None:
    place = {"split": 2, "split_with_sizes": 2, "chunk": 2}.get(packet_of(node), 1)
    x = node.args[0]
    dim = _argument(node, place, "dim", _argument(node, place, "dims", 0))
    for part in x if isinstance(x, tuple) else (x,):
        chosen = _axes(dim, len(to.shape(part)) + (packet_of(node) == "stack"))
        if packet_of(node) != "stack" and {rows.axis for rows in to.rows(part)} & {*chosen}:
            raise to.refused()
    to.finish()
    if isinstance(x, Ref) and to.is_place(x):
        to.mark_places()


@_rule("slice")
def _sliced(to: _Rewritten, node: Node) -> None:
    dim, start, end, step = (_argument(node, i + 1, name) for i, name in enumerate(("dim", "start", "end", "step")))
    shape = to.shape(node.args[0])
    axis = (dim or 0) % len(shape)
    is_whole = start in (None, 0) and (end is None or end >= shape[axis]) and step in (None, 1)
    if not is_whole and axis in {rows.axis for rows in to.rows(node.args[0])}:
        raise to.refused()
    to.move()


@_rule("constant_pad_nd pad")
def _padded(to: _Rewritten, node: Node) -> None:
    ndim, widths = len(to.shape(node.args[0])), node.args[1]
    given = {ndim - 1 - i // 2 for i, width in enumerate(widths) if width}
    if given & {rows.axis for rows in to.rows(node.args[0])}:
        raise to.refused()
    to.finish()


@_rule("full zeros ones empty new_zeros new_ones new_full new_empty eye")
def _made(to: _Rewritten, node: Node) -> None:
    to.finish()


@_rule("arange")
def _counted(to: _Rewritten, node: Node) -> None:
    numbers = [x for x in node.args if x is not None]
    if (len(numbers) > 1 and numbers[0] != 0) or (len(numbers) > 2 and numbers[2] != 1):
        raise to.refused()
    to.finish()
    to.mark_places()


@_rule("glu softmax _softmax log_softmax _log_softmax sort topk argsort cummax cummin renorm one_hot diff")
def _along_axis(to: _Rewritten, node: Node) -> None:
    place = {"topk": 2}.get(packet_of(node), 1)
    x = node.args[0]
    if packet_of(node) != "one_hot":
        (axis,) = _axes(_argument(node, place, "dim", -1), len(to.shape(x)))
        own = [rows for rows in to.rows(x) if rows.axis == axis]
        if own and "softmax" in packet_of(node):
            to.finish((to.filled(x, own, float("-inf")), *node.args[1:]))
            return
        if own:
            raise to.refused()
    to.finish()


@_rule("cumsum cumprod logcumsumexp")
def _cumulated(to: _Rewritten, node: Node) -> None:
    # Padding is behind all rows.
    to.finish()


@_rule("layer_norm native_layer_norm rms_norm _fused_rms_norm")
def _normalized(to: _Rewritten, node: Node) -> None:
    first = len(to.shape(node.args[0])) - len(node.args[1])
    if any(rows.axis >= first for rows in to.rows(node.args[0])):
        raise to.refused()
    to.finish()


@_rule(
    "convolution conv1d conv2d conv3d conv_transpose1d conv_transpose2d group_norm native_group_norm max_pool1d "
    "max_pool2d max_pool2d_with_indices avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d "
    "_adaptive_avg_pool2d adaptive_max_pool2d upsample_nearest2d upsample_bilinear2d pixel_shuffle "
    "scaled_dot_product_attention"
)
def _by_example(to: _Rewritten, node: Node) -> None:
    for name in references((node.args, node.kwargs)):
        if any(rows.axis != 0 for rows in to.rows(Ref(name))):
            raise to.refused()
    if not to.rows(node.args[0]):
        raise to.refused()
    to.finish()


@_rule("linear mm bmm matmul addmm baddbmm mv dot")
def _multiplied(to: _Rewritten, node: Node) -> None:
    """A product, whose sum leaves padding out."""
    args, place = list(node.args), int(packet_of(node) in ("addmm", "baddbmm"))
    x, y = args[place : place + 2]
    last = len(to.shape(x)) - 1
    axis = 1 if packet_of(node) == "linear" else max(len(to.shape(y)) - 2, 0)
    args[place] = to.filled(x, [rows for rows in to.rows(x) if rows.axis == last], 0)
    args[place + 1] = to.filled(y, [rows for rows in to.rows(y) if rows.axis == axis], 0)
    to.finish(tuple(args))


@_rule("einsum")
def _summed_products(to: _Rewritten, node: Node) -> None:
    """Products of several arrays, whose sums leave padding out."""
    equation, operands, *rest = node.args
    letters, _, kept = equation.replace(" ", "").partition("->")
    parts = letters.split(",")
    if "->" not in equation or "." in equation or any(len({*part}) < len(part) for part in parts):
        raise to.refused()
    filled = [
        to.filled(x, [rows for rows in to.rows(x) if part[rows.axis] not in kept], 0)
        for x, part in zip(operands, parts, strict=True)
    ]
    to.finish((equation, tuple(filled), *rest))


# Reading and writing at places.


@_rule("embedding")
def _embedded(to: _Rewritten, node: Node) -> None:
    if to.rows(node.args[0]):
        raise to.refused()
    to.finish()


def _check_read(to: _Rewritten, x: Any, axis: int, index: Any) -> None:
    """Refuse an index of selected rows that may count from their end."""
    if axis in {rows.axis for rows in to.rows(x)} and not to.is_place(index):
        raise to.refused()


@_rule("index _unsafe_index")
def _indexed(to: _Rewritten, node: Node) -> None:
    x, indices = node.args
    for axis, index in enumerate(indices):
        if index is not None:
            if to.dtype(index) in ("bool", "uint8"):
                raise to.refused()
            _check_read(to, x, axis, index)
    to.finish()
    if to.is_place(x):
        to.mark_places()


@_rule("index_select")
def _index_selected(to: _Rewritten, node: Node) -> None:
    x, dim, index = node.args
    _check_read(to, x, dim % len(to.shape(x)), index)
    to.finish()


@_rule("gather take_along_dim")
def _gathered(to: _Rewritten, node: Node) -> None:
    x, dim, index = node.args[:3] if packet_of(node) == "gather" else (node.args[0], node.args[2], node.args[1])
    _check_aligned(to, x, dim, index)
    _check_read(to, x, dim % len(to.shape(x)), index)
    to.finish()


def _check_aligned(to: _Rewritten, x: Any, dim: int, index: Any) -> None:
    """Refuse an index along an axis whose other axes have other rows than the array."""
    axis = dim % len(to.shape(x))
    if {rows for rows in to.rows(x) if rows.axis != axis} != {rows for rows in to.rows(index) if rows.axis != axis}:
        raise to.refused()


def _outside(to: _Rewritten, x: Any, axis: int, index: Any) -> Any:
    """Return an index whose padding is outside of an axis, where nothing is written."""
    _check_read(to, x, axis, index)
    size = to.fixed(to.shape(x)[axis])
    for rows in to.rows(index):
        shape = tuple(n if i == rows.axis else 1 for i, n in enumerate(to.shape(index)))
        spec = Spec((rows.number * rows.each,), "int64")
        beyond = to.call("add.Tensor", (to.positions(rows), size), spec, promoted="int64")
        beyond = to.call("view.default", (beyond, to.fixed(shape)), replace(spec, shape=shape))
        index = to.filled(index, [rows], beyond)
    return index


@_rule("index_put _unsafe_index_put")
def _put(to: _Rewritten, node: Node) -> None:
    x, indices, values, *rest = node.args
    given = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    if any(to.dtype(index) in ("bool", "uint8") for _, index in given):
        (axis, mask) = given[0]
        missing = len(to.shape(x)) - len(to.shape(mask)) + 1 - len(to.shape(values))
        if len(given) > 1 or to.rows(values) or (axis >= missing and to.shape(values)[axis - missing] != 1):
            raise to.refused()
        to.finish()
        return
    new = list(indices)
    _check_put(to, x, given, values)
    for axis, index in given:
        if to.rows(index):
            new[axis] = _outside(to, x, axis, index)
        else:
            _check_read(to, x, axis, index)
    to.finish((x, tuple(new), values, *rest))


def _check_put(to: _Rewritten, x: Any, given: Sequence[tuple[int, Any]], values: Any) -> None:
    """Refuse values that are not one for each place of an index, nor one for all."""
    places = [axis for axis, _ in given]
    axis = places[0] if places[-1] - places[0] < len(places) else 0
    ndim = max(len(to.shape(index)) for _, index in given)
    missing = len(to.shape(x)) - len(given) + ndim - len(to.shape(values))
    for _, index in given:
        for rows in to.rows(index):
            place = axis + ndim - len(to.shape(index)) + rows.axis - missing
            if place >= 0 and to.shape(values)[place] not in (1, rows.number * rows.each):
                raise to.unequal()


@_rule("masked_scatter")
def _scattered_by_mask(to: _Rewritten, node: Node) -> None:
    x, mask, source = node.args
    if to.rows(x) or to.rows(mask) or any(rows.axis for rows in to.rows(source)):
        raise to.refused()
    to.finish()


@_rule("index_add index_copy index_fill")
def _put_along(to: _Rewritten, node: Node) -> None:
    x, dim, index, *rest = node.args
    axis = dim % len(to.shape(x))
    if packet_of(node) != "index_fill" and to.shape(rest[0])[axis : axis + 1] != to.shape(index)[:1]:
        raise to.unequal()
    to.finish((x, dim, _outside(to, x, axis, index), *rest))


@_rule("scatter scatter_add")
def _scattered(to: _Rewritten, node: Node) -> None:
    x, dim, index, *rest = node.args
    axis = dim % len(to.shape(x))
    _check_aligned(to, x, dim, index)
    _check_read(to, x, axis, index)
    if any(rows.axis == axis for rows in to.rows(index)):
        index = _outside(to, x, axis, index)
    to.finish((x, dim, index, *rest))


@_rule("ctc_loss")
def _concatenated(to: _Rewritten, node: Node) -> None:
    """A loss of concatenated targets, whose lengths leave padding out."""
    log_probs, targets, *rest = node.args
    if any(map(to.rows, (log_probs, *rest))) or len(to.shape(targets)) != 1:
        raise to.refused()
    to.finish()


# Reductions.

_FILLED = {"sum": 0, "nansum": 0, "prod": 1, "any": False, "all": True, "count_nonzero": 0, "logsumexp": float("-inf")}


@_rule("sum nansum prod any all count_nonzero logsumexp linalg_vector_norm amax amin max min argmax argmin mean")
def _reduced(to: _Rewritten, node: Node) -> None:
    packet, x = packet_of(node), node.args[0]
    dim = _argument(node, 2 if packet == "linalg_vector_norm" else 1, "dim")
    if packet in ("max", "min") and isinstance(dim, Ref):
        _by_element(to, node)
        return
    axes = _axes(dim, len(to.shape(x)))
    reduced = [rows for rows in to.rows(x) if rows.axis in axes]
    if not reduced:
        to.finish()
    elif packet == "mean":
        _mean(to, node, axes, reduced)
    else:
        fill = _of_nothing(to, node, reduced) if packet not in _FILLED else _FILLED[packet]
        fill = bool(fill) if to.dtype(x) == "bool" else fill
        to.finish((to.filled(x, reduced, fill), *node.args[1:]))
        if packet.startswith("arg"):
            to.mark_places()


def _of_nothing(to: _Rewritten, node: Node, reduced: Sequence[Rows]) -> Any:
    """Return what an extremum or a norm reads in place of padding; NaN, if there is nothing but padding."""
    packet, x = packet_of(node), node.args[0]
    if not jnp.issubdtype(jnp.dtype(to.dtype(x)), jnp.floating):
        raise to.refused()
    if packet == "linalg_vector_norm":
        order = _argument(node, 1, "ord", 2)
        if not 0 < order < float("inf"):
            raise to.refused()
        return 0
    shape = [x.number * x.each for x in reduced]
    count, spec = to.elements(shape, to.dtype(x)), Spec((), to.dtype(x))
    is_empty = to.call("eq.Scalar", (count, 0), Spec((), "bool"), promoted=to.dtype(count))
    number = to.call("scalar_tensor.default", (float("-inf" if "max" in packet else "inf"),), spec)
    nothing = to.call("scalar_tensor.default", (float("nan"),), spec)
    return to.call("where.self", (is_empty, nothing, number), spec)


def _mean(to: _Rewritten, node: Node, axes: tuple[int, ...], reduced: Sequence[Rows]) -> None:
    x, spec = node.args[0], node.spec
    assert isinstance(spec, Spec)
    keepdim = _argument(node, 2, "keepdim", False)
    kwargs: dict[str, Any] = {"dtype": Dtype(spec.dtype)} if to.dtype(x) != spec.dtype else {}
    total = to.call("sum.dim_IntList", (to.filled(x, reduced, 0), axes, keepdim), spec, **kwargs)
    count = to.elements([to.shape(x)[axis] for axis in axes], spec.dtype)
    to.divide(total, count)


@_rule("var std var_mean std_mean")
def _spread(to: _Rewritten, node: Node) -> None:
    """Variance and standard deviation by their formulas, as PyTorch NaN for too few rows."""
    packet, x = packet_of(node), node.args[0]
    axes = _axes(_argument(node, 1, "dim"), len(to.shape(x)))
    reduced = [rows for rows in to.rows(x) if rows.axis in axes]
    if not reduced:
        to.finish()
        return
    if isinstance(node.spec, tuple):
        raise to.refused()
    dtype, shape = to.dtype(x), to.shape(x)
    by_flag = node.op.endswith(".dim")
    keepdim = _argument(node, 3, "keepdim", False)
    correction = int(_argument(node, 2, "unbiased", True)) if by_flag else node.kwargs.get("correction")
    count = to.elements([shape[axis] for axis in axes], dtype)
    kept = Spec(tuple(1 if axis in axes else n for axis, n in enumerate(shape)), dtype)
    total = to.call("sum.dim_IntList", (to.filled(x, reduced, 0), axes, True), kept)
    mean = to.call("div.Tensor", (total, count), kept, promoted=dtype)
    centered = to.filled(to.call("sub.Tensor", (x, mean), Spec(shape, dtype), promoted=dtype), reduced, 0)
    squared = to.call("mul.Tensor", (centered, centered), Spec(shape, dtype), promoted=dtype)
    spec = node.spec
    assert isinstance(spec, Spec)
    total = to.call("sum.dim_IntList", (squared, axes, keepdim), spec)
    # The deviation of a single element is 0, whatever a compiler fuses.
    single = to.call("mul.Tensor", (total, 0), spec, promoted=dtype)
    several = to.call("gt.Scalar", (count, 1), Spec((), "bool"), promoted=to.dtype(count))
    total = to.call("where.self", (several, total, single), spec)
    number = Spec((), to.dtype(count))
    rest = to.call("sub.Tensor", (count, 1 if correction is None else correction), number, promoted=number.dtype)
    rest = to.call("clamp_min.default", (rest, 0), number, promoted=number.dtype)
    if packet == "var":
        to.divide(total, rest)
        return
    # With gradient 0 for a constant.
    variance = to.call("div.Tensor", (total, rest), spec, promoted=dtype)
    zero = to.call("eq.Scalar", (variance, 0), replace(spec, dtype="bool"), promoted=dtype)
    root = to.call("sqrt.default", (to.call("where.ScalarSelf", (zero, 1, variance), spec),), spec, promoted=dtype)
    to.result(to.call("where.ScalarSelf", (zero, 0, root), spec))


# Losses.

_NONE, _MEAN, SUM = range(3)
PLACE_OF_REDUCTION = {
    **dict.fromkeys(("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div"), 2),
    **dict.fromkeys(("binary_cross_entropy", "cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"), 3),
    "binary_cross_entropy_with_logits": 4,
}
"""The place of the reduction among the arguments of losses."""


@_rule(" ".join(PLACE_OF_REDUCTION))
def _loss(to: _Rewritten, node: Node) -> None:
    x, target = node.args[:2]
    place, of_classes = PLACE_OF_REDUCTION[packet_of(node)], packet_of(node) in ("cross_entropy_loss", *_NLL)
    reduction = _argument(node, place, "reduction", _MEAN)
    classes = [rows for rows in to.rows(x) if of_classes and rows.axis == min(len(to.shape(x)) - 1, 1)]
    if classes:
        is_plain = packet_of(node) == "cross_entropy_loss" and _argument(node, 2, "weight") is None
        if (
            not is_plain
            or _argument(node, place + 2, "label_smoothing", 0.0)
            or jnp.issubdtype(jnp.dtype(to.dtype(target)), jnp.floating)
        ):
            raise to.refused()
        # Finite: minus infinity times 0 is NaN.
        x = to.filled(x, classes, float(jnp.finfo(to.dtype(x)).min) / 4)
    if reduction == _NONE:
        to.finish((x, *node.args[1:]))
    elif of_classes and not jnp.issubdtype(jnp.dtype(to.dtype(target)), jnp.floating):
        ignored = _argument(node, place + 1, "ignore_index", -100)
        to.finish((x, to.filled(target, to.rows(target), ignored), *node.args[2:]))
    else:
        shape = to.shape(x)[:1] + to.shape(x)[2:] if of_classes else jnp.broadcast_shapes(to.shape(x), to.shape(target))
        _reduce_losses(to, node, place, reduction, shape)


_NLL = ("nll_loss", "nll_loss_nd", "nll_loss2d")


def _reduce_losses(to: _Rewritten, node: Node, place: int, reduction: int, shape: tuple[int, ...]) -> None:
    """Reduce the losses of rows, without padding."""
    dtype = node.spec.dtype  # type: ignore[union-attr]
    args = (*node.args[:place], _NONE, *node.args[place + 1 :])
    args, kwargs = (args, node.kwargs) if len(node.args) > place else (node.args, {**node.kwargs, "reduction": _NONE})
    losses = to.core(args, kwargs, Spec(shape, dtype))
    filled = to.filled(losses, to.rows(losses), 0)
    if reduction == SUM:
        to.result(to.call("sum.default", (filled,), Spec((), dtype)))
    else:
        to.divide(to.call("sum.default", (filled,), Spec((), dtype)), to.elements(shape, dtype))
