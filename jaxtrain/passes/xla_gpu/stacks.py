"""Allocate the stacked outputs of scans on a GPU without a fill.

`lax.scan` writes the outputs of its steps into arrays that it fills with zeros first. In a training step these are
every value that the backward pass needs, and every gradient of scanned parameters. As each element is written
before it is read, `lax.empty` takes the place of the zeros. On a mesh, whose partitioner would allocate the whole array
on each device, the fill stays.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Primitive, jaxpr_as_fun
from jax.interpreters import mlir

from jaxtrain.program import equations, internals, rewrite
from jaxtrain.program import operations as op
from jaxtrain.program.platform import transform_on_gpu


def unfilled_stacks(fn: Callable[..., Any], platform: str | None = None) -> Callable[..., Any]:
    """Rewrite the scans of a function, so that they do not fill their outputs. To be applied after differentiation.

    Args:
      fn: A function of arrays, not to be differentiated any more.
      platform: The platform that it is compiled for; None for that of the default backend.

    Returns:
      The same function on a GPU, whose scans carry the arrays of their outputs. On any other platform, `fn`.

    Example:
      >>> import jax.numpy as jnp
      >>> def squares(xs):
      ...     return lax.scan(lambda carry, x: (carry, x * x), 0, xs)[1]
      >>> [str(jax.make_jaxpr(unfilled_stacks(squares, p))(jnp.ones(3))).count("unfilled[") for p in ("cpu", "gpu")]
      [0, 1]
    """
    return transform_on_gpu(fn, _rule, platform)


def _rule(eqn: JaxprEqn, args: list[Any], run: rewrite.Run) -> Sequence[Any] | None:
    del run
    if op.of(eqn) == op.SCAN:
        return _carry_outputs(eqn, args)
    # Nothing else is rebuilt: a differentiated checkpoint would lose its barriers.
    is_jit = op.of(eqn) in op.CALLS
    return None if is_jit and any(map(_has_scan, equations.inner_jaxprs(eqn))) else rewrite.bind(eqn, args)


def _has_scan(traced: Jaxpr) -> bool:
    return any(op.of(eqn) == op.SCAN for eqn in equations.visit(traced))


def _carry_outputs(eqn: JaxprEqn, args: list[Any]) -> list[Any]:
    """Evaluate a scan whose outputs are part of its carry."""
    body, length, reverse = equations.body(eqn), equations.trip_count(eqn), equations.is_reversed(eqn)
    consts, init, xs = equations.scan_operands(eqn, args)
    n_carry = len(init)
    evaluate = jaxpr_as_fun(body)

    def step(state: Any, _: None) -> tuple[Any, None]:
        i, carry, stacks = state
        slices = (lax.dynamic_index_in_dim(x, i, keepdims=False, allow_negative_indices=False) for x in xs)
        outs = evaluate(*consts, *carry, *slices)
        written = [
            lax.dynamic_update_index_in_dim(stack, y, i, 0, allow_negative_indices=False)
            for stack, y in zip(stacks, outs[n_carry:], strict=True)
        ]
        return (i - 1 if reverse else i + 1, outs[:n_carry], written), None

    stacks = [_unfilled.bind(shape=(length, *aval.shape), dtype=aval.dtype) for aval in body.out_avals[n_carry:]]
    first = jnp.asarray(length - 1 if reverse else 0, np.int32)
    (_, carry, ys), _ = lax.scan(
        step, (first, [*init], stacks), length=length, unroll=equations.loop_options(eqn)["unroll"]
    )
    return [*carry, *ys]


def _lower_on_a_gpu(ctx: Any, *, shape: tuple[int, ...], dtype: Any) -> Any:
    allocate = lax.empty if internals.is_for_one_device(ctx) else jnp.zeros
    return mlir.lower_fun(allocate, multiple_results=False)(ctx, shape=shape, dtype=dtype)


_unfilled = Primitive("unfilled")
_unfilled.def_abstract_eval(lambda *, shape, dtype: jax.core.ShapedArray(shape, dtype))
_unfilled.def_impl(jnp.zeros)
mlir.register_lowering(_unfilled, mlir.lower_fun(jnp.zeros, multiple_results=False))
for _platform in ("cuda", "rocm"):
    mlir.register_lowering(_unfilled, _lower_on_a_gpu, platform=_platform)
