"""Gradients of parameters as partial sums, one for each group of a micro-batch's rows.

The gradient of a matrix is a sum over rows. On a mesh that shards them, the compiler adds the sums of all devices as
soon as it has them. Partial sums instead have a leading axis, one entry per group, and stay on the devices of the group
until the caller adds them: PyTorch's `no_sync`.

A parameter is passed as `Partial`: its value and zeros that stand for the partial sums. Where a product, a sum
or a lookup uses it, the gradient flows to the zeros, group by group. Every other use has its gradient summed as before,
and divided among the groups' sums.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun
from jax.sharding import PartitionSpec as P

from jaxtrain.passes.fp8.fp8_product import NAME as FP8_PRODUCT
from jaxtrain.passes.fp8.fp8_product import Product
from jaxtrain.passes.marks import DIVIDED_LOOKUP, GATHERED_COPY
from jaxtrain.passes.mesh.gradient_groups import Groups, Partial
from jaxtrain.passes.mesh.window_sums import LastPartial, is_partial
from jaxtrain.passes.numerics.biased_product import NAME as BIASED_PRODUCT
from jaxtrain.passes.numerics.biased_product import biased_product
from jaxtrain.passes.numerics.recompute import Gradient, gradient_on_gpu
from jaxtrain.program import equations, rewrite
from jaxtrain.program import operations as op
from jaxtrain.program.follow import follow, is_followed, used
from jaxtrain.program.internals import manual_axes


def partial_gradients(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function `compute(params, …)` take parameters that are `Partial` or `LastPartial`.

    Args:
      compute: The function.

    Returns:
      The same function. Without any such parameter, `compute` itself is called.

    Example:
      >>> def compute(w, x):
      ...     return (x @ w).sum()
      >>> def by_group(sums, w, x):
      ...     return partial_gradients(compute)(Partial(w, sums, Groups(("data",), (2,))), x)
      >>> x, w = jnp.array([[1.0], [2.0], [4.0], [8.0]]), jnp.ones((1, 1))
      >>> jax.grad(by_group)(jnp.zeros((2, 1, 1)), w, x).ravel().tolist(), jax.grad(compute)(w, x).item()
      ([3.0, 12.0], 15.0)
    """

    def computed(params: Any, *rest: Any) -> Any:
        leaves, structure = jax.tree.flatten(params, is_leaf=is_partial)
        if not any(map(is_partial, leaves)):
            return compute(params, *rest)

        def evaluate(closed: ClosedJaxpr, values: list[Any]) -> list[Any]:
            given = [
                x.sliced() if isinstance(x, LastPartial) and not x.is_scanned(closed.jaxpr, v) else x
                for x, v in zip(leaves, closed.jaxpr.invars, strict=False)
            ]
            return evaluate_by_group(closed, [*given, *values[len(leaves) :]], row_counts(rest[:1]))

        values = [*map(_value, leaves)]
        return rewrite.retrace(compute, evaluate)(jax.tree.unflatten(structure, values), *rest)

    return computed


def evaluate_by_group(closed: ClosedJaxpr, args: Sequence[Any], counts: Collection[int]) -> list[Any]:
    """Evaluate a program, some of whose arguments are `Partial`, for a batch with these sizes of first axes."""
    return follow(_rule(counts))(closed.jaxpr, closed.consts, args)


def row_counts(batch: Any) -> set[int]:
    """Return the sizes of the first axes of a batch's arrays."""
    return {x.shape[0] for x in jax.tree.leaves(batch) if x.ndim}


_SUMS = frozenset({op.ADD, op.SUB})
CONVOLUTION = op.CONV_GENERAL_DILATED


def _rule(counts: Collection[int]) -> rewrite.Rule:
    """Return the rule for a batch of which arrays have these numbers of rows."""

    def rule(eqn: JaxprEqn, args: list[Any], run: rewrite.Run) -> Sequence[Any] | None:
        name = op.of(eqn)
        is_lookup = equations.is_call(eqn, DIVIDED_LOOKUP)
        if equations.is_call(eqn, GATHERED_COPY):
            x, copy = args
            sums = {"sums": lax.convert_element_type(x.sums, copy.dtype)} if isinstance(x, Partial) else {}
            return [replace(x, value=copy, **sums)]
        if name == op.SHARD_MAP:
            return _shard_map(eqn, args, run)
        if (name in op.FUNCTIONS and not is_lookup) or name == op.SCAN:
            return None
        groups, *others = {x.groups.size: x.groups for x in args if is_followed(x)}.values()
        if name == FP8_PRODUCT and not others and _has_rows(args[0], groups):
            return [_fp8_by_group(eqn, args, groups)]
        on_gpu = gradient_on_gpu(eqn)
        if not others and on_gpu is not None and _are_vectors_by_row(args, groups):
            return [_recomputed_by_group(eqn, args, on_gpu, groups)]
        if not others and (rows := _row_axes(eqn, args, counts)) and rows.size % groups.size == 0:
            return [_by_group(eqn, args, rows, groups)]
        return rewrite.apply(eqn, [*map(used, args)], run) if is_lookup else None

    return rule


def _shard_map(eqn: JaxprEqn, args: list[Any], run: rewrite.Run) -> list[Any]:
    """Compute each group with its own copy of a parameter, the gradients of which are the partial sums."""
    body, manual, given = equations.body(eqn), manual_axes(eqn), equations.shard_map_options(eqn)
    specs, options = [*given.in_specs], {"mesh": given.mesh, "axis_names": manual}
    copied = set()
    for i, x in enumerate(args):
        if is_followed(x) and not (axes := {*x.groups.axes}) & _axes(specs[i]) and axes <= manual:
            spec, specs[i] = specs[i], P(x.groups.axes or None, *specs[i])
            copy = jax.shard_map(lambda x: x[None], in_specs=(spec,), out_specs=specs[i], check_vma=False, **options)
            args[i] = _copies(x, copy)
            copied.add(i)
        else:
            args[i] = used(x)

    def of_device(*values: Any) -> tuple[Any, ...]:
        return tuple(run(body, (), [x[0] if i in copied else x for i, x in enumerate(values)]))

    options |= {"out_specs": given.out_specs, "check_vma": given.check_vma}
    return list(jax.shard_map(of_device, in_specs=tuple(specs), **options)(*args))


def _axes(spec: P) -> set[str]:
    return {axis for axes in spec for axis in ((axes,) if isinstance(axes, str) else axes or ())}


def _copies(x: Partial, copy: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Return a copy of a parameter for each group, [groups, …]."""

    @jax.custom_vjp
    def copies(value: jax.Array, sums: jax.Array) -> jax.Array:
        del sums
        return copy(value)

    copies.defvjp(lambda value, sums: (copy(value), None), lambda _, gradient: (None, gradient))
    return copies(x.value, x.sums)


class _Rows(NamedTuple):
    """The axes of an equation's operands and of its result that are the same rows.

    Attributes:
      operands: The axis by the operand's position.
      result: The axis of the result.
      size: Their size.
    """

    operands: Mapping[int, int]
    result: int
    size: int


def _row_axes(eqn: JaxprEqn, args: list[Any], counts: Collection[int]) -> _Rows | None:
    """Return the rows of a product, a lookup or a broadcast; None if the gradient of its parameters sums none."""
    partial = [i for i, x in enumerate(args) if is_followed(x)]
    operation, result = _operation(eqn), eqn.outvars[0].aval
    if op.of(eqn) in (*_SUMS, op.MUL) and len(partial) == 1:
        (i,) = partial
        if args[i].value.ndim and args[i].value.shape[0] == 1 < result.shape[0]:  # type: ignore[attr-defined]
            return _Rows({1 - i: 0}, 0, result.shape[0])  # type: ignore[attr-defined]
        return None
    if op.of(operation) in (op.DOT_GENERAL, BIASED_PRODUCT) and (0 in partial) != (1 in partial):
        (contracted, batch) = equations.contraction(operation)
        of, shapes = (1 if 0 in partial else 0), [v.aval.shape for v in operation.invars[:2]]  # type: ignore[attr-defined]
        free = [[i for i in range(len(shapes[j])) if i not in (*contracted[j], *batch[j])] for j in (0, 1)]
        if not free[of]:
            return None
        axis = len(batch[0]) + (0 if of == 0 else len(free[0]))
        return _Rows({of: free[of][0]}, axis, shapes[of][free[of][0]])
    if op.of(eqn) == CONVOLUTION and partial == [1] and equations.window(eqn).batch_groups == 1:
        numbers = equations.contraction(eqn)
        return _Rows({0: numbers.lhs_spec[0]}, numbers.out_spec[0], args[0].shape[numbers.lhs_spec[0]])
    if op.of(operation) == op.GATHER and partial == [0]:
        numbers = equations.contraction(operation)
        rows = [i for i in range(result.ndim) if i not in numbers.offset_dims]  # type: ignore[attr-defined]
        # Positions, or pairs of them, are not rows.
        if rows and not numbers.operand_batching_dims and args[1].shape[0] in counts:
            return _Rows({1: 0}, rows[0], args[1].shape[0])
    return None


def _operation(eqn: JaxprEqn) -> JaxprEqn:
    """Return the biased product within its custom_jvp, and the lookup within its call; other equations as they are."""
    if equations.is_call(eqn, DIVIDED_LOOKUP):
        # A custom_jvp contains the lookup of a table in 16 bits.
        return next(e for e in equations.within(eqn) if op.of(e) == op.GATHER)
    if op.of(eqn) == op.CUSTOM_JVP_CALL:
        inner = equations.sole(equations.body(eqn))
        if inner is not None and op.of(inner) == BIASED_PRODUCT:
            return inner
    return eqn


def _apply(eqn: JaxprEqn, args: Sequence[Any], in_group: bool = False) -> Any:
    """Apply a product or a lookup to all rows, or to those of a group."""
    operation = _operation(eqn)
    if equations.is_call(eqn, DIVIDED_LOOKUP) and in_group:
        body = equations.body(eqn)
        return rewrite.interpret(body.jaxpr, body.consts, args, _without_constraints)[0]
    if op.of(operation) == BIASED_PRODUCT:
        x, kernel, bias = args
        return biased_product(x, kernel, bias, equations.contraction(operation))
    return rewrite.bind(eqn, args)[0]


def _without_constraints(eqn: JaxprEqn, args: list[Any], run: rewrite.Run) -> list[Any] | None:
    del run
    return args if op.of(eqn) == op.SHARDING_CONSTRAINT else None


def _by_group(eqn: JaxprEqn, args: list[Any], rows: _Rows, groups: Groups) -> Any:
    """Apply an equation to the parameters' values; the gradient by them flows to their partial sums."""
    params = [i for i, x in enumerate(args) if is_followed(x)]
    others = [i for i, x in enumerate(args) if i not in params and jnp.issubdtype(x.dtype, np.inexact)]

    def call(values: Sequence[Any], positions: Sequence[int], replaced: Sequence[Any], in_group: bool = False) -> Any:
        new = dict(zip(positions, replaced, strict=True))
        return _apply(eqn, [new.get(i, x) for i, x in enumerate(values)], in_group)

    @jax.custom_vjp
    def apply(values: list[Any], sums: list[Any]) -> Any:
        del sums
        return call(values, (), ())

    # The gradient of a sum needs no operand, only their shapes.
    shapes = [(x.shape, x.dtype) for x in map(_value, args)]
    is_sum = op.of(eqn) in _SUMS

    def forward(values: list[Any], sums: list[Any]) -> tuple[Any, list[Any]]:
        return apply(values, sums), [] if is_sum else values

    def backward(values: list[Any], gradient: Any) -> tuple[list[Any], list[Any]]:
        values = values or [jnp.zeros(*shape) for shape in shapes]

        def of_group(operands: Sequence[Any], gradient: Any) -> tuple[Any, ...]:
            in_group = [operands[split.index(i)] if i in split else x for i, x in enumerate(values)]
            _, pull_back = jax.vjp(lambda *x: call(in_group, params, x, True), *(values[i] for i in params))
            return tuple(pull_back(gradient))

        split = [*rows.operands]
        if op.of(eqn) == CONVOLUTION:
            sums = [_convolution_sums(eqn, values, gradient, rows, groups)]
        else:
            in_groups = [_split(values[i], axis, groups) for i, axis in rows.operands.items()]
            mapped = jax.vmap(of_group, spmd_axis_name=groups.axes)
            sums = [*mapped(in_groups, _split(gradient, rows.result, groups))]
        of_values: list[Any] = [None] * len(values)
        _, pull_back = jax.vjp(lambda *x: call(values, others, x), *(values[i] for i in others))
        for i, of_operand in zip(others, pull_back(gradient), strict=True):
            of_values[i] = of_operand
        return of_values, [groups.shard(x) for x in sums]

    apply.defvjp(forward, backward)
    return apply([*map(_value, args)], [args[i].sums for i in params])


def _has_rows(x: Any, groups: Groups) -> bool:
    """Return whether groups divide the rows of an operand that is no parameter."""
    return not is_followed(x) and x.shape[0] % groups.size == 0


def _fp8_by_group(eqn: JaxprEqn, args: Sequence[Any], groups: Groups) -> Any:
    """Multiply in 8 bits; the scales are those of all rows, and only the gradients by parameters are by group."""
    x, *params = args
    values = [*map(_value, params)]
    product = Product.of([x, *values], **equations.params(eqn), split=lambda x: _split(x, 0, groups))

    @jax.custom_vjp
    def apply(x: jax.Array, values: list[Any], sums: list[Any]) -> Any:
        del sums
        return rewrite.bind(eqn, [x, *values])[0]

    def backward(residuals: Any, gradient: Any) -> tuple[Any, list[Any], list[Any]]:
        of_x, *sums = product.backward(residuals, gradient)
        end = product.n_differentiated - 1  # the others are scales and the kernel in 8 bits
        of_values = [None if is_followed(p) else s.sum(0) for p, s in zip(params[:end], sums[:end], strict=True)]
        of_values += sums[end:]
        return of_x, of_values, [groups.shard(s) for p, s in zip(params, sums, strict=True) if is_followed(p)]

    apply.defvjp(lambda x, values, sums: product.forward(x, *values), backward)
    return apply(x, values, [p.sums for p in params if is_followed(p)])


def _convolution_sums(eqn: JaxprEqn, values: Sequence[Any], gradient: Any, rows: _Rows, groups: Groups) -> jax.Array:
    """Return the gradient of a convolution's kernel by group. Batched, it would be a convolution of other layouts."""
    images, kernel = values

    def of_group(images: jax.Array, gradient: jax.Array) -> jax.Array:
        (of_kernel,) = jax.linear_transpose(lambda kernel: rewrite.bind(eqn, [images, kernel])[0], shape)(gradient)
        return jnp.asarray(of_kernel)

    shape = jax.ShapeDtypeStruct(kernel.shape, kernel.dtype)
    return groups.each(of_group, (rows.operands[0], rows.result))(images, gradient)


def _are_vectors_by_row(args: Sequence[Any], groups: Groups) -> bool:
    """Return whether all arguments but the first are parameters, each the same for all rows of the first."""
    x, *vectors = args
    return all(is_followed(v) and v.value.shape[0] == 1 for v in vectors) and _has_rows(x, groups)


def _recomputed_by_group(eqn: JaxprEqn, args: Sequence[Any], on_gpu: Gradient, groups: Groups) -> Any:
    """Apply a function marked by `recomputed`, such as a norm, whose gradients GPUs compute group by group."""
    fn = jaxpr_as_fun(equations.body(eqn))

    @jax.custom_vjp
    def apply(x: jax.Array, vectors: list[jax.Array], sums: list[jax.Array]) -> Any:
        del sums
        return fn(x, *vectors)[0]

    def by_group(x: jax.Array, gradient: jax.Array, *vectors: jax.Array) -> tuple[jax.Array, ...]:
        mapped = jax.vmap(lambda x, gradient: tuple(on_gpu(x, *vectors, gradient)), spmd_axis_name=groups.axes)
        of_x, *sums = mapped(_split(x, 0, groups), _split(gradient, 0, groups))
        return of_x.reshape(x.shape), *map(groups.shard, sums)

    def by_all(x: jax.Array, gradient: jax.Array, *vectors: jax.Array) -> tuple[jax.Array, ...]:
        of_x, *of_vectors = jax.vjp(fn, x, *vectors)[1]([gradient])
        return of_x, *map(groups.place, of_vectors)

    def backward(operands: Any, gradient: jax.Array) -> tuple[Any, None, list[jax.Array]]:
        x, vectors = operands
        of_x, *sums = lax.platform_dependent(x, gradient, *vectors, cuda=by_group, rocm=by_group, default=by_all)
        return of_x, None, sums

    apply.defvjp(lambda x, vectors, sums: (fn(x, *vectors)[0], (x, vectors)), backward)
    return apply(args[0], [v.value for v in args[1:]], [v.sums for v in args[1:]])


def _split(x: jax.Array, axis: int, groups: Groups) -> jax.Array:
    """Split an axis into groups, which become the first axis."""
    shape = (*x.shape[:axis], groups.size, x.shape[axis] // groups.size, *x.shape[axis + 1 :])
    return groups.shard(jnp.moveaxis(x.reshape(shape), axis, 0))


def _value(x: Any) -> Any:
    return x.value if is_followed(x) else x
