"""Estimate the run time of a function on a device from its jaxpr, by the roofline model (Williams et al. 2009).

A product takes the longer of its arithmetic and its memory traffic. Other operations count by the bytes they write, of
which most are fused away. The estimate compares variants of one function; it does not predict wall-clock time.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn

from jaxtrain.cost.data_sheets import Ceilings
from jaxtrain.cost.flops import equation_flops
from jaxtrain.program import equations
from jaxtrain.program.equations import inner_jaxprs

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
    return sum(_equation_seconds(eqn, device) for eqn in jaxpr.eqns)


def _equation_seconds(eqn: JaxprEqn, device: Ceilings) -> float:
    inner = [estimate_seconds(jaxpr, device) for jaxpr in inner_jaxprs(eqn)]
    if eqn.primitive.name == "scan":
        return equations.trip_count(eqn) * sum(inner)
    if eqn.primitive.name == "cond":
        return max(inner)
    written = sum(map(_bytes, eqn.outvars))
    if any(inner):
        # Reductions and sorts have a jaxpr of two scalars: for them the bytes written count instead.
        return max(sum(inner), written / FUSED / device.bandwidth)
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
