"""Optimizers with moments in 8 bits, as `AdamW8bit`, `Adam8bit` and `SGD8bit` of bitsandbytes.

The arithmetic is that of `adamw`, `adam` and `sgd`: moments are dequantized, updated, used in float32 and quantized.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.errors import UserError
from jaxtrain.optim.adamw import scale_by_adam
from jaxtrain.optim.arguments import optimizer
from jaxtrain.optim.blockwise_quantization import Blockwise, block_maxima, block_zeros, dequantize, quantize_by
from jaxtrain.optim.dynamic_map import SIGNED, UNSIGNED, DynamicMap
from jaxtrain.optim.preprocessing import Mask, gradient_preprocessing
from jaxtrain.optim.sgd import scale_by_momentum
from jaxtrain.paths import Matching, path_name
from jaxtrain.step import LearningRate, scale_by_learning_rate

MIN_8BIT_SIZE = 4096
"""Parameters with fewer elements have moments in float32, as in bitsandbytes."""


@optimizer
def adamw8bit(
    learning_rate: LearningRate = 1e-3,
    b1: optax.ScalarOrSchedule = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    mask: Mask = None,
    *,
    min_8bit_size: int = MIN_8BIT_SIZE,
    float32: Sequence[str] = (),
    block_order: Mapping[str, Sequence[int]] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """AdamW with both moments in 8 bits: 2.03 bytes a parameter in place of 8.

    Args:
      learning_rate: A number, a schedule of the number of updates, or `reduce_lr_on_plateau(…)`.
      b1: Decay of the first moment, or a schedule of it.
      b2: Decay of the second moment.
      eps: Added to the root.
      weight_decay: Decoupled weight decay.
      mask: What decays: a pytree of booleans, or a function from the parameters to one, as in `optax.adamw`.
      min_8bit_size: Number of elements below which a parameter's moments are float32.
      float32: Shell patterns of the paths of parameters whose moments are float32, such as ("wte",).
      block_order: Order of the axes, from the slowest to the fastest, in which the blocks of a parameter are counted,
        by path; () and no entry for that of the array. A run that is imported from PyTorch has it.

    Returns:
      An optax transformation.

    Example:
      >>> tx = adamw8bit(0.1, weight_decay=0.0)
      >>> params = jnp.ones((64, 64))
      >>> state = tx.init(params)
      >>> sorted({str(x.dtype) for x in jax.tree.leaves(state) if x.size >= 4096})
      ['uint8']
      >>> updates, _ = tx.update(jnp.full((64, 64), 3.0), state, params)
      >>> round(float(updates[0, 0]), 6)
      -0.1

    References:
      Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022.
    """
    return optax.chain(
        _with_8bit(scale_by_adam(b1, b2, eps), _ADAM, min_8bit_size, float32, block_order),
        optax.add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )


@optimizer
def adam8bit(
    learning_rate: LearningRate = 1e-3,
    b1: optax.ScalarOrSchedule = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: Mask = None,
    *,
    min_8bit_size: int = MIN_8BIT_SIZE,
    float32: Sequence[str] = (),
    block_order: Mapping[str, Sequence[int]] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Adam with both moments in 8 bits. The weight decay is `adam`'s, part of the gradient; bitsandbytes' is AdamW's.

    Args:
      learning_rate: A number, a schedule of the number of updates, or `reduce_lr_on_plateau(…)`.
      b1: Decay of the first moment, or a schedule of it.
      b2: Decay of the second moment.
      eps: Added to the root.
      weight_decay: Factor of the parameters added to the gradient (L2 penalty).
      mask: What decays: a pytree of booleans, or a function from the parameters to one, as in `optax.adamw`.
      min_8bit_size: Number of elements below which a parameter's moments are float32.
      float32: Shell patterns of the paths of parameters whose moments are float32.
      block_order: Order of the axes in which the blocks of a parameter are counted, by path; see `adamw8bit`.

    Returns:
      An optax transformation.

    Example:
      >>> tx = adam8bit(0.1)
      >>> updates, _ = tx.update(jnp.full((64, 64), 3.0), tx.init(jnp.ones((64, 64))))
      >>> round(float(updates[0, 0]), 6)
      -0.1
    """
    return optax.chain(
        *gradient_preprocessing(weight_decay, False, mask),
        _with_8bit(scale_by_adam(b1, b2, eps), _ADAM, min_8bit_size, float32, block_order),
        scale_by_learning_rate(learning_rate),
    )


@optimizer
def sgd8bit(
    learning_rate: LearningRate = 1e-3,
    momentum: optax.ScalarOrSchedule = 0.9,
    weight_decay: float = 0.0,
    mask: Mask = None,
    *,
    min_8bit_size: int = MIN_8BIT_SIZE,
    float32: Sequence[str] = (),
    block_order: Mapping[str, Sequence[int]] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """SGD with a momentum buffer in 8 bits: 1.02 bytes a parameter in place of 4.

    bitsandbytes accepts dampening and Nesterov momentum without effect, and they are not arguments here.

    Args:
      learning_rate: A number, a schedule of the number of updates, or `reduce_lr_on_plateau(…)`.
      momentum: Decay of the momentum buffer, or a schedule of it.
      weight_decay: Factor of the parameters added to the gradient (L2 penalty).
      mask: What decays: a pytree of booleans, or a function from the parameters to one.
      min_8bit_size: Number of elements below which a parameter's buffer is float32.
      float32: Shell patterns of the paths of parameters whose buffers are float32.
      block_order: Order of the axes in which the blocks of a parameter are counted, by path; see `adamw8bit`.

    Returns:
      An optax transformation.

    Example:
      >>> tx = sgd8bit(0.1)
      >>> updates, _ = tx.update(jnp.ones((64, 64)), tx.init(jnp.ones((64, 64))))
      >>> round(float(updates[0, 0]), 6)
      -0.1
    """
    return optax.chain(
        *gradient_preprocessing(weight_decay, False, mask),
        _with_8bit(scale_by_momentum(momentum, 0.0, nesterov=False), _MOMENTUM, min_8bit_size, float32, block_order),
        scale_by_learning_rate(learning_rate),
    )


_ADAM = {"mu": SIGNED, "nu": UNSIGNED}
_MOMENTUM = {"momentum_buffer": SIGNED}


def _with_8bit(
    inner: optax.GradientTransformation,
    maps: Mapping[str, DynamicMap],
    min_8bit_size: int,
    float32: Sequence[str],
    block_order: Mapping[str, Sequence[int]] | None,
) -> optax.GradientTransformation:
    """Store the fields `maps` of the state of `inner`, which start at zero, in 8 bits."""
    if isinstance(float32, str):
        raise UserError(f"float32 must be a list of patterns, got {float32!r}: write ({float32!r},)")
    # In `update`, `optax.inject_hyperparams` passes traced values; `init` alone reads this one.
    if isinstance(min_8bit_size, int) and min_8bit_size < 0:
        raise UserError(f"min_8bit_size must be at least 0, got {min_8bit_size!r}: use {MIN_8BIT_SIZE}")
    kept, orders = Matching(tuple(float32)), block_order or {}

    def zeros(path: Any, p: jax.Array) -> Any:
        if p.ndim == 0 or p.size < min_8bit_size or kept(path_name(path)):
            return jnp.zeros(p.shape, np.promote_types(p.dtype, np.float32))
        return block_zeros(p.shape)

    def init(params: Any) -> Any:
        _check_orders(orders, params)
        moments = {field: jax.tree_util.tree_map_with_path(zeros, params) for field in maps}
        return inner.init({})._replace(**moments)

    def each(fn: Callable[..., Any], stored: Any, *trees: Any) -> Any:
        """Apply fn(order, moment, leaves…) to the moments in 8 bits; the others are the leaves of the last tree."""

        def leaf(path: Any, moment: Any, *leaves: Any) -> Any:
            eight_bit = isinstance(moment, Blockwise)
            return fn(tuple(orders.get(path_name(path), ())), moment, *leaves) if eight_bit else leaves[-1]

        return jax.tree_util.tree_map_with_path(leaf, stored, *trees, is_leaf=lambda x: isinstance(x, Blockwise))

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        wide = jax.tree.map(lambda g: g.astype(np.promote_types(g.dtype, np.float32)), grads)
        stored = {field: getattr(state, field) for field in maps}

        def updated(stored: dict[str, Any]) -> tuple[Any, Any]:
            dense = {}
            for field, values in maps.items():
                read = partial(_read, values)
                dense[field] = each(read, stored[field], wide, stored[field])
            return inner.update(wide, state._replace(**dense), params)

        _, new = updated(stored)
        maxima = {field: each(_maxima, stored[field], getattr(new, field)) for field in maps}
        direction, new = updated(_behind(maxima, stored))
        written = {
            field: each(partial(_write, values), stored[field], maxima[field], getattr(new, field))
            for field, values in maps.items()
        }
        return jax.tree.map(lambda d, g: d.astype(g.dtype), direction, grads), new._replace(**written)

    return optax.GradientTransformation(init, update)


def _behind(maxima: Any, stored: Any) -> Any:
    """Return `stored` such that what follows from it is computed again after `maxima`.

    A GPU computes the new moments twice, for the block maxima and for the update, and so reads 2 bytes of codes a
    parameter a second time. Without the barrier it would write and read 8 bytes of moments.
    """

    def is_stored(x: Any) -> bool:
        return isinstance(x, Blockwise)

    old = jax.tree.map(lambda m: m.absmax if is_stored(m) else (), stored, is_leaf=is_stored)
    old, _ = jax.lax.optimization_barrier((old, maxima))
    return jax.tree.map(lambda m, x: m._replace(absmax=x) if is_stored(m) else m, stored, old, is_leaf=is_stored)


def _read(values: DynamicMap, order: tuple[int, ...], moment: Blockwise, g: jax.Array, _: Any) -> jax.Array:
    return dequantize(moment, values, order).astype(g.dtype)


def _maxima(order: tuple[int, ...], _: Blockwise, x: jax.Array) -> jax.Array:
    return block_maxima(x.astype(np.float32), order)


def _write(values: DynamicMap, order: tuple[int, ...], _: Blockwise, absmax: jax.Array, x: jax.Array) -> Blockwise:
    # A negative first moment does not become 0, as in bitsandbytes' kernel (kOptimizerStatic8bit2StateBlockwise).
    return quantize_by(absmax, x.astype(np.float32), values, order, keep_sign=values.signed)


def _check_orders(orders: Mapping[str, Sequence[int]], params: Any) -> None:
    axes = {path_name(path): list(range(p.ndim)) for path, p in jax.tree_util.tree_leaves_with_path(params)}
    for path, order in orders.items():
        if path in axes and sorted(order) != axes[path]:
            raise UserError(f"block_order of {path} must be an order of {axes[path]}, got {list(order)}: fix it")
