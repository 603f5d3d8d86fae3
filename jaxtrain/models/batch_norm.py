"""Batch normalisation as `torch.nn.BatchNorm2d` computes it.

flax's differs in three ways: its momentum is the weight of the old statistics, its running variance is the biased one,
and it computes the variance as E[x²] − E[x]².
"""

from collections.abc import Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.interop import NameTable, TorchParam
from jaxtrain.transforms import kernel

M = TypeVar("M", bound=nnx.Module)


class BatchNorm(nnx.Module):
    """[…, features] normalised over all axes but the last; in training by the batch's own statistics.

    Running statistics move by `momentum` towards the batch's mean and unbiased variance, in every training pass. With
    more than one of `groups` (`in_groups`) the batch is that many, in order, each normalised by itself; the running
    statistics are the first one's.
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
            return _normalised(x, mean, var, scale, bias, self.epsilon)
        if self.groups == 1:
            y, mean, var = _normalised_by_batch(x, scale, bias, self.epsilon)
        else:
            grouped = self._grouped(x)
            y, means, variances = jax.vmap(lambda x: _normalised_by_batch(x, scale, bias, self.epsilon))(grouped)
            y, mean, var = y.reshape(x.shape), means[0], variances[0]
        self._remember(mean.reshape(-1), var.reshape(-1), n=x.size // x.shape[-1] // self.groups)
        return y

    def _grouped(self, x: jax.Array) -> jax.Array:
        if x.shape[0] % self.groups:
            raise UserError(
                f"BatchNorm was given {x.shape[0]} rows for {self.groups} groups: make them a multiple of {self.groups}"
            )
        return x.reshape(self.groups, -1, *x.shape[1:])

    def _remember(self, mean: jax.Array, var: jax.Array, n: int) -> None:
        if n < 2:
            raise UserError(f"BatchNorm was given {n} value a channel to train on: give it more than 1")
        unbiased = var * (n / (n - 1))
        for running, new in ((self.mean, mean), (self.var, unbiased)):
            old = running[...]
            running[...] = (1 - self.momentum) * old + self.momentum * new.astype(old.dtype)
        self.count[...] += 1


@kernel
def _normalised_by_batch(
    x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """And the batch's mean and biased variance."""
    axes = tuple(range(x.ndim - 1))
    mean = x.mean(axes, keepdims=True)
    var = jnp.square(x - mean).mean(axes, keepdims=True)
    return _normalised(x, mean, var, scale, bias, epsilon), mean, var


@kernel
def _normalised(
    x: jax.Array, mean: jax.Array, var: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float
) -> jax.Array:
    return (x - mean) * jax.lax.rsqrt(var + epsilon) * scale.reshape(mean.shape) + bias.reshape(mean.shape)


def in_groups(model: M, groups: int) -> M:
    """`model`, with every `BatchNorm` in it taking its statistics over so many groups of a batch's rows.

    As many as there are devices make PyTorch's DistributedDataParallel: each device normalises by its own rows, and the
    running statistics are those of rank 0, whose buffers it broadcasts. With 1 it is `SyncBatchNorm`.

    >>> x = jnp.array([[0.0], [2.0], [10.0], [14.0]])
    >>> in_groups(BatchNorm(1, epsilon=0.0), 2)(x, True).ravel().tolist()
    [-1.0, 1.0, -1.0, 1.0]
    """
    for _, module in nnx.iter_modules(model):
        if isinstance(module, BatchNorm):
            module.groups = groups
    return model


def running_statistics(layers: Mapping[str, str]) -> NameTable:
    """PyTorch's names of the running statistics of the `BatchNorm`s at these paths, its modules being the values."""
    names = {"mean": "running_mean", "var": "running_var", "count": "num_batches_tracked"}
    return NameTable(
        {
            f"{path}/{ours}": TorchParam(f"{module}.{theirs}")
            for path, module in layers.items()
            for ours, theirs in names.items()
        }
    )
