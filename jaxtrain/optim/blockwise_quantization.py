"""Block-wise quantization of an optimizer's moments to 8 bits (Dettmers et al. 2022, section 2.1), as bitsandbytes'.

256 consecutive elements are divided by their largest magnitude and rounded to the values of a `DynamicMap`. The codes
have the shape of the parameter, so that its sharding is theirs; the blocks are counted through the whole array, so that
they are the same on every mesh. Only maxima of short runs of elements are ever rearranged across devices.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.optim.dynamic_map import DynamicMap

BLOCK = 256
"""Number of elements that share a magnitude, as in bitsandbytes ≥ 0.44."""
_RUN = 16


class Blockwise(NamedTuple):
    """A moment in 8 bits.

    Attributes:
      codes: uint8, of the parameter's shape.
      absmax: float32 [⌈size / 256⌉], the largest magnitude of every block.
    """

    codes: Any
    absmax: Any


def block_zeros(shape: Sequence[int]) -> Blockwise:
    """Return zeros in 8 bits, whose codes are 0, as in bitsandbytes.

    >>> [part.shape for part in block_zeros((3, 100))]
    [(3, 100), (2,)]
    """
    blocks = -(-math.prod(shape) // BLOCK)
    return Blockwise(jnp.zeros(shape, np.uint8), jnp.zeros(blocks, np.float32))


def quantize(x: jax.Array, values: DynamicMap, order: Sequence[int] = (), *, keep_sign: bool = False) -> Blockwise:
    """Quantize an array block by block, to the bits of `bitsandbytes.functional.quantize_blockwise` with nearest codes.

    Args:
      x: float32 [...].
      values: The data type.
      order: Axes of `x` from the slowest to the fastest of the order in which blocks are counted; () for that of `x`.
      keep_sign: Whether a negative element never becomes 0, as the first moment of bitsandbytes' CUDA optimizers.

    Returns:
      The codes and the largest magnitudes. The codes of a block of zeros, or of subnormal numbers, are 0.

    Example:
      >>> from jaxtrain.optim.dynamic_map import SIGNED
      >>> moment = quantize(jnp.array([0.5, -0.25, 0.0]), SIGNED)
      >>> moment.codes.tolist(), moment.absmax.tolist()
      ([255, 35, 127], [0.5])
      >>> [round(value, 4) for value in dequantize(moment, SIGNED).tolist()]
      [0.5, -0.2504, 0.0]
    """
    return quantize_by(block_maxima(x, order), x, values, order, keep_sign=keep_sign)


def block_maxima(x: jax.Array, order: Sequence[int] = ()) -> jax.Array:
    """Return the largest magnitude of every block of `x`, float32 [⌈size / 256⌉]."""
    order = tuple(order) or tuple(range(x.ndim))
    divided, length = _runs(x.shape, order[-1])
    maxima = jnp.abs(x).reshape(divided).max(order[-1] + 1).transpose(order).reshape(-1)
    per_block = BLOCK // length
    return jnp.pad(maxima, (0, -maxima.size % per_block)).reshape(-1, per_block).max(1)


def quantize_by(
    absmax: jax.Array, x: jax.Array, values: DynamicMap, order: Sequence[int] = (), *, keep_sign: bool = False
) -> Blockwise:
    """Return `quantize(x, …)` if `absmax` are the block maxima of `x`."""
    order = tuple(order) or tuple(range(x.ndim))
    # Rounded once per block, as in bitsandbytes, instead of a division per element.
    normal = absmax >= np.finfo(np.float32).tiny
    inverse = jnp.where(normal, 1 / jnp.where(normal, absmax, 1), 0)
    relative = jnp.clip(x * _of_elements(inverse, x.shape, order), -1, 1)
    codes = values.encode(relative)
    if keep_sign:
        codes = jnp.where((x < 0) & (codes == values.zero), np.uint8(values.zero - 1), codes)
    return Blockwise(jnp.where(_of_elements(normal, x.shape, order), codes, np.uint8(0)), absmax)


def dequantize(moment: Blockwise, values: DynamicMap, order: Sequence[int] = ()) -> jax.Array:
    """Return the float32 array of a moment in 8 bits.

    Args:
      moment: The codes and the largest magnitudes.
      values: The data type.
      order: Order of the axes in which blocks are counted; () for that of the codes.
    """
    order = tuple(order) or tuple(range(moment.codes.ndim))
    return values.decode(moment.codes) * _of_elements(moment.absmax, moment.codes.shape, order)


def _runs(shape: Sequence[int], axis: int) -> tuple[list[int], int]:
    """Return the shape with `axis` divided into runs that no block and, usually, no shard divides, and their length."""
    length = math.gcd(shape[axis], _RUN)
    return [*shape[:axis], shape[axis] // length, length, *shape[axis + 1 :]], length


def _of_elements(of_blocks: jax.Array, shape: Sequence[int], order: tuple[int, ...]) -> jax.Array:
    """Return the value of every element's block."""
    axis = order[-1]
    divided, length = _runs(shape, axis)
    runs = [n for i, n in enumerate(divided) if i != axis + 1]
    whole = jnp.broadcast_to(of_blocks[:, None], (of_blocks.size, BLOCK // length)).reshape(-1)
    ordered = whole[: math.prod(runs)].reshape([runs[i] for i in order]).transpose(np.argsort(order))
    return jnp.broadcast_to(jnp.expand_dims(ordered, axis + 1), divided).reshape(shape)
