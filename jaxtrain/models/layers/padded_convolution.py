"""Convolution and pooling with PyTorch's symmetric padding; XLA's "SAME" pads unevenly with stride 2."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def conv(channels: int, features: int, *, kernel: int, stride: int = 1, rngs: nnx.Rngs) -> nnx.Conv:
    """Return `torch.nn.Conv2d(channels, features, kernel, stride, padding=kernel // 2, bias=False)` for [B, H, W, C].

    Initial weights are those of He et al. (2015) for ReLU, by fan-out.

    Example:
      >>> import jax.numpy as jnp
      >>> conv(3, 8, kernel=3, stride=2, rngs=nnx.Rngs(0))(jnp.ones((1, 6, 6, 3))).shape
      (1, 3, 3, 8)
    """
    around = (kernel // 2, kernel // 2)
    return nnx.Conv(
        channels,
        features,
        kernel_size=(kernel, kernel),
        strides=(stride, stride),
        padding=(around, around),
        use_bias=False,
        kernel_init=nnx.initializers.variance_scaling(2.0, "fan_out", "normal"),
        rngs=rngs,
    )


def max_pool(x: jax.Array, *, kernel: int, stride: int) -> jax.Array:
    """Apply `torch.nn.MaxPool2d(kernel, stride, padding=kernel // 2)` to [B, H, W, C], padding with −∞.

    Among equal maxima the first of a window in row-major order gets the gradient, and NaN counts as largest. The
    maximum is computed elementwise, because the gradient of XLA's pooling searches for every maximum on a CPU.

    Example:
      >>> import jax.numpy as jnp
      >>> max_pool(-jnp.arange(16.0).reshape(1, 4, 4, 1), kernel=3, stride=2)[0, :, :, 0].tolist()
      [[-0.0, -1.0], [-4.0, -5.0]]
    """
    around = kernel // 2
    x = jnp.pad(x, ((0, 0), (around, around), (around, around), (0, 0)), constant_values=-np.inf)
    rows, columns = (n - kernel + 1 for n in x.shape[1:3])
    highest = x[:, :rows:stride, :columns:stride]
    for i, j in itertools.product(range(kernel), repeat=2):
        shifted = x[:, i : i + rows : stride, j : j + columns : stride]
        highest = jnp.where((shifted > highest) | jnp.isnan(shifted), shifted, highest)
    return highest
