"""Floating-point operations of a function, counted over its jaxpr.

XLA's `cost_analysis` counts a loop's body once, whatever its trip count; here a scan counts as often as it runs.
Matrix products and convolutions are counted, as is usual for model FLOPs: a multiplication and an addition each.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn

from jaxtrain.transforms.jaxpr import inner_jaxprs


def flops(fn: Callable[..., Any], *args: Any) -> int:
    """The FLOPs of the matrix products and convolutions in `fn(*args)`. `args` may be abstract.

    Of a `cond` the dearest branch counts. Raises `ValueError` for products in a `while` loop, whose trip count no one
    knows.

    >>> import jax.numpy as jnp
    >>> flops(lambda a, b: a @ b, jnp.ones((2, 3)), jnp.ones((3, 5))) == 2 * 2 * 3 * 5
    True
    >>> flops(lambda a: jax.lax.scan(lambda c, _: (c @ a, None), a, None, length=7), jnp.ones((2, 2))) == 7 * 16
    True
    """
    return _flops(jax.make_jaxpr(fn)(*args).jaxpr)


def _flops(jaxpr: Jaxpr) -> int:
    return sum(equation_flops(eqn) for eqn in jaxpr.eqns)


def equation_flops(eqn: JaxprEqn) -> int:
    """The FLOPs of the matrix products and convolutions that one equation is or holds."""
    name, inner = eqn.primitive.name, [_flops(j) for j in inner_jaxprs(eqn)]
    shapes = [v.aval.shape for v in eqn.invars if hasattr(v.aval, "shape")]
    out_size = math.prod(getattr(eqn.outvars[0].aval, "shape", ())) if eqn.outvars else 0
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        depth = math.prod(shapes[0][i] for i in contracted)
        return 2 * out_size * depth
    if name == "conv_general_dilated":
        kernel, spec = shapes[1], eqn.params["dimension_numbers"].rhs_spec
        return 2 * out_size * math.prod(kernel) // kernel[spec[0]]
    if name == "scan":
        return eqn.params["length"] * sum(inner)
    if name == "while" and any(inner):
        raise ValueError("a while loop with matrix products has no FLOP count: use scan")
    if name == "cond":
        return max(inner)
    # A custom derivative's rule is not run beside the function itself.
    return sum(inner)
