"""A kernel in 8 bits, as a product and its derivative need it.

It is quantized where a product uses it, or once for a window, in which parameters do not change. On a mesh, fsdp shards
the numbers in 8 bits, which are gathered for each use; torchao's `enable_fsdp_float8_all_gather`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import NamedSharding

from jaxtrain.passes.fp8.fp8_settings import Fp8
from jaxtrain.passes.fp8.operands import blocks_along, by_given_scale, kernel_along, quantized_blocks
from jaxtrain.passes.fp8.scales import E4M3, Quantized, largest_magnitude

Whole = Callable[[NamedSharding], NamedSharding]
"""Returns a sharding without the axes over which parameters are gathered."""


class Gathering(NamedTuple):
    """How the numbers of a kernel are sharded where they are quantized, and where a product uses them."""

    part: NamedSharding
    whole: NamedSharding

    def gathered(self, x: jax.Array) -> jax.Array:
        """Gather an array. Both shardings are constrained: otherwise the compiler may quantize the whole kernel."""
        return lax.with_sharding_constraint(lax.with_sharding_constraint(x, self.part), self.whole)


class QuantizedKernel(NamedTuple):
    """The numbers of a kernel [K, N].

    Attributes:
      columns: For a product that sums over K, and for all products if they have the same numbers.
      rows: For a product that sums over N, if it has numbers of its own; else None.
      amax: With the scaling "delayed", the largest magnitude of the kernel, float32[]; else None.
    """

    columns: Quantized
    rows: Quantized | None = None
    amax: jax.Array | None = None

    @classmethod
    def joined(cls, fp8: Fp8, leaves: Sequence[Any]) -> "QuantizedKernel":
        """Return the kernel of its arrays in order, `jax.tree.leaves` of it."""
        columns, rest = Quantized(*leaves[:2]), leaves[2:]
        if fp8.scaling == "row":
            return cls(columns, rows=Quantized(*rest))
        return cls(columns, amax=rest[0]) if fp8.is_delayed else cls(columns)

    def of_backward(self) -> Quantized:
        """Return the numbers for a product that sums over N."""
        return self.columns if self.rows is None else self.rows


def quantize_kernel(fp8: Fp8, kernel: jax.Array, scale: jax.Array | None = None) -> QuantizedKernel:
    """Quantize a kernel for its products.

    Args:
      fp8: The settings.
      kernel: [K, N].
      scale: With the scaling "delayed", its scale.

    Example:
      >>> import jax.numpy as jnp
      >>> kernel = quantize_kernel(Fp8("row"), jnp.ones((16, 32)))
      >>> kernel.columns.scale.shape, kernel.rows.scale.shape
      ((1, 32), (16, 1))
    """
    if scale is not None:
        return QuantizedKernel(by_given_scale(kernel, E4M3, scale), amax=largest_magnitude(kernel, (0, 1)).reshape(()))
    if fp8.scaling == "block":
        return QuantizedKernel(quantized_blocks(fp8, kernel))
    columns = kernel_along(fp8, kernel, 0)
    return QuantizedKernel(columns, rows=kernel_along(fp8, kernel, 1) if fp8.scaling == "row" else None)


def operand(fp8: Fp8, kernel: Quantized, axis: int, gathering: Gathering | None) -> Quantized:
    """Return the operand of a product that sums over an axis of a kernel."""
    if gathering is not None:
        kernel = kernel._replace(data=gathering.gathered(kernel.data))
    return blocks_along(kernel, axis) if fp8.scaling == "block" else kernel
