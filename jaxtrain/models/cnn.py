"""The smallest convolutional classifier: conv 3×3, ReLU, linear; if asked, BatchNorm before the ReLU, dropout after."""

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxtrain.interop import AS_IS, CONV, NameTable, TorchParam, linear_after_flatten
from jaxtrain.models.batch_norm import BatchNorm, running_statistics
from jaxtrain.models.dropout import dropout


class CNN(nnx.Module):
    """Images [B, H, W, C] → logits [B, classes]. The convolution has no padding, as PyTorch's default.

    With a dropout key it drops; in training mode BatchNorm uses the batch's statistics.
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
"""By path, the axes of a mesh that divide each axis (`jaxtrain.distributed`)."""


def torch_names(
    image_shape: tuple[int, int, int] = (32, 32, 3), width: int = 16, *, batch_norm: bool = False
) -> NameTable:
    """The names in `torch.nn.Sequential(Conv2d(3, 16, 3), [BatchNorm2d(16),] ReLU(), Flatten(), Linear(…, 10))`."""
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
    """The names of the BatchNorm's running statistics in the same model."""
    return running_statistics({"norm": "1"})
