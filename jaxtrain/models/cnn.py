"""The smallest convolutional classifier: conv 3×3, ReLU, linear."""

import jax
from flax import nnx

from jaxtrain.interop import CONV, NameTable, TorchParam, linear_after_flatten


class CNN(nnx.Module):
    """Images [B, H, W, C] → logits [B, classes]. The convolution has no padding, as PyTorch's default."""

    def __init__(
        self, image_shape: tuple[int, int, int] = (32, 32, 3), width: int = 16, classes: int = 10, *, rngs: nnx.Rngs
    ) -> None:
        height, width_px, channels = image_shape
        self.conv = nnx.Conv(channels, width, kernel_size=(3, 3), padding="VALID", rngs=rngs)
        self.head = nnx.Linear((height - 2) * (width_px - 2) * width, classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(self.conv(x))
        return self.head(x.reshape(x.shape[0], -1))


def torch_names(image_shape: tuple[int, int, int] = (32, 32, 3), width: int = 16) -> NameTable:
    """The names in `torch.nn.Sequential(Conv2d(3, 16, 3), ReLU(), Flatten(), Linear(…, 10))`."""
    height, width_px, _ = image_shape
    flattened = linear_after_flatten(width, height - 2, width_px - 2)
    return NameTable(
        {
            "conv/kernel": TorchParam("0.weight", CONV),
            "conv/bias": TorchParam("0.bias"),
            "head/kernel": TorchParam("3.weight", flattened),
            "head/bias": TorchParam("3.bias"),
        }
    )
