"""Batch normalisation as `torch.nn.BatchNorm2d` computes it.

flax's differs in three ways: its momentum is the weight of the old statistics, its running variance is the biased one,
and it computes the variance as E[x²] − E[x]².
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.interop import NameTable, TorchParam
from jaxtrain.precision import kernel


class BatchNorm(nnx.Module):
    """[…, features] normalised over all axes but the last; in training by the batch's own statistics.

    Running statistics move by `momentum` towards the batch's mean and unbiased variance, in every training pass.
    """

    def __init__(self, features: int, *, momentum: float = 0.1, epsilon: float = 1e-5) -> None:
        self.momentum, self.epsilon = momentum, epsilon
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
        y, mean, var = _normalised_by_batch(x, scale, bias, self.epsilon)
        self._remember(mean.reshape(-1), var.reshape(-1), n=x.size // x.shape[-1])
        return y

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
