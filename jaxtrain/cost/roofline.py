"""How long a function would take on a device, estimated from its jaxpr: the roofline (Williams et al. 2009).

A product takes as long as its arithmetic or as its traffic, whichever is longer; of all else the traffic counts, of
what is not fused into what reads it. Good for comparing variants of one function, not for a clock.
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
    """What a device does at most: FLOP/s of dense products with float32 operands in full precision, in tf32 and of
    16-bit operands; bytes/s of its memory; seconds that starting one product takes."""

    fp32: float
    tf32: float
    half: float
    bandwidth: float
    start: float


FUSED = 8
"""Of so many results that are not of products, the compiler writes one: those of a chain are one loop's."""

# Beginnings of `device_kind`; from NVIDIA's data sheets, without sparsity.
NVIDIA = {
    "NVIDIA H200": Ceilings(67e12, 494e12, 989e12, 4.8e12, 3e-6),
    "NVIDIA H100": Ceilings(67e12, 494e12, 989e12, 3.35e12, 3e-6),
    "NVIDIA A100": Ceilings(19.5e12, 156e12, 312e12, 2.0e12, 3e-6),
    "NVIDIA L4": Ceilings(30e12, 60e12, 121e12, 0.3e12, 3e-6),
    "Tesla V100": Ceilings(15.7e12, 15.7e12, 125e12, 0.9e12, 3e-6),
    "Tesla T4": Ceilings(8.1e12, 8.1e12, 65e12, 0.32e12, 3e-6),
}
CPU = Ceilings(4e11, 4e11, 4e11, 5e10, 2e-5)
"""Of two cores (benchmarks/results/cpu-2-cores.json); 16-bit products are computed in float32 there."""


def ceilings(device: Any) -> Ceilings:
    """Those of a `jax.Device`; of one that is not known, those of the GPU that most are like."""
    if device.platform == "cpu":
        return CPU
    known = [NVIDIA[name] for name in NVIDIA if device.device_kind.startswith(name)]
    return known[0] if known else NVIDIA["NVIDIA A100"]


def named(device: str) -> tuple[str, Ceilings]:
    """The name in full and the ceilings of a GPU. Raises `UserError` for one that is not known.

    >>> named("h100")[0]
    'NVIDIA H100'
    """
    known = [name for name in NVIDIA if device.casefold() in (name.casefold(), name.split()[-1].casefold())]
    if not known:
        raise UserError(
            f"device {brief(device)} is not known: choose one of {', '.join(name.split()[-1] for name in NVIDIA)}"
        )
    return known[0], NVIDIA[known[0]]


def seconds(jaxpr: Jaxpr, device: Ceilings) -> float:
    """The estimate for one evaluation. A `while` counts as if it ran once, of a `cond` the dearest branch.

    >>> import jax, jax.numpy as jnp
    >>> x = jnp.ones((512, 512))
    >>> def powers(n):
    ...     return jax.make_jaxpr(lambda a: lax.scan(lambda c, _: (c @ a, None), a, None, length=n)[0])(x).jaxpr
    >>> round(seconds(powers(6), CPU) / seconds(powers(2), CPU), 6)
    3.0
    """
    return sum(_equation_seconds(eqn, device) for eqn in jaxpr.eqns)


def _equation_seconds(eqn: JaxprEqn, device: Ceilings) -> float:
    inner = [seconds(jaxpr, device) for jaxpr in inner_jaxprs(eqn)]
    if eqn.primitive.name == "scan":
        return int(eqn.params["length"]) * sum(inner)
    if eqn.primitive.name == "cond":
        return max(inner)
    written = sum(map(_bytes, eqn.outvars))
    if any(inner):
        # Reductions and sorts carry a jaxpr too, of two scalars: what is written counts, not what that does.
        return max(sum(inner), written / FUSED / device.bandwidth)
    flops = equation_flops(eqn)
    if not flops:
        return written / FUSED / device.bandwidth
    moved = written + sum(map(_bytes, eqn.invars))
    return device.start + max(flops / _peak(eqn, device), moved / device.bandwidth)


def _bytes(var: Any) -> int:
    shape, dtype = getattr(var.aval, "shape", ()), getattr(var.aval, "dtype", None)
    return math.prod(shape) * getattr(dtype, "itemsize", 0)


def _peak(product: JaxprEqn, device: Ceilings) -> float:
    aval: Any = product.invars[0].aval
    if aval.dtype.itemsize == 2:
        return device.half
    return device.fp32 if product.params["precision"] == (lax.Precision.HIGHEST,) * 2 else device.tf32
