"""Reduce what a scan over layers saves for its backward pass on a GPU.

A scan copies every value that its backward pass needs into an array for all layers, which is filled with zeros first,
and out of it again. On a GPU this takes longer than to compute the results of cheap operations again: activation
functions, norms, conversions. Unrolled layers save them without a copy.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, jaxpr_as_fun

from jaxtrain.passes.fp8.scales import CAST
from jaxtrain.passes.memory.remat import BLOCK, names_costly
from jaxtrain.program import equations, rewrite
from jaxtrain.program import operations as op
from jaxtrain.program.platform import transform_on_gpu

CHEAP = op.ELEMENTWISE | {
    *(op.BITCAST_CONVERT_TYPE, op.CONVERT_ELEMENT_TYPE, op.COPY, op.IOTA, op.NAME, op.STOP_GRADIENT),
    *(op.BROADCAST_IN_DIM, op.CONCATENATE, op.PAD, op.RESHAPE, op.SLICE, op.SQUEEZE, op.STACK, op.TRANSPOSE),
    *(op.REDUCE_AND, op.REDUCE_MAX, op.REDUCE_MIN, op.REDUCE_OR, op.REDUCE_SUM),
    *(op.RANDOM_BITS, op.RANDOM_FOLD_IN, op.RANDOM_SPLIT, op.RANDOM_UNWRAP, op.RANDOM_WRAP, op.THREEFRY2X32),
    *(op.SHIFT_LEFT, op.SHIFT_RIGHT_LOGICAL, CAST),
}
"""Primitives whose results are computed again: limited by the bandwidth, or without a launch of their own.

"split" is not one of them: its parts are as large as its operand, and on a mesh it may communicate."""

SMALL_TABLE = 2**16
"""Elements of a table that stays in the cache, so that lookups in it are cheap: quantized kernels are looked up."""


def costly(primitive: Any, *args: Any, **params: Any) -> bool:
    """Save the results of all operations but the cheap ones, as a policy of `jax.checkpoint`."""
    if primitive.name == op.GATHER and args and args[0].size <= SMALL_TABLE:
        return False
    called = params.get("call_jaxpr" if primitive.name.startswith("custom_") else "jaxpr")
    if primitive.name in (*op.CUSTOM, *op.CALLS):
        return any(equations.saves(costly, eqn) for eqn in equations.of(called))
    return primitive.name not in CHEAP or names_costly(primitive, params)


def save_costly(fn: Callable[..., Any], platform: str | None = None) -> Callable[..., Any]:
    """Checkpoint the marked blocks of scans, so that they save the results of costly operations only.

    Args:
      fn: A function of arrays.
      platform: The platform that it is compiled for; None for that of the default backend.

    Returns:
      The same function on a GPU, whose scans save less. On any other platform, `fn`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxtrain import block
      >>> def layers(x, ws):
      ...     return jax.lax.scan(lambda x, w: (block(lambda x: jnp.tanh(x @ w) + x)(x), None), x, ws)[0].sum()
      >>> arguments = jnp.ones((2, 2)), jnp.ones((3, 2, 2))
      >>> [str(jax.make_jaxpr(save_costly(layers, p))(*arguments)).count("policy=") for p in ("cpu", "gpu")]
      [0, 1]
    """

    return transform_on_gpu(fn, _in_scans(_checkpoint_block, _is_block), platform, _is_block)


def fuse_slices(fn: Callable[..., Any], platform: str | None = None) -> Callable[..., Any]:
    """Let the kernels that recompute an activation in a scan read their slices of the saved arrays.

    The barrier that JAX puts before the inputs of a checkpoint makes XLA copy a slice first. Without any, XLA would
    merge the two computations of an activation, for the product that uses it and for its derivative, and write what
    they share in float32. A factor of one that XLA does not know keeps them apart in the same kernel.

    Args:
      fn: A function of arrays.
      platform: The platform that it is compiled for; None for that of the default backend.

    Returns:
      The same function on a GPU, whose activations in scans have only a reverse-mode derivative. On any other
      platform, `fn`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxtrain.passes import recomputed
      >>> def layers(x):
      ...     return jax.lax.scan(lambda x, _: (recomputed(jnp.sin)(x), None), x, length=3)[0]
      >>> x = jnp.ones(2, jnp.bfloat16)
      >>> [str(jax.make_jaxpr(fuse_slices(layers, p))(x)).count("custom_vjp_call") for p in ("cpu", "gpu")]
      [0, 1]
    """

    return transform_on_gpu(fn, _in_scans(_keep_apart, _is_activation), platform, _is_activation)


def _in_scans(rule: rewrite.Rule, where: rewrite.Where) -> rewrite.Rule:
    """Return a rule that applies another one inside scans."""

    def in_scan(body: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        return rewrite.interpret(body, consts, args, rule, where)

    def of_scan(eqn: JaxprEqn, args: list[Any], run: rewrite.Run) -> Sequence[Any] | None:
        del run
        is_changed = op.of(eqn) == op.SCAN and any(map(where, equations.within(eqn)))
        return rewrite.HIGHER_ORDER[op.SCAN](eqn, args, in_scan) if is_changed else None

    return of_scan


def _is_activation(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a checkpoint of cheap operations, apart from their forward pass."""
    if not _is_checkpoint(eqn) or not equations.prevents_cse(eqn):
        return False
    are_real = all(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in eqn.invars)  # type: ignore[attr-defined]
    return are_real and all(map(is_cheap, equations.of(equations.body(eqn))))


def _keep_apart(eqn: JaxprEqn, args: list[Any], run: rewrite.Run) -> Sequence[Any] | None:
    del run
    if not _is_activation(eqn):
        return None
    body = equations.body(eqn)

    def evaluate(*inner: jax.Array) -> list[jax.Array]:
        return rewrite.interpret(body, (), inner, _inline_checkpoints)

    @jax.custom_vjp
    def activation(*inner: jax.Array) -> list[jax.Array]:
        return evaluate(*inner)

    def backward(saved: Sequence[jax.Array], cotangents: list[jax.Array]) -> tuple[jax.Array, ...]:
        one = jax.lax.optimization_barrier(jnp.ones([], jnp.bfloat16))
        _, pullback = jax.vjp(evaluate, *(x * one.astype(x.dtype) for x in saved))
        return pullback(cotangents)

    activation.defvjp(lambda *inner: (activation(*inner), inner), backward)
    return activation(*args)


def _inline_checkpoints(eqn: JaxprEqn, args: list[Any], run: rewrite.Run) -> Sequence[Any] | None:
    return run(equations.body(eqn), (), args) if _is_checkpoint(eqn) else None


def _is_checkpoint(eqn: JaxprEqn) -> bool:
    return op.of(eqn) in op.CHECKPOINTS


def is_cheap(eqn: JaxprEqn) -> bool:
    """Return whether an equation and all equations in its parameters are cheap."""
    if inner := equations.inner_jaxprs(eqn):
        return all(is_cheap(x) for part in inner for x in equations.of(part))
    return op.of(eqn) != op.GATHER and not equations.saves(costly, eqn)


def _is_block(eqn: JaxprEqn) -> bool:
    return equations.is_call(eqn, BLOCK)


def _checkpoint_block(eqn: JaxprEqn, args: list[Any], run: rewrite.Run) -> Sequence[Any] | None:
    del run
    if not _is_block(eqn):
        return None
    inner = jaxpr_as_fun(equations.body(eqn))
    # The bodies of the two loops share no computation that XLA could merge.
    return list(jax.checkpoint(inner, policy=costly, prevent_cse=False)(*args))
