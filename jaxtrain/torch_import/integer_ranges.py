"""The ranges of a graph's integers, from those of its inputs, which are int32, and from its constants."""

from collections.abc import Callable, Mapping
from itertools import product
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.torch_import.graph import COND, GETITEM, Graph, Node, Ref, Spec, references
from jaxtrain.torch_import.ops import TABLE

Range = tuple[int, int]
"""Least and largest value of an integer."""
INT32: Range = (-(2**31), 2**31 - 1)
INT64_RANGE: Range = (-(2**63), 2**63 - 1)
_COUNTER: Range = (-(2**30), 2**30)
"""A buffer that counts what no run reaches."""
_FEW = 2**20
"""What a pass adds to a buffer that counts."""


def names(text: str) -> frozenset[str]:
    """Return words as a set."""
    return frozenset(text.split())


_OF_INDICES = names(
    "argmax argmin argsort searchsorted bucketize nonzero_static tril_indices triu_indices count_nonzero "
    "multinomial randperm bincount"
)
_SELECTING = names(
    "index _unsafe_index gather take_along_dim index_select take embedding scatter index_copy slice_scatter "
    "select_scatter masked_scatter diagonal_scatter index_fill copy where masked_fill fill maximum minimum amax amin "
    "max min median nanmedian mode kthvalue topk sort msort cummax cummin clamp clip clamp_min clamp_max type_as to "
    "_to_copy repeat_interleave cat concat concatenate stack detach clone"
)
"""Operations whose integers are among those of their arguments."""


def fits(found: Any) -> bool:
    """Return whether the range of a value is within int32."""
    parts = found if isinstance(found, list) else [found]
    return all(part is None or (part[0] >= INT32[0] and part[1] <= INT32[1]) for part in parts)


def packet_of(node: Node) -> str:
    """Return the name of a node's operation, without its overload."""
    return node.op.split(".")[1] if "." in node.op else node.op


def is_view(node: Node) -> bool:
    """Return whether an operation moves elements only."""
    fn = TABLE.get(node.op)
    return node.op == GETITEM or getattr(fn, "__module__", "").endswith(".ops.shape") or fn in _MOVING


_MOVING = frozenset(TABLE[f"aten.{name}.default"] for name in ("repeat", "flip", "tril", "triu"))
"""Functions of JAX in the table that move elements only."""


def is_integer(dtype: str) -> bool:
    """Return whether a dtype is one of integers; bools are none."""
    return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.integer))


def ranges_of(graph: Graph, constants: Mapping[str, Any], inputs: Range = INT32) -> dict[str, Any]:
    """Return the ranges of a graph's values by name: None of what is no integer, a list for several results.

    Args:
      graph: The graph.
      constants: Its buffers and other constants, by target.
      inputs: Least and largest value of its integer inputs.
    """
    found = _Ranges(graph, constants, inputs, _COUNTER).found
    new = [found[ref.name] for ref in graph.state.values()]
    counts = all(x is None or (_COUNTER[0] - _FEW <= x[0] and x[1] <= _COUNTER[1] + _FEW) for x in new)
    return found if counts else _Ranges(graph, constants, inputs, INT32).found


class _Ranges:
    def __init__(self, graph: Graph, constants: Mapping[str, Any], inputs: Range, state: Range) -> None:
        self.found: dict[str, Any] = {}
        self._shapes: dict[str, Any] = {}
        for x in graph.inputs:
            self._shapes[x.name] = x.spec.shape
            given = inputs if x.kind == "input" else state if x.kind == "state" else INT32
            if x.kind == "constant" and not isinstance(constants.get(x.target), jax.ShapeDtypeStruct | None):
                given = _of_array(constants[x.target], given)
            self.found[x.name] = _within_dtype(given, x.spec)
        for node in graph.nodes:
            self._shapes[node.name] = node.spec.shape if isinstance(node.spec, Spec) else None
            self.found[node.name] = self._of(node)

    def _of(self, node: Node) -> Any:
        if node.op == GETITEM:
            of, place = node.args
            found = self.found[of.name]
            return found[place] if isinstance(found, list) else found
        if node.op == COND:
            return [*map(_union, self._of_path(node, "holds"), self._of_path(node, "otherwise"))]
        if isinstance(node.spec, tuple):
            return self._of_several(node, node.spec)
        if packet_of(node) in ("item", "_local_scalar_dense"):
            return self._operand(node.args[0])
        if not isinstance(node.spec, Spec) or not is_integer(node.spec.dtype):
            return (0, 1) if isinstance(node.spec, Spec) and node.spec.dtype == "bool" else None
        return _within_dtype(self._of_integers(node), node.spec)

    def _of_path(self, node: Node, name: str) -> list[Range | None]:
        """Return the ranges of the results of a condition's path."""
        graph: Graph = node.kwargs[name]
        found = _Ranges(graph, {}, self._hull(node) or INT32, INT32).found
        return [found[ref.name] for ref in graph.outputs]

    def _of_several(self, node: Node, specs: tuple[Spec | None, ...]) -> list[Range | None]:
        of_arguments = self._hull(node)
        if packet_of(node) in _SELECTING:
            found = [of_arguments, INT32]
        elif is_view(node):
            found = [of_arguments] * len(specs)
        else:
            found = [INT32 if of_arguments is None else INT64_RANGE] * len(specs)
        found += [INT32] * (len(specs) - len(found))
        return [None if spec is None else _within_dtype(x, spec) for x, spec in zip(found, specs, strict=False)]

    def _hull(self, node: Node, *numbers: Any) -> Range | None:
        """Return the range of all integers among the tensors of a node, and of some numbers."""
        parts = [self.found[name] for name in references((node.args, node.kwargs))]
        parts = [part for found in parts for part in (found if isinstance(found, list) else [found])]
        parts = [part for part in (*parts, *((int(n), int(n)) for n in numbers)) if part is not None]
        return (min(x[0] for x in parts), max(x[1] for x in parts)) if parts else None

    def _operand(self, value: Any) -> Range | None:
        if isinstance(value, Ref):
            return self.found[value.name]
        return (int(value), int(value)) if isinstance(value, int) else None

    def _of_integers(self, node: Node) -> Range:
        """Return the range of an operation whose result is an integer."""
        packet, args, kwargs = packet_of(node), node.args, node.kwargs
        if packet in _OF_INDICES or node.op == "aten.repeat_interleave.Tensor":
            return INT32
        if is_view(node) or (packet == "_to_copy" or packet in _SELECTING):
            given = (*args[1:], *kwargs.values()) if packet in _WITH_NUMBERS else ()
            numbers = [x for x in given if isinstance(x, int | float)]
            operands = [self._operand(x) for x in args if isinstance(x, Ref)]
            if None in operands and packet in ("to", "_to_copy", "where", "type_as", "copy", "fill"):
                return INT64_RANGE  # Converted from floats.
            if packet in _BOUNDED:
                return self._bounded(node)
            numbers += [0, 1] if packet in ("pad", "constant_pad_nd", "tril", "triu", "diag_embed") else []
            return self._hull(node, *numbers) or INT64_RANGE
        if (rule := _RULES.get(packet)) is None:
            return INT64_RANGE
        size = None
        if packet in ("sum", "cumsum"):
            shape = self._shapes[args[0].name]
            made = prod(node.spec.shape) if isinstance(node.spec, Spec) else 1
            size = prod(shape) // max(made, 1) if packet == "sum" else max([*shape, 1])
        operands = [self._operand(x) for x in args]
        try:
            return rule(operands, size, kwargs) or INT64_RANGE
        except (TypeError, IndexError, OverflowError):
            return INT64_RANGE

    def _bounded(self, node: Node) -> Range:
        low, high = self._operand(node.args[0]) or INT64_RANGE
        bounds = [*node.args[1:], None, None][:2]
        least, most = (node.kwargs.get(name, x) for name, x in zip(("min", "max"), bounds, strict=True))
        if packet_of(node) in ("clamp_max", "minimum"):
            least, most = None, node.args[1]
        if packet_of(node) == "maximum":
            most = None
        if (bound := self._operand(least)) is not None:
            low, high = max(low, bound[0]), max(high, bound[1])
        if (bound := self._operand(most)) is not None:
            low, high = min(low, bound[0]), min(high, bound[1])
        return low, high


def _union(a: Range | None, b: Range | None) -> Range | None:
    return None if a is None or b is None else (min(a[0], b[0]), max(a[1], b[1]))


_WITH_NUMBERS = names("masked_fill fill scatter index_fill where pad constant_pad_nd")
_BOUNDED = names("clamp clip clamp_min clamp_max maximum minimum")


def _of_array(array: Any, otherwise: Range) -> Range:
    values = np.asarray(array)
    if values.dtype.kind not in "iu" or not values.size:
        return otherwise
    return int(values.min()), int(values.max())


def _within_dtype(found: Range | None, spec: Spec) -> Range | None:
    if not is_integer(spec.dtype):
        return (0, 1) if spec.dtype == "bool" else None
    limits = jnp.iinfo(spec.dtype)
    if found is None or found[0] < limits.min or found[1] > limits.max:
        return int(limits.min), int(limits.max)  # It wraps.
    return found


def _corners(fn: Callable[[int, int], int]) -> Callable[..., Range]:
    def rule(operands: Any, size: Any, kwargs: Any) -> Range:
        values = [fn(x, y) for x, y in product(operands[0], operands[1])]
        return min(values), max(values)

    return rule


def _added(sign: int, swapped: bool = False) -> Callable[..., Range]:
    def rule(operands: Any, size: Any, kwargs: Any) -> Range:
        x, y = operands[:2]
        alpha = sign * (operands[2][0] if len(operands) > 2 else kwargs.get("alpha", 1))
        x, y = (y, x) if swapped else (x, y)
        ends = sorted((alpha * y[0], alpha * y[1]))
        return x[0] + ends[0], x[1] + ends[1]

    return rule


def _remainder(operands: Any, size: Any, kwargs: Any) -> Range:
    (low, high), (least, most) = operands[:2]
    if least > 0 and low >= 0 and high < least:
        return low, high
    return min(least + 1, 0), max(most - 1, 0)


def _fmod(operands: Any, size: Any, kwargs: Any) -> Range:
    (low, high), divisor = operands[:2]
    most = max(abs(divisor[0]), abs(divisor[1])) - 1
    return (0 if low >= 0 else -most), (0 if high <= 0 else most)


def _divided(operands: Any, size: Any, kwargs: Any) -> Range | None:
    x, y = operands[:2]
    if kwargs.get("rounding_mode", "floor") is None:
        return None
    if y[0] > 0 or y[1] < 0:
        values = [a // b for a, b in product(x, y)]
        return min(values) - 1, max(values) + 1
    largest = max(abs(x[0]), abs(x[1]))
    return -largest, largest


def _bits(operands: Any) -> int:
    return max(max(abs(low), abs(high)).bit_length() for low, high in operands[:2])


def _and(operands: Any, size: Any, kwargs: Any) -> Range:
    if limits := [high for low, high in operands[:2] if low >= 0]:
        return 0, min(limits)
    return -(2 ** _bits(operands)), 2 ** _bits(operands) - 1


def _or(operands: Any, size: Any, kwargs: Any) -> Range:
    return (0 if all(low >= 0 for low, _ in operands[:2]) else -(2 ** _bits(operands))), 2 ** _bits(operands) - 1


def _left(operands: Any, size: Any, kwargs: Any) -> Range | None:
    x, (least, most) = operands[:2]
    if least < 0 or most > 62:
        return None
    values = [a << b for a, b in product(x, (least, most))]
    return min(values), max(values)


def _right(operands: Any, size: Any, kwargs: Any) -> Range:
    (low, high), (least, _) = operands[:2]
    by = min(max(least, 0), 63)
    return min(low >> by, 0), max(high >> by, 0)


def _power(operands: Any, size: Any, kwargs: Any) -> Range | None:
    x, (least, most) = operands[:2]
    if least != most or not 0 <= most <= 64:
        return None
    values = [a**most for a in x]
    return min(*values, 0), max(*values, 1)


def _summed(operands: Any, size: Any, kwargs: Any) -> Range:
    low, high = operands[0]
    return low * size, high * size


def _cumulated(operands: Any, size: Any, kwargs: Any) -> Range:
    low, high = operands[0]
    return min(low, low * size), max(high, high * size)


def _absolute(operands: Any, size: Any, kwargs: Any) -> Range:
    low, high = operands[0]
    return 0, max(abs(low), abs(high))


def _from_to(operands: Any, size: Any, kwargs: Any) -> Range:
    ends = [0, *(x for operand in operands[:2] for x in operand)]
    return (min(ends), max(ends)) if len(operands) == 1 else (min(ends[1:]), max(ends[1:]))


def _filled(place: int) -> Callable[..., Range]:
    return lambda operands, size, kwargs: operands[place] if len(operands) > place else (int(kwargs["fill_value"]),) * 2


_RULES: dict[str, Callable[..., Range | None]] = {
    "add": _added(1),
    "sub": _added(-1),
    "rsub": _added(-1, swapped=True),
    "mul": _corners(lambda x, y: x * y),
    "neg": lambda operands, *_: (-operands[0][1], -operands[0][0]),
    "remainder": _remainder,
    "fmod": _fmod,
    "floor_divide": _divided,
    "div": _divided,
    **dict.fromkeys(("bitwise_and", "__and__"), _and),
    **dict.fromkeys(("bitwise_or", "__or__", "bitwise_xor", "__xor__"), _or),
    "bitwise_not": lambda operands, *_: (-operands[0][1] - 1, -operands[0][0] - 1),
    **dict.fromkeys(("bitwise_left_shift", "__lshift__"), _left),
    **dict.fromkeys(("bitwise_right_shift", "__rshift__"), _right),
    "pow": _power,
    "square": lambda operands, *_: _power([operands[0], (2, 2)], None, {}),
    "sum": _summed,
    "cumsum": _cumulated,
    "abs": _absolute,
    **dict.fromkeys(("sign", "sgn"), lambda *_: (-1, 1)),
    "arange": _from_to,
    **dict.fromkeys(
        ("zeros", "zeros_like", "new_zeros", "zero", "empty", "empty_like", "new_empty"), lambda *_: (0, 0)
    ),
    **dict.fromkeys(("empty_permuted", "empty_strided", "new_empty_strided"), lambda *_: (0, 0)),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), lambda *_: (1, 1)),
    **dict.fromkeys(("eye", "one_hot"), lambda *_: (0, 1)),
    **dict.fromkeys(("full", "full_like"), _filled(1)),
    "new_full": _filled(2),
    "scalar_tensor": _filled(0),
    "randint": lambda operands, *_: (0 if len(operands) < 3 else operands[0][0], operands[len(operands) - 2][1]),
}
"""From the ranges of the arguments, the number of summed elements and the keyword arguments to the result's range."""
