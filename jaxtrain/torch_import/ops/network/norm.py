"""Normalization and softmax."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.models.batch_norm import normalize_by_batch
from jaxtrain.models.layers.layer_norm import layer_norm as last_axis_norm
from jaxtrain.torch_import.ops.table import as_kernel, in_opmath, of_vectors, op

Optional = jax.Array | None


@op("softmax.int", "_softmax.default")
@of_vectors
def softmax(x: jax.Array, dim: int, dtype: Any = None) -> jax.Array:
    """Softmax along an axis."""
    x = x.astype(dtype) if _is_dtype(dtype) else x
    return in_opmath(jax.nn.softmax)(x, dim)


@op("log_softmax.int", "_log_softmax.default")
@of_vectors
def log_softmax(x: jax.Array, dim: int, dtype: Any = None) -> jax.Array:
    """Logarithm of the softmax along an axis."""
    x = x.astype(dtype) if _is_dtype(dtype) else x
    return in_opmath(jax.nn.log_softmax)(x, dim)


@op("_safe_softmax.default")
def safe_softmax(x: jax.Array, dim: int, dtype: Any = None) -> jax.Array:
    """Softmax that is 0 where all elements are -inf."""
    masked = jnp.isneginf(x).all(dim, keepdims=True)
    return jnp.where(masked, 0, softmax(jnp.where(masked, 0, x), dim, dtype))


def _is_dtype(dtype: Any) -> bool:
    """Return whether the third argument of a softmax is a dtype; `_softmax` has a bool there."""
    return dtype is not None and not isinstance(dtype, bool)


@op("layer_norm.default")
def layer_norm(
    x: jax.Array,
    normalized_shape: Sequence[int],
    weight: Optional = None,
    bias: Optional = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> jax.Array:
    """Layer normalization of the last axes."""
    del cudnn_enable
    if len(normalized_shape) == 1:
        scale = jnp.ones(x.shape[-1], x.dtype) if weight is None else weight
        return last_axis_norm(x, scale, jnp.zeros_like(scale) if bias is None else bias, eps)
    y: jax.Array = as_kernel(_layer_norm, x, weight, bias, axes=tuple(range(-len(normalized_shape), 0)), eps=eps)
    return y


def _layer_norm(x: jax.Array, weight: Optional, bias: Optional, *, axes: tuple[int, ...], eps: float) -> jax.Array:
    return _scaled(_standardized(x, axes, eps), weight, bias)


def _standardized(x: jax.Array, axes: tuple[int, ...], eps: float) -> jax.Array:
    centered = x - x.mean(axes, keepdims=True)
    return centered * lax.rsqrt(jnp.square(centered).mean(axes, keepdims=True) + eps)


def _scaled(x: jax.Array, weight: Optional, bias: Optional) -> jax.Array:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


@op("rms_norm.default")
def rms_norm(
    x: jax.Array, normalized_shape: Sequence[int], weight: Optional = None, eps: float | None = None
) -> jax.Array:
    """Normalization by the root of the mean square; without eps, with that of the dtype."""
    eps = float(jnp.finfo(x.dtype).eps) if eps is None else eps
    y: jax.Array = as_kernel(_rms_norm, x, weight, axes=tuple(range(-len(normalized_shape), 0)), eps=eps)
    return y


def _rms_norm(x: jax.Array, weight: Optional, *, axes: tuple[int, ...], eps: float) -> jax.Array:
    return _scaled(x * lax.rsqrt(jnp.square(x).mean(axes, keepdims=True) + eps), weight, None)


@op("group_norm.default")
def group_norm(
    x: jax.Array,
    num_groups: int,
    weight: Optional = None,
    bias: Optional = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> jax.Array:
    """Normalization of groups of channels."""
    del cudnn_enabled
    y: jax.Array = as_kernel(_group_norm, x, weight, bias, groups=num_groups, eps=eps)
    return y


def _group_norm(x: jax.Array, weight: Optional, bias: Optional, *, groups: int, eps: float) -> jax.Array:
    y = _standardized(x.reshape(x.shape[0], groups, -1), (-1,), eps).reshape(x.shape)
    return _scaled(y, _per_channel(weight, x), _per_channel(bias, x))


def _per_channel(values: Optional, x: jax.Array) -> Optional:
    """Give values of channels the rank of x, whose channels are on the second axis."""
    return None if values is None else values.reshape(1, -1, *(1,) * (x.ndim - 2))


@op("native_layer_norm.default")
@in_opmath
def native_layer_norm(
    x: jax.Array, normalized_shape: Sequence[int], weight: Optional, bias: Optional, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Layer normalization, with mean and inverse standard deviation, which have no gradient."""
    y: jax.Array = layer_norm(x, normalized_shape, weight, bias, eps)
    axes = tuple(range(-len(normalized_shape), 0))
    return (y, *_statistics(lax.stop_gradient(x), axes, eps, keepdims=True))


@op("native_group_norm.default")
def native_group_norm(
    x: jax.Array, weight: Optional, bias: Optional, rows: int, channels: int, pixels: int, group: int, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normalization of groups of channels, with mean and inverse standard deviation."""
    del channels, pixels
    y: jax.Array = group_norm(x, group, weight, bias, eps)
    return (y, *_statistics(x.reshape(rows, group, -1), (-1,), eps, keepdims=False))


def _statistics(x: jax.Array, axes: tuple[int, ...], eps: float, *, keepdims: bool) -> tuple[jax.Array, jax.Array]:
    return x.mean(axes, keepdims=keepdims), lax.rsqrt(x.var(axes, keepdims=keepdims) + eps)


@op("instance_norm.default")
def instance_norm(
    x: jax.Array,
    weight: Optional,
    bias: Optional,
    running_mean: Optional,
    running_var: Optional,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> jax.Array:
    """Normalization of every channel of every example. The capture writes the running statistics out."""
    del momentum, cudnn_enabled
    if not use_input_stats:
        x = jnp.moveaxis(x, 1, -1)
        return jnp.moveaxis(_by_statistics(x, running_mean, running_var, weight, bias, eps), -1, 1)
    y: jax.Array = as_kernel(_instance_norm, x, weight, bias, eps=eps)
    return y


def _instance_norm(x: jax.Array, weight: Optional, bias: Optional, *, eps: float) -> jax.Array:
    y = _standardized(x, tuple(range(2, x.ndim)), eps)
    return _scaled(y, _per_channel(weight, x), _per_channel(bias, x))


@op("batch_norm.default")
def batch_norm(
    x: jax.Array,
    weight: Optional,
    bias: Optional,
    running_mean: Optional,
    running_var: Optional,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
    *,
    channels_last: bool = False,
) -> jax.Array:
    """Batch normalization where nobody reads the new statistics."""
    del cudnn_enabled
    y: jax.Array = batch_norm_with_statistics(
        x, weight, bias, running_mean, running_var, training, momentum, eps, channels_last=channels_last
    )[0]
    return y


@op("_native_batch_norm_legit_functional.default")
def batch_norm_with_statistics(
    x: jax.Array,
    weight: Optional,
    bias: Optional,
    running_mean: Optional,
    running_var: Optional,
    training: bool,
    momentum: float,
    eps: float,
    *,
    channels_last: bool = False,
) -> Any:
    """Batch normalization, with (mean, inverse standard deviation, new running mean, new running variance)."""
    axis = -1 if channels_last else 1
    x = jnp.moveaxis(x, axis, -1)
    if not training:
        y = _by_statistics(x, running_mean, running_var, weight, bias, eps)
        return jnp.moveaxis(y, -1, axis), running_mean, running_var, running_mean, running_var
    scale = jnp.ones(x.shape[-1], x.dtype) if weight is None else weight
    y, mean, var = normalize_by_batch(x, scale, jnp.zeros_like(scale) if bias is None else bias, eps)
    y, mean, var = jnp.moveaxis(y, -1, axis), mean.reshape(-1), var.reshape(-1)
    count = x.size // x.shape[-1]
    if count == 1 and running_var is not None:
        raise ValueError("expected more than 1 value per channel in training, as PyTorch does")
    new_mean, new_var = _moved(running_mean, mean, momentum), _moved(running_var, var * count / (count - 1), momentum)
    # PyTorch has no gradient of the statistics that it saves for its own backward pass.
    return y, lax.stop_gradient(mean), lax.stop_gradient(lax.rsqrt(var + eps)), new_mean, new_var


@op("_native_batch_norm_legit.no_stats")
def batch_norm_without_running(
    x: jax.Array, weight: Optional, bias: Optional, training: bool, momentum: float, eps: float
) -> Any:
    """Batch normalization of a module that tracks no statistics."""
    return batch_norm_with_statistics(x, weight, bias, None, None, training, momentum, eps)[:3]


@op("_native_batch_norm_legit_no_training.default")
def batch_norm_in_evaluation(
    x: jax.Array,
    weight: Optional,
    bias: Optional,
    running_mean: Optional,
    running_var: Optional,
    momentum: float,
    eps: float,
    *,
    channels_last: bool = False,
) -> Any:
    """Batch normalization by the running statistics, with the two empty tensors that a backward pass would save."""
    y, *_ = batch_norm_with_statistics(
        x, weight, bias, running_mean, running_var, False, momentum, eps, channels_last=channels_last
    )
    return y, jnp.zeros(0, y.dtype), jnp.zeros(0, y.dtype)


def _moved(running: Optional, new: jax.Array, momentum: float) -> Optional:
    """Move running statistics towards new ones."""
    if running is None:
        return None
    return (1 - momentum) * running + momentum * lax.stop_gradient(new).astype(running.dtype)


def _by_statistics(x: jax.Array, mean: Any, var: Any, weight: Optional, bias: Optional, eps: float) -> jax.Array:
    """Normalize [..., C] by given statistics [C]."""
    y: jax.Array = as_kernel(_normalized, x, mean, var, weight, bias, eps=eps)
    return y


def _normalized(x: jax.Array, mean: Any, var: Any, weight: Optional, bias: Optional, *, eps: float) -> jax.Array:
    return _scaled((x - mean) * lax.rsqrt(var + eps), weight, bias)


@op("_weight_norm.default")
def weight_norm(v: jax.Array, g: jax.Array, dim: int = 0) -> jax.Array:
    """v scaled to the norms g, each over all axes but one, or over all with the dim -1."""
    axes = tuple(i for i in range(v.ndim) if i != dim)
    return v * (g / jnp.sqrt(jnp.square(v).sum(axes, keepdims=True)))
