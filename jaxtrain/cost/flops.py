"""Count the floating-point operations of a function over its jaxpr.

XLA's `cost_analysis` counts the body of a loop once; here a scan counts `length` times. Matrix products and
convolutions are counted, as is usual for model FLOPs, with two operations per multiply-add. Fused attention counts as
the products of its formula: two forward and four backward over all pairs of query and key, also where it is causal (as
PaLM, Chowdhery et al. 2022, appendix B), and without the scores that its backward pass computes again.
"""

import math
from collections.abc import Callable
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from jaxtrain.cost.executed import executed, total
from jaxtrain.program import equations
from jaxtrain.program import operations as op
from jaxtrain.program.equations import visit, within
from jaxtrain.program.rewrite import make_jaxpr

_ATTENTION = {"fused_attention": 2, "fused_attention_backward": 4}
"""Products in the formula of each primitive of fused attention."""


def flops(fn: Callable[..., Any], *args: Any) -> int:
    """Count the FLOPs of the matrix products and convolutions in `fn(*args)`.

    A `cond` counts its most expensive branch.

    Args:
      fn: A function of arrays.
      *args: Its arguments, arrays or `jax.ShapeDtypeStruct`s.

    Returns:
      The number of floating-point operations.

    Raises:
      ValueError: A `while` loop, whose trip count is unknown, contains products.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> flops(lambda a, b: a @ b, jnp.ones((2, 3)), jnp.ones((3, 5))) == 2 * 2 * 3 * 5
      True
      >>> flops(lambda a: jax.lax.scan(lambda c, _: (c @ a, None), a, None, length=7), jnp.ones((2, 2))) == 7 * 16
      True
    """
    return count_flops(make_jaxpr(fn)(*args).jaxpr)


def count_flops(jaxpr: Jaxpr) -> int:
    """Count the FLOPs of the matrix products and convolutions of a jaxpr, as `flops` does."""
    loops = (eqn for eqn in visit(jaxpr) if op.of(eqn) == op.WHILE)
    if any(equation_flops(inner) for loop in loops for inner in within(loop)):
        raise ValueError("a while loop with matrix products has no FLOP count: use scan")
    return int(total(executed(jaxpr, equation_flops)))


def equation_flops(eqn: JaxprEqn) -> int:
    """Count the FLOPs of an equation that is a matrix product, a convolution or attention; 0 for every other."""
    name = op.of(eqn)
    shapes = [v.aval.shape for v in eqn.invars if hasattr(v.aval, "shape")]
    out_size = math.prod(getattr(eqn.outvars[0].aval, "shape", ())) if eqn.outvars else 0
    if name in (op.DOT_GENERAL, op.SCALED_DOT):
        (contracted, _), _ = equations.contraction(eqn)
        depth = math.prod(shapes[0][i] for i in contracted)
        return 2 * out_size * depth
    if name == "fp8_product":
        return 2 * out_size * shapes[1][0]
    if name == "scaled_product":
        (contracted, _), _ = equations.contraction(eqn)
        tile_count = shapes[0][0] if equations.own(eqn, "tiled") else 1
        return 2 * out_size * tile_count * math.prod(shapes[0][i + equations.own(eqn, "tiled")] for i in contracted)
    if name == op.RAGGED_DOT_GENERAL:
        numbers = equations.contraction(eqn)
        contracted, _ = numbers.dot_dimension_numbers[0]
        # Every row belongs to one group, also if the rows are summed, a result for each group.
        groups = shapes[2][0] if {*numbers.lhs_ragged_dimensions} <= {*contracted} else 1
        return 2 * out_size * math.prod(shapes[0][i] for i in contracted) // groups
    if name == op.CONV_GENERAL_DILATED:
        kernel, spec = shapes[1], equations.contraction(eqn).rhs_spec
        return 2 * out_size * math.prod(kernel) // kernel[spec[0]]
    if name in _ATTENTION:
        (b, t, n, width), s = shapes[0], shapes[1][1]
        return _ATTENTION[name] * 2 * b * n * t * s * width
    return 0
