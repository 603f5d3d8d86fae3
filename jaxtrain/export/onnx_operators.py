"""Conversion of JAX primitives to ONNX operators.

`OPERATORS[primitive](graph, equation, inputs)` adds nodes to the graph and returns the outputs of the equation. The
operators are those of the ONNX specification, opset 18, https://onnx.ai/onnx/operators.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jaxtrain.errors import UserError
from jaxtrain.export.onnx_graph import Graph, Value, constant, element_type, integers
from jaxtrain.program import equations
from jaxtrain.program import operations as op

Operator = Callable[[Graph, JaxprEqn, Sequence[Value]], list[Value]]


def _elementwise(operator: str, graph: Graph, eqn: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    del eqn
    return [graph.node(operator, *inputs, unexpanded=all(x.unexpanded for x in inputs))]


def _negate(operator: str, graph: Graph, eqn: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    return _elementwise("Not", graph, eqn, _elementwise(operator, graph, eqn, inputs))


def _compose(*operators: str) -> Operator:
    def apply(graph: Graph, eqn: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
        for operator in operators:
            inputs = _elementwise(operator, graph, eqn, inputs)
        return list(inputs)

    return apply


def _square(graph: Graph, eqn: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    return _elementwise("Mul", graph, eqn, [*inputs, *inputs])


def _integer_pow(graph: Graph, eqn: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    exponent = constant(np.array(eqn.params["y"], _aval(eqn.invars[0]).dtype), unexpanded=True)
    return _elementwise("Pow", graph, eqn, [*inputs, exponent])


def _log2(graph: Graph, eqn: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    per_octave = constant(np.array(1 / np.log(2), _aval(eqn.invars[0]).dtype), unexpanded=True)
    return _elementwise("Mul", graph, eqn, [*_elementwise("Log", graph, eqn, inputs), per_octave])


def _one_minus_square(graph: Graph, eqn: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    one = constant(np.ones([], _aval(eqn.invars[0]).dtype), unexpanded=True)
    sides = [_elementwise(operator, graph, eqn, [one, *inputs])[0] for operator in ("Add", "Sub")]
    return _elementwise("Mul", graph, eqn, sides)


def _polynomial(graph: Graph, eqn: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    """Convert by Horner's rule; the coefficients are those of ascending powers."""
    x, *coefficients, total = inputs
    for coefficient in reversed(coefficients):
        (product,) = _elementwise("Mul", graph, eqn, [total, x])
        (total,) = _elementwise("Add", graph, eqn, [product, coefficient])
    return [total]


def _erfc(graph: Graph, eqn: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    one = constant(np.ones([], _aval(eqn.invars[0]).dtype), unexpanded=True)
    return _elementwise("Sub", graph, eqn, [one, *_elementwise("Erf", graph, eqn, inputs)])


def _select(graph: Graph, eqn: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    which, *cases = inputs
    if which.array is not None and which.array.size == 1:
        return [cases[int(which.array.item())]]
    if len(cases) != 2 or _aval(eqn.invars[0]).dtype != np.bool_:
        raise unsupported(graph, eqn, "more than two cases")
    return _elementwise("Where", graph, eqn, [which, cases[1], cases[0]])


def _clamp(graph: Graph, eqn: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    low, x, high = inputs
    return _elementwise("Min", graph, eqn, [high, *_elementwise("Max", graph, eqn, [low, x])])


def _cast(graph: Graph, eqn: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    return [graph.node("Cast", *inputs, to=element_type(equations.dtype(eqn)), unexpanded=inputs[0].unexpanded)]


def _identity(graph: Graph, eqn: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    del graph, eqn
    return list(inputs)


def _reshape(graph: Graph, eqn: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    (x,) = _expand_all(graph, eqn, inputs)
    return [_reshape_to(graph, x, _aval(eqn.outvars[0]).shape)]


def _reshape_to(graph: Graph, x: Value, shape: Sequence[Any]) -> Value:
    unknown = [not isinstance(size, int) for size in shape]
    if sum(unknown) == 1:
        # ONNX infers one size. The others are not 0, which would mean "copy the input's size".
        return graph.node("Reshape", x, integers(*(-1 if u else s for u, s in zip(unknown, shape, strict=True))))
    return graph.node("Reshape", x, graph.shape(shape))


def _broadcast(graph: Graph, eqn: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    (x,) = inputs
    axes, rank = eqn.params["broadcast_dimensions"], len(eqn.params["shape"])
    if x.array is not None:
        sizes = dict(zip(axes, x.array.shape, strict=True)) if x.array.ndim else {}
        array = x.array.reshape([sizes.get(axis, 1) for axis in range(rank)])
        return [Value("", array, unexpanded=True)]
    added = [axis for axis in range(rank) if axis not in axes]
    return [graph.node("Unsqueeze", x, integers(*added), unexpanded=True) if added else Value(x.name, unexpanded=True)]


def _iota(graph: Graph, eqn: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    shape, axis = eqn.params["shape"], eqn.params["dimension"]
    if inputs or not isinstance(shape[axis], int):
        raise unsupported(graph, eqn, "iota along an axis of unknown size")
    count = np.arange(shape[axis], dtype=eqn.params["dtype"])
    return [constant(count.reshape([-1 if i == axis else 1 for i in range(len(shape))]), unexpanded=True)]


def _transpose(graph: Graph, eqn: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    return [graph.node("Transpose", *inputs, perm=equations.permutation(eqn), unexpanded=inputs[0].unexpanded)]


def _squeeze(graph: Graph, eqn: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    return [graph.node("Squeeze", *inputs, integers(*eqn.params["dimensions"]), unexpanded=inputs[0].unexpanded)]


def _concatenate(graph: Graph, eqn: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    return [graph.node("Concat", *_expand_all(graph, eqn, inputs), axis=eqn.params["dimension"])]


def _stack(graph: Graph, eqn: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    axis = eqn.params["axis"]
    rows = [graph.node("Unsqueeze", x, integers(axis)) for x in _expand_all(graph, eqn, inputs)]
    return [graph.node("Concat", *rows, axis=axis)]


def _unstack(graph: Graph, eqn: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    (x,), axis = _expand_all(graph, eqn, inputs), eqn.params["axis"]
    return [graph.node("Gather", x, constant(np.int64(i)), axis=axis) for i in range(len(eqn.outvars))]


def _split(graph: Graph, eqn: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    (x,) = _expand_all(graph, eqn, inputs)
    sizes = eqn.params["sizes"]
    return graph.node_with_outputs("Split", x, graph.shape(sizes), outputs=len(sizes), axis=eqn.params["axis"])


def _slice(graph: Graph, eqn: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    (x,) = _expand_all(graph, eqn, inputs)
    begin, end, by = (eqn.params[name] for name in ("start_indices", "limit_indices", "strides"))
    return [_slice_axes(graph, x, _aval(eqn.invars[0]).shape, begin, end, by or [1] * len(begin))]


def _slice_axes(
    graph: Graph, x: Value, shape: Sequence[Any], begin: Sequence[Any], end: Sequence[Any], by: Sequence[int]
) -> Value:
    cut = [i for i, (low, high) in enumerate(zip(begin, end, strict=True)) if (low, high, by[i]) != (0, shape[i], 1)]
    if not cut:
        return x
    bounds = (graph.shape([sizes[i] for i in cut]) for sizes in (begin, end))
    return graph.node("Slice", x, *bounds, integers(*cut), integers(*(by[i] for i in cut)))


def _pad(graph: Graph, eqn: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    x, fill = _expand_all(graph, eqn, inputs)
    low, high, between = zip(*eqn.params["padding_config"], strict=True)
    if any(between):
        raise unsupported(graph, eqn, "padding between elements")
    return [graph.node("Pad", x, graph.shape([*low, *high]), fill)]


def _reduce(operator: str, graph: Graph, eqn: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    (x,) = _expand_all(graph, eqn, inputs)
    return [graph.node(operator, x, integers(*eqn.params["axes"]), keepdims=0)]


def _reduce_bool(operator: str, graph: Graph, eqn: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    whole = graph.node("Cast", *_expand_all(graph, eqn, inputs), to=element_type(np.int32))
    reduced = graph.node(operator, whole, integers(*eqn.params["axes"]), keepdims=0)
    return [graph.node("Cast", reduced, to=element_type(np.bool_))]


def _argmax(operator: str, graph: Graph, eqn: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    (x,) = _expand_all(graph, eqn, inputs)
    (axis,) = eqn.params["axes"]
    found = graph.node(operator, x, axis=axis, keepdims=0)
    return [graph.node("Cast", found, to=element_type(eqn.params["index_dtype"]))]


def _top_k(graph: Graph, eqn: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    (x,) = _expand_all(graph, eqn, inputs)
    axis = eqn.params.get("axis", -1)
    values, places = graph.node_with_outputs("TopK", x, integers(eqn.params["k"]), outputs=2, axis=axis)
    return [values, graph.node("Cast", places, to=element_type(_aval(eqn.outvars[1]).dtype))]


def _dot_general(graph: Graph, eqn: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    """Transpose to [batch…, free, contracted] and [batch…, contracted, free], multiply, reshape."""
    (contracted, batches), out = equations.contraction(eqn), _aval(eqn.outvars[0])
    if len({out.dtype, *(_aval(v).dtype for v in eqn.invars)}) > 1:
        raise unsupported(graph, eqn, "result wider than its operands")
    sides = []
    for i, x in enumerate(_expand_all(graph, eqn, inputs)):
        shape = _aval(eqn.invars[i]).shape
        free = [axis for axis in range(len(shape)) if axis not in contracted[i] and axis not in batches[i]]
        groups = [list(batches[i]), *([free, list(contracted[i])] if i == 0 else [list(contracted[i]), free])]
        order = [axis for group in groups for axis in group]
        if order != [*range(len(shape))]:
            x = graph.node("Transpose", x, perm=order)
        if len(free) != 1 or len(contracted[i]) != 1:
            batch, *matrix = [[shape[axis] for axis in group] for group in groups]
            x = _reshape_to(graph, x, [*batch, *map(math.prod, matrix)])
        sides.append((x, len(free)))
    product = graph.node("MatMul", *(x for x, _ in sides))
    return [product if all(free == 1 for _, free in sides) else _reshape_to(graph, product, out.shape)]


def _conv(graph: Graph, eqn: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    params, dims = eqn.params, equations.contraction(eqn)
    if any(by != 1 for by in params["lhs_dilation"]) or params["batch_group_count"] != 1:
        raise unsupported(graph, eqn, "transposed convolution or gradient of a convolution")
    x, kernel = _expand_all(graph, eqn, inputs)
    taps = _aval(eqn.invars[1]).shape
    low, high = zip(*params["padding"], strict=True)
    if kernel.array is not None:
        kernel = Value(kernel.name, np.ascontiguousarray(kernel.array.transpose(dims.rhs_spec)))
    else:
        kernel = graph.node("Transpose", kernel, perm=dims.rhs_spec)
    y = graph.node(
        "Conv",
        graph.node("Transpose", x, perm=dims.lhs_spec),
        kernel,
        pads=[*low, *high],
        strides=params["window_strides"],
        dilations=params["rhs_dilation"],
        group=params["feature_group_count"],
        kernel_shape=[taps[axis] for axis in dims.rhs_spec[2:]],
    )
    return [graph.node("Transpose", y, perm=np.argsort(dims.out_spec).tolist())]


def _gather(graph: Graph, eqn: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    x, indices = _expand_all(graph, eqn, inputs)
    dims, sizes, shape = equations.contraction(eqn), eqn.params["slice_sizes"], _aval(eqn.invars[0]).shape
    # Out of bounds, JAX clips or fills; ONNX raises an error.
    if eqn.params["mode"] not in (lax.GatherScatterMode.PROMISE_IN_BOUNDS, lax.GatherScatterMode.CLIP):
        raise unsupported(graph, eqn, "fill value for indices out of bounds")
    indexed, batched = dims.start_index_map, dims.operand_batching_dims
    rest = [axis for axis in range(len(shape)) if axis not in indexed]
    if batched or any(sizes[axis] != shape[axis] for axis in rest):
        raise unsupported(graph, eqn, "parts of rows")
    if indices.array is not None and indices.array.ndim == 1:
        return [_window(graph, eqn, x, indices.array.tolist())]
    if any(sizes[axis] != 1 for axis in indexed):
        raise unsupported(graph, eqn, "several rows per index")
    rank = len(_aval(eqn.invars[1]).shape) - 1
    kept = [axis for axis in range(len(shape)) if axis not in dims.collapsed_slice_dims]
    place = dict(zip(kept, dims.offset_dims, strict=True))
    into = [i for i in range(rank + len(kept)) if i not in dims.offset_dims]
    if len(indexed) == 1:
        rows = graph.node("Gather", x, _column(graph, indices, rank), axis=indexed[0])
        before = sum(axis < indexed[0] for axis in rest)
        places = [*(place[axis] for axis in rest[:before]), *into, *(place[axis] for axis in rest[before:])]
    else:
        first = graph.node("Transpose", x, perm=[*indexed, *rest])
        rows = graph.node("GatherND", first, graph.node("Cast", indices, to=element_type(np.int64)))
        places = [*into, *(place[axis] for axis in rest)]
    if places != sorted(places):
        rows = graph.node("Transpose", rows, perm=np.argsort(places).tolist())
    ones = [place[axis] for axis in kept if axis in indexed]
    return [graph.node("Unsqueeze", rows, integers(*ones)) if ones else rows]


def _column(graph: Graph, indices: Value, axis: int) -> Value:
    if indices.array is not None:
        return constant(indices.array.squeeze(axis))
    return graph.node("Squeeze", indices, integers(axis))


def _dynamic_slice(graph: Graph, eqn: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    x, *start = _expand_all(graph, eqn, inputs)
    sizes, shape = eqn.params["slice_sizes"], _aval(eqn.invars[0]).shape
    begin = _constant_start(graph, eqn, start, shape, sizes)
    return [_slice_axes(graph, x, shape, begin, [at + n for at, n in zip(begin, sizes, strict=True)], [1] * len(shape))]


def _dynamic_update_slice(graph: Graph, eqn: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    x, update, *start = _expand_all(graph, eqn, inputs)
    shape, sizes = (_aval(v).shape for v in eqn.invars[:2])
    begin = _constant_start(graph, eqn, start, shape, sizes)
    axes = [axis for axis, size in enumerate(sizes) if size != shape[axis]]
    return [_replace(graph, x, update, {axis: (begin[axis], sizes[axis], shape[axis]) for axis in axes})]


def _replace(graph: Graph, x: Value, update: Value, parts: Mapping[int, tuple[int, Any, Any]]) -> Value:
    """Replace a part of `x`, given its start, its size and the size of the whole by axis."""
    if not parts:
        return update
    (axis, (start, size, whole)), *rest = parts.items()
    # Split raises an error for negative sizes, those of an update that is too long.
    sizes = graph.shape([start, size, whole - start - size])
    before, part, after = graph.node_with_outputs("Split", x, sizes, outputs=3, axis=axis)
    return graph.node("Concat", before, _replace(graph, part, update, dict(rest)), after, axis=axis)


def _constant_start(
    graph: Graph, eqn: JaxprEqn, start: Sequence[Value], shape: Sequence[Any], sizes: Sequence[Any]
) -> list[int]:
    """Return start indices that are known at export time, clamped as in JAX."""
    begin = [max(int(at.array), 0) for at in start if at.array is not None]
    if len(begin) < len(start):
        raise unsupported(graph, eqn, "start index known only at run time")
    limits = [whole - size for whole, size in zip(shape, sizes, strict=True)]
    if any(at and not isinstance(limit, int) for at, limit in zip(begin, limits, strict=True)):
        raise unsupported(graph, eqn, "start index other than 0 in an axis whose size is known only at run time")
    return [at and min(at, limit) for at, limit in zip(begin, limits, strict=True)]


def _size(graph: Graph, eqn: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    del inputs
    number = graph.node("Squeeze", graph.size(eqn.params["dim"]))
    return [graph.node("Cast", number, to=element_type(_aval(eqn.outvars[0]).dtype))]


def _window(graph: Graph, eqn: JaxprEqn, x: Value, start: Sequence[int]) -> Value:
    """Convert a gather at one constant index to a slice."""
    dims, sizes, shape = equations.contraction(eqn), eqn.params["slice_sizes"], _aval(eqn.invars[0]).shape
    begin = [0] * len(shape)
    for axis, at in zip(dims.start_index_map, start, strict=True):
        begin[axis] = at
    end = [at + size for at, size in zip(begin, sizes, strict=True)]
    cut = _slice_axes(graph, x, shape, begin, end, [1] * len(shape))
    collapsed = dims.collapsed_slice_dims
    return graph.node("Squeeze", cut, integers(*collapsed)) if collapsed else cut


def _expand_all(graph: Graph, eqn: JaxprEqn, inputs: Sequence[Value]) -> list[Value]:
    return [graph.expand(x, _aval(v).shape) for x, v in zip(inputs, eqn.invars, strict=True)]


def _aval(variable: Any) -> Any:
    return variable.aval


def unsupported(graph: Graph, eqn: JaxprEqn, why: str) -> UserError:
    """Return the error for an operation without a counterpart in ONNX, with its source line."""
    return UserError(f"{op.of(eqn)}{graph.line} cannot be exported to ONNX ({why}): export it as stablehlo")


OPERATORS: dict[str, Operator] = {
    **{
        primitive: partial(_elementwise, operator)
        for primitive, operator in {
            "abs": "Abs", "add": "Add", "and": "And", "ceil": "Ceil", "cos": "Cos", "div": "Div", "eq": "Equal",
            "erf": "Erf", "exp": "Exp", "floor": "Floor", "ge": "GreaterOrEqual", "gt": "Greater", "le": "LessOrEqual",
            "log": "Log", "logistic": "Sigmoid", "lt": "Less", "max": "Max", "min": "Min", "mul": "Mul", "neg": "Neg",
            "not": "Not", "or": "Or", "pow": "Pow", "sign": "Sign", "sin": "Sin", "sqrt": "Sqrt", "sub": "Sub",
            "tanh": "Tanh",
        }.items()
    },
    **dict.fromkeys(["copy", "name", "optimization_barrier", "stop_gradient"], _identity),
    "argmax": partial(_argmax, "ArgMax"),
    "argmin": partial(_argmax, "ArgMin"),
    "broadcast_in_dim": _broadcast,
    "clamp": _clamp,
    "concatenate": _concatenate,
    "conv_general_dilated": _conv,
    "convert_element_type": _cast,
    "dim_as_value": _size,
    "dot_general": _dot_general,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "erfc": _erfc,
    "gather": _gather,
    "integer_pow": _integer_pow,
    "iota": _iota,
    "log2": _log2,
    "ne": partial(_negate, "Equal"),
    "one_minus_square": _one_minus_square,
    "pad": _pad,
    "polynomial": _polynomial,
    "reduce_and": partial(_reduce_bool, "ReduceMin"),
    "reduce_max": partial(_reduce, "ReduceMax"),
    "reduce_min": partial(_reduce, "ReduceMin"),
    "reduce_or": partial(_reduce_bool, "ReduceMax"),
    "reduce_sum": partial(_reduce, "ReduceSum"),
    "reshape": _reshape,
    "rsqrt": _compose("Sqrt", "Reciprocal"),
    "select_n": _select,
    "slice": _slice,
    "split": _split,
    "square": _square,
    "squeeze": _squeeze,
    "stack": _stack,
    "top_k": _top_k,
    "transpose": _transpose,
    "unstack": _unstack,
}  # fmt: skip
"""The conversion of each primitive, by its name."""
