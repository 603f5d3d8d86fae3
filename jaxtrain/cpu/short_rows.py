"""Compute elementwise operations on arrays with short rows as on vectors; other backends are unaffected.

XLA:CPU vectorizes the last axis of an elementwise operation. PyTorch's weights of convolutions, [out, in, 3, 3], have
rows of three elements: AdamW's update of [512, 512, 3, 3] takes 8 ms on two cores, that of [3, 3, 512, 512] 2.4, and so
does that of the same weights as a vector.

XLA moves reshapes into the operations around them, which have short rows again, and removes `lax.optimization_barrier`
before it does. It moves none across a loop. The loop here never runs, which the compiler cannot know, and it copies
nothing.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from jaxtrain.program import equations, rewrite
from jaxtrain.program import operations as op

SHORT, FEW = 16, 2**12
"""Elements of a row that is short, and of an array that is too small to be worth it."""
_ELEMENTWISE = op.ELEMENTWISE | {op.CONVERT_ELEMENT_TYPE, op.COPY}


def as_vectors(fn: Callable[..., Any], zero: jax.Array, platform: str | None = None) -> Callable[..., Any]:
    """Let a function that is compiled for a CPU compute on its arrays with short rows as on vectors.

    Args:
      fn: The function, elementwise for the most part, such as an optimizer's update.
      zero: The integer 0, computed such that the compiler does not know its value.
      platform: The platform that it is compiled for; None for that of the default backend.

    Returns:
      A function with the same values and shapes.

    >>> weight = jnp.ones((64, 64, 3, 3))
    >>> as_vectors(lambda x: 2 * x, jnp.zeros([], int))(weight).shape
    (64, 64, 3, 3)
    """

    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        is_on_a_cpu = (platform or jax.default_backend()) == "cpu"
        if not is_on_a_cpu or not any(map(_has_short_rows, jax.tree.leaves(args))):
            return fn(*args)
        return _separated(rewrite.transform(fn, _on_vectors)(*_separated(args, zero)), zero)

    return call


def _has_short_rows(x: Any) -> bool:
    return x.ndim > 1 and x.shape[-1] < SHORT and math.prod(x.shape) >= FEW


def _separated(tree: Any, zero: jax.Array) -> Any:
    """Return the same values, behind a loop over their vectors that never runs."""
    leaves, structure = jax.tree.flatten(tree)
    short = [i for i, x in enumerate(leaves) if _has_short_rows(x) and jnp.issubdtype(x.dtype, jnp.floating)]

    def changed(carry: tuple[jax.Array, list[jax.Array]]) -> tuple[jax.Array, list[jax.Array]]:
        return carry[0] + 1, [x + 1 for x in carry[1]]

    vectors = [leaves[i].reshape(-1) for i in short]
    _, vectors = lax.while_loop(lambda carry: carry[0] < zero, changed, (jnp.zeros_like(zero), vectors))
    for i, vector in zip(short, vectors, strict=True):
        leaves[i] = vector.reshape(leaves[i].shape)
    return jax.tree.unflatten(structure, leaves)


def _on_vectors(eqn: JaxprEqn, args: list[Any], run: rewrite.Run) -> Sequence[Any] | None:
    """Rewrite elementwise operations on arrays with short rows, and sums of all their elements."""
    del run
    name = op.of(eqn)
    out: Any = eqn.outvars[0].aval if eqn.outvars else None
    if name in _ELEMENTWISE and _has_short_rows(out):
        (result,) = rewrite.bind(eqn, [x.reshape(-1) if jnp.ndim(x) else x for x in args])
        return [result.reshape(out.shape)]
    if name == op.BROADCAST_IN_DIM and not jnp.ndim(args[0]) and _has_short_rows(out):
        return [lax.broadcast(args[0], (math.prod(out.shape),)).reshape(out.shape)]
    if name == op.REDUCE_SUM and _has_short_rows(args[0]) and len(equations.axes(eqn)) == args[0].ndim:
        return [args[0].reshape(-1).sum()]
    return None
