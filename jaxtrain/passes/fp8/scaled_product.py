"""A product of arrays in 8 bits, multiplied by the inverse scales of its operands, as one primitive.

What `torch._scaled_mm` is in PyTorch. One primitive, so that policies of rematerialization save its rounded result, and
so that a platform can have a lowering of its own.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.passes.fp8.scales import Quantized
from jaxtrain.program.primitive import primitive

NAME = "scaled_product"


def scaled_product(
    a: Quantized,
    b: Quantized,
    dimension_numbers: Any,
    result: Any,
    *bias: jax.Array,
    tiled: bool = False,
) -> jax.Array:
    """Multiply quantized arrays, summed in float32 and rounded once.

    Args:
      a: First operand.
      b: Second operand.
      dimension_numbers: As for `lax.dot_general`; of `tiled` operands, for a pair of tiles.
      result: Dtype of the result.
      *bias: At most one, with as many axes as the result: [1, …, 1, n] or of the result's shape; added before rounding.
      tiled: Whether both operands have a first axis of tiles, whose scaled products are added in float32.

    Returns:
      The product of the numbers that the operands stand for.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxtrain.passes.fp8.scales import E4M3, quantize
      >>> a, b = (quantize(x, E4M3, (0, 1)) for x in (jnp.full((2, 3), 0.5), jnp.full((3, 2), 3.0)))
      >>> scaled_product(a, b, (((1,), (0,)), ((), ())), jnp.float32).tolist()
      [[4.5, 4.5], [4.5, 4.5]]
    """
    params = {"dimension_numbers": dimension_numbers, "result": np.dtype(result), "tiled": tiled}
    product: jax.Array = _primitive.bind(*a, *b, *bias, **params)
    return product


def evaluate(
    a: jax.Array,
    a_scale: jax.Array,
    b: jax.Array,
    b_scale: jax.Array,
    *bias: jax.Array,
    dimension_numbers: Any,
    result: Any,
    tiled: bool,
) -> jax.Array:
    """Compute a product by the operations that it consists of, from the primitive's operands and parameters."""

    def product(a: jax.Array, a_scale: jax.Array, b: jax.Array, b_scale: jax.Array) -> jax.Array:
        unscaled = lax.dot_general(a, b, dimension_numbers, preferred_element_type=np.dtype(np.float32))
        a_scale, b_scale = _aligned(a_scale, b_scale, dimension_numbers)
        return unscaled * (1 / a_scale) * (1 / b_scale)

    operands = a, a_scale, b, b_scale
    if tiled:
        first = jax.eval_shape(product, *(x[0] for x in operands))
        zeros = lax.full(first.shape, 0, first.dtype)
        total, _ = lax.scan(lambda total, pair: (total + product(*pair), None), zeros, operands)
    else:
        total = product(*operands)
    for x in bias:
        total += x.astype(np.float32)
    return total.astype(result)


def _on_a_gpu(
    a: jax.Array,
    a_scale: jax.Array,
    b: jax.Array,
    b_scale: jax.Array,
    *bias: jax.Array,
    dimension_numbers: Any,
    result: Any,
    tiled: bool,
) -> jax.Array:
    """Write the product in the form for which XLA:GPU calls cuBLASLt, which scales the float32 sums and rounds once.

    XLA takes the scales before they are rounded (`xla_allow_excess_precision`), and the bias into the epilogue. It
    gives no other scales to cuBLASLt than one for each operand.
    """
    params = {"dimension_numbers": dimension_numbers, "result": result, "tiled": tiled}
    if tiled or a_scale.size > 1 or b_scale.size > 1:
        return evaluate(a, a_scale, b, b_scale, *bias, **params)
    low = result if result.itemsize == 2 else np.dtype(jnp.bfloat16)
    # Behind a barrier, or XLA might round a scale in a kernel before this one.
    of_a, of_b = lax.optimization_barrier([(1 / scale).reshape(()) for scale in (a_scale, b_scale)])
    a, b = (x.astype(low) * scale.astype(low) for x, scale in ((a, of_a), (b, of_b)))
    product = lax.dot_general(a, b, dimension_numbers, preferred_element_type=result)
    for x in bias:
        product += lax.broadcast_in_dim(x.astype(result), product.shape, range(product.ndim))
    return product


def _aligned(a_scale: jax.Array, b_scale: jax.Array, dimension_numbers: Any) -> tuple[jax.Array, jax.Array]:
    """Return the scales with the axes of the product: those of the batch, of the first operand and of the second."""
    contracted, batch = dimension_numbers
    scales, n_batch = [], len(batch[0])
    for i, scale in enumerate((a_scale, b_scale)):
        free = _free(scale.ndim, contracted[i], batch[i])
        scale = lax.transpose(scale, (*batch[i], *free, *contracted[i]))
        scales.append(scale.reshape(scale.shape[: n_batch + len(free)]))
    of_a, of_b = (scale.ndim - n_batch for scale in scales)
    a_scale, b_scale = scales
    return (
        a_scale.reshape(*a_scale.shape, *(1,) * of_b),
        b_scale.reshape(*b_scale.shape[:n_batch], *(1,) * of_a, *b_scale.shape[n_batch:]),
    )


def _free(ndim: int, contracted: Sequence[int], batch: Sequence[int]) -> list[int]:
    return [i for i in range(ndim) if i not in (*contracted, *batch)]


_primitive = primitive(NAME, evaluate, on={"cuda": _on_a_gpu, "rocm": _on_a_gpu})
