"""Compute a program of 32 bits in float64, except for its rounding to 8 bits, which is a part of its meaning."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jaxtrain.passes.fp8.fp8_product import NAME as FP8_PRODUCT
from jaxtrain.passes.fp8.fp8_product import evaluate as evaluate_fp8_product
from jaxtrain.passes.fp8.scaled_product import NAME as SCALED_PRODUCT
from jaxtrain.passes.fp8.scaled_product import evaluate as evaluate_scaled_product
from jaxtrain.passes.fp8.scales import CAST, evaluate_cast
from jaxtrain.program import equations, rewrite
from jaxtrain.program import operations as op
from parity.oracle.in_jax import BITS, evaluate, traced_in_32_bits

_WRITTEN_OUT: dict[str, Callable[..., jax.Array]] = {
    FP8_PRODUCT: evaluate_fp8_product,
    SCALED_PRODUCT: evaluate_scaled_product,
    CAST: evaluate_cast,
}
"""Primitives that are evaluated by the operations that they consist of."""


def program_in_float64(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` with all floating arithmetic in float64, traced in 32 bits: it is the program that runs in 32 bits.

    Unlike `in_float64`, it converts a whole training step with the policy that rewrites it. Numbers of 8 bits keep
    their rounding. The arguments may be in float64; requires JAX's x64 mode.

    >>> with jax.enable_x64(True):
    ...     y = program_in_float64(lambda x: x.astype(jax.numpy.float8_e4m3fn).astype(x.dtype) * 0.1)(np.array([1.03]))
    >>> y.tolist(), y.dtype.name
    ([0.1], 'float64')
    """
    return rewrite.retrace(fn, evaluate, lambda fn: traced_in_32_bits(rewrite.transform(fn, _rule)))


def _rule(eqn: JaxprEqn, args: list[Any], run: rewrite.Run) -> Sequence[Any] | None:
    name = op.of(eqn)
    if name in _WRITTEN_OUT:
        return [rewrite.transform(partial(_WRITTEN_OUT[name], **equations.params(eqn)), _rule)(*args)]
    if name == op.BITCAST_CONVERT_TYPE and getattr(eqn.invars[0].aval, "dtype", None) == np.float32:
        return [_bits(args[0])]
    if name == op.COND and (platforms := equations.platforms_of_branches(eqn)) is not None:
        # The residuals of one branch have shapes of their own, in place of those of the others.
        body = equations.branches(eqn)[_branch_here(platforms)]
        return run(body.jaxpr, body.consts, args[1:])
    return None


def _branch_here(platforms: Sequence[Sequence[str] | None]) -> int:
    """Return the index of the branch for the default backend, on which the program runs."""
    backend = jax.default_backend()
    names = {"cuda", "gpu"} if backend == "gpu" else {backend}
    return next(i for i, of in enumerate(platforms) if of is None or names & {*of})


def bits_of_float32(x: jax.Array) -> jax.Array:
    """Return the bits of float32 numbers, uint32."""
    return lax.bitcast_convert_type(x, np.uint32)


_bits = jax.jit(bits_of_float32)
assert bits_of_float32.__name__ == BITS
