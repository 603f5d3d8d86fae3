"""Batch normalization as `torch.nn.BatchNorm2d` computes it.

flax's layer differs in three ways: its momentum is the weight of the old statistics, its running variance is biased,
and it computes the variance as E[x²] − E[x]².
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.interop import NameTable, TorchParam
from jaxtrain.passes import kernel

M = TypeVar("M", bound=nnx.Module)


class BatchNorm(nnx.Module):
    """Batch normalization of [..., features] over all axes but the last, as `torch.nn.BatchNorm2d`.

    In training mode it uses the statistics of the batch, and updates the running mean and the running unbiased variance
    with weight `momentum`. With more than one group (`set_batch_norm_groups`) the rows are divided into consecutive
    groups, each normalized separately, and the running statistics are those of the first group.

    Args:
      features: Size of the last axis.
      momentum: Weight of the batch in the running statistics, as in PyTorch.
      epsilon: Term added to the variance.

    Raises:
      UserError: On a call, if the rows are not divisible by the groups, or a channel has one value to train on.
    """

    def __init__(self, features: int, *, momentum: float = 0.1, epsilon: float = 1e-5) -> None:
        self.momentum, self.epsilon, self.groups = momentum, epsilon, 1
        self.scale = nnx.Param(jnp.ones(features))
        self.bias = nnx.Param(jnp.zeros(features))
        self.mean = nnx.BatchStat(jnp.zeros(features))
        self.var = nnx.BatchStat(jnp.ones(features))
        self.count = nnx.BatchStat(jnp.zeros([], np.int32))

    def __call__(self, x: jax.Array, training: bool) -> jax.Array:
        scale, bias = self.scale[...], self.bias[...]
        if not training:
            shape = (1,) * (x.ndim - 1) + (-1,)
            mean, var = self.mean[...].reshape(shape), self.var[...].reshape(shape)
            return _normalize(x, mean, var, scale, bias, self.epsilon)
        if self.groups == 1:
            y, mean, var = normalize_by_batch(x, scale, bias, self.epsilon)
        else:
            grouped = self._split_groups(x)
            y, means, variances = jax.vmap(lambda x: normalize_by_batch(x, scale, bias, self.epsilon))(grouped)
            y, mean, var = y.reshape(x.shape), means[0], variances[0]
        self._update_running_statistics(mean.reshape(-1), var.reshape(-1), n=x.size // x.shape[-1] // self.groups)
        return y

    def _split_groups(self, x: jax.Array) -> jax.Array:
        if x.shape[0] % self.groups:
            raise UserError(
                f"{x.shape[0]} rows do not divide into {self.groups} BatchNorm groups: use a multiple of {self.groups}"
            )
        return x.reshape(self.groups, -1, *x.shape[1:])

    def _update_running_statistics(self, mean: jax.Array, var: jax.Array, n: int) -> None:
        if n < 2:
            raise UserError(f"BatchNorm needs more than 1 value per channel to train on, got {n}: use larger batches")
        unbiased = var * (n / (n - 1))
        for running, new in ((self.mean, mean), (self.var, unbiased)):
            old = running[...]
            running[...] = (1 - self.momentum) * old + self.momentum * new.astype(old.dtype)
        self.count[...] += 1


@kernel
def _normalize(
    x: jax.Array, mean: jax.Array, var: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float
) -> jax.Array:
    return (x - mean) * jax.lax.rsqrt(var + epsilon) * scale.reshape(mean.shape) + bias.reshape(mean.shape)


@jax.custom_jvp
def _with_statistics(
    x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the normalized batch, its mean and its biased variance."""
    axes = tuple(range(x.ndim - 1))
    mean = x.mean(axes, keepdims=True)
    var = jnp.square(x - mean).mean(axes, keepdims=True)
    return _normalize(x, mean, var, scale, bias, epsilon), mean, var


@_with_statistics.defjvp
def _with_statistics_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    """Differentiate by two sums over the batch, which are also the gradients of scale and bias.

    Operation by operation the formula has five, among them that of the deviations from the mean, which is 0, and its
    gradient reads the batch once more.
    """
    (x, scale, bias, epsilon), (dx, dscale, dbias, _) = primals, tangents
    y, mean, var = _with_statistics(x, scale, bias, epsilon)
    axes, root = tuple(range(x.ndim - 1)), jnp.sqrt(var + epsilon)
    standard, factor = (x - mean) / root, scale.reshape(mean.shape) / root
    dmean = dx.mean(axes, keepdims=True)
    along = (dx * standard).mean(axes, keepdims=True)
    slope, shift = dscale.reshape(mean.shape) - factor * along, dbias.reshape(mean.shape) - factor * dmean
    return (y, mean, var), (factor * dx + standard * slope + shift, dmean, 2 * root * along)


@kernel
def normalize_by_batch(
    x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normalize [..., features] by the statistics of the batch.

    Args:
      x: Array [..., features].
      scale: Factors [features].
      bias: Summands [features].
      epsilon: Term added to the variance.

    Returns:
      A tuple (normalized batch, its mean, its biased variance); the last two are [1, ..., features].
    """
    normalized: tuple[jax.Array, jax.Array, jax.Array] = _with_statistics(x, scale, bias, epsilon)
    return normalized


def set_batch_norm_groups(model: M, groups: int) -> M:
    """Set the number of groups of rows for which every `BatchNorm` of a model computes statistics.

    With as many groups as devices it follows PyTorch's DistributedDataParallel, where every device normalizes its own
    rows and the running statistics are those of rank 0. With one group it is `SyncBatchNorm`.

    Args:
      model: Model, modified in place.
      groups: Number of groups.

    Returns:
      `model`.

    Example:
      >>> x = jnp.array([[0.0], [2.0], [10.0], [14.0]])
      >>> set_batch_norm_groups(BatchNorm(1, epsilon=0.0), 2)(x, True).ravel().tolist()
      [-1.0, 1.0, -1.0, 1.0]
    """
    for _, module in nnx.iter_modules(model):
        if isinstance(module, BatchNorm):
            module.groups = groups
    return model


def running_statistics(layers: Mapping[str, str]) -> NameTable:
    """Return PyTorch's names of running statistics.

    Args:
      layers: PyTorch's module of every `BatchNorm`, by its path in the JAX model.
    """
    names = {"mean": "running_mean", "var": "running_var", "count": "num_batches_tracked"}
    return NameTable(
        {
            f"{path}/{ours}": TorchParam(f"{module}.{theirs}")
            for path, module in layers.items()
            for ours, theirs in names.items()
        }
    )
