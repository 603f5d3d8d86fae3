"""Estimate the run time of a function on a device from its jaxpr, by the roofline model (Williams et al. 2009).

A product takes the longer of its arithmetic and its memory traffic. Other operations count by the bytes they write, of
which most are fused away. The estimate compares variants of one function; it does not predict wall-clock time.
"""

import math
from dataclasses import dataclass
from typing import Any

from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn

from jaxtrain.cost.flops import equation_flops
from jaxtrain.errors import UserError
from jaxtrain.fields import brief
from jaxtrain.transforms.jaxpr import inner_jaxprs


@dataclass(frozen=True)
class Ceilings:
    """Peak rates of a device.

    Attributes:
      fp32: FLOP/s of dense products of float32 operands in full precision.
      tf32: FLOP/s of dense products of float32 operands in tf32.
      half: FLOP/s of dense products of 16-bit operands.
      bandwidth: Bytes/s of its memory.
      launch_overhead_s: Seconds to start one product.
    """

    fp32: float
    tf32: float
    half: float
    bandwidth: float
    launch_overhead_s: float


FUSED = 8
"""Elementwise results fused into one kernel, which writes one of them to memory."""

# By the beginning of `device_kind`; from NVIDIA's data sheets, without sparsity.
NVIDIA = {
    "NVIDIA H200": Ceilings(67e12, 494e12, 989e12, 4.8e12, 3e-6),
    "NVIDIA H100": Ceilings(67e12, 494e12, 989e12, 3.35e12, 3e-6),
    "NVIDIA A100": Ceilings(19.5e12, 156e12, 312e12, 2.0e12, 3e-6),
    "NVIDIA L4": Ceilings(30e12, 60e12, 121e12, 0.3e12, 3e-6),
    "Tesla V100": Ceilings(15.7e12, 15.7e12, 125e12, 0.9e12, 3e-6),
    "Tesla T4": Ceilings(8.1e12, 8.1e12, 65e12, 0.32e12, 3e-6),
}
CPU = Ceilings(4e11, 4e11, 4e11, 5e10, 2e-5)
"""Two cores (benchmarks/results/cpu-2-cores.json); 16-bit products are computed in float32."""


def ceilings(device: Any) -> Ceilings:
    """Return the peak rates of a `jax.Device`; those of an A100 for an unknown GPU."""
    if device.platform == "cpu":
        return CPU
    known = [NVIDIA[name] for name in NVIDIA if device.device_kind.startswith(name)]
    return known[0] if known else NVIDIA["NVIDIA A100"]


def find_gpu(device: str) -> tuple[str, Ceilings]:
    """Return the full name and the peak rates of a GPU given by a short name.

    Raises:
      UserError: The GPU is not in `NVIDIA`.

    Example:
      >>> find_gpu("h100")[0]
      'NVIDIA H100'
    """
    known = [name for name in NVIDIA if device.casefold() in (name.casefold(), name.split()[-1].casefold())]
    if not known:
        raise UserError(
            f"device {brief(device)} is not known: choose one of {', '.join(name.split()[-1] for name in NVIDIA)}"
        )
    return known[0], NVIDIA[known[0]]


def estimate_seconds(jaxpr: Jaxpr, device: Ceilings) -> float:
    """Estimate the seconds of one evaluation of a jaxpr on a device.

    A `while` loop counts one iteration, a `cond` its most expensive branch.

    Example:
      >>> import jax, jax.numpy as jnp
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
        return int(eqn.params["length"]) * sum(inner)
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
    return device.fp32 if product.params["precision"] == (lax.Precision.HIGHEST,) * 2 else device.tf32
