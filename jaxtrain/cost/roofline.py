"""Estimate the run time of a function on a device from its jaxpr, by the roofline model (Williams et al. 2009).

A product takes the longer of its arithmetic and its memory traffic. Other operations count by the bytes they write, of
which most are fused away. The estimate compares variants of one function; it does not predict wall-clock time.
"""

import math
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn

from jaxtrain.cost.data_sheets import Ceilings
from jaxtrain.cost.executed import executed, total
from jaxtrain.cost.flops import equation_flops
from jaxtrain.program import equations

FUSED = 8
"""Elementwise results fused into one kernel, which writes one of them to memory."""


def estimate_seconds(jaxpr: Jaxpr, device: Ceilings) -> float:
    """Estimate the seconds of one evaluation of a jaxpr on a device.

    A `while` loop counts one iteration, a `cond` its most expensive branch.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxtrain.cost.data_sheets import CPU
      >>> x = jnp.ones((512, 512))
      >>> def powers(n):
      ...     return jax.make_jaxpr(lambda a: lax.scan(lambda c, _: (c @ a, None), a, None, length=n)[0])(x).jaxpr
      >>> round(estimate_seconds(powers(6), CPU) / estimate_seconds(powers(2), CPU), 6)
      3.0
    """
    return total(executed(jaxpr, partial(equation_seconds, device=device)))


def equation_seconds(eqn: JaxprEqn, device: Ceilings) -> float:
    """Estimate the seconds of an equation, without those of the jaxprs in its parameters."""
    written = sum(map(_bytes, eqn.outvars))
    flops = equation_flops(eqn)
    if not flops:
        return written / FUSED / device.bandwidth
    moved = written + sum(map(_bytes, eqn.invars))
    return device.launch_overhead_s + max(flops / _peak(eqn, device), moved / device.bandwidth)


def _bytes(var: Any) -> int:
    shape, dtype = getattr(var.aval, "shape", ()), getattr(var.aval, "dtype", None)
    return math.prod(shape) * getattr(dtype, "itemsize", 0)


def _peak(product: JaxprEqn, device: Ceilings) -> float:
    aval: Any = product.invars[0].aval
    if aval.dtype.itemsize == 2:
        return device.half
    if aval.dtype.itemsize == 1 and jnp.issubdtype(aval.dtype, jnp.floating):
        return device.eight_bit
    return device.tf32 if equations.precision(product) != (lax.Precision.HIGHEST,) * 2 else device.fp32
