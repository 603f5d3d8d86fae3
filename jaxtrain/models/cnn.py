"""Small convolutional classifier: 3×3 convolution, optional BatchNorm, ReLU, optional dropout, linear."""

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxtrain.interop import AS_IS, CONV, NameTable, TorchParam, linear_after_flatten
from jaxtrain.models.batch_norm import BatchNorm, running_statistics
from jaxtrain.models.layers.dropout import dropout


class CNN(nnx.Module):
    """Convolutional classifier, called as `model(images, training, rng)`.

    It maps images [B, H, W, C] to logits [B, classes]. The convolution has no padding, as PyTorch's default. `training`
    makes BatchNorm use the statistics of the batch; dropout is applied when there is a key `rng`.

    Args:
      image_shape: Height, width and channels.
      width: Number of features of the convolution.
      classes: Number of logits.
      batch_norm: Whether a BatchNorm follows the convolution.
      dropout: Dropout rate after the ReLU.
      rngs: Source of the initial weights.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int] = (32, 32, 3),
        width: int = 16,
        classes: int = 10,
        *,
        batch_norm: bool = False,
        dropout: float = 0.0,
        rngs: nnx.Rngs,
    ) -> None:
        self.dropout = dropout
        height, width_px, channels = image_shape
        self.conv = nnx.Conv(channels, width, kernel_size=(3, 3), padding="VALID", rngs=rngs)
        self.norm = BatchNorm(width) if batch_norm else None
        self.head = nnx.Linear((height - 2) * (width_px - 2) * width, classes, rngs=rngs)

    def __call__(self, x: jax.Array, training: bool = False, rng: jax.Array | None = None) -> jax.Array:
        x = self.conv(x)
        if self.norm is not None:
            x = self.norm(x, training)
        x = dropout(jax.nn.relu(x), self.dropout, rng)
        return self.head(x.reshape(x.shape[0], -1))


SHARDING = {
    "conv/kernel": P(None, None, None, "fsdp"),
    "head/kernel": P("fsdp", None),
    ".*/(bias|scale)": P("fsdp"),
}
"""Mesh axes that shard each axis, by parameter path (`jaxtrain.distributed`)."""


def torch_names(
    image_shape: tuple[int, int, int] = (32, 32, 3), width: int = 16, *, batch_norm: bool = False
) -> NameTable:
    """Return the names in `nn.Sequential(Conv2d(3, 16, 3), [BatchNorm2d(16),] ReLU(), Flatten(), Linear(…, 10))`."""
    height, width_px, _ = image_shape
    head = 4 if batch_norm else 3
    table = {
        "conv/kernel": TorchParam("0.weight", CONV),
        "conv/bias": TorchParam("0.bias"),
    }
    if batch_norm:
        table |= {"norm/scale": TorchParam("1.weight", AS_IS), "norm/bias": TorchParam("1.bias", AS_IS)}
    table |= {
        "head/kernel": TorchParam(f"{head}.weight", linear_after_flatten(width, height - 2, width_px - 2)),
        "head/bias": TorchParam(f"{head}.bias"),
    }
    return NameTable(table)


def torch_buffers() -> NameTable:
    """Return the names of the running statistics in the same model."""
    return running_statistics({"norm": "1"})
