"""A multilayer perceptron: linear layers with ReLU between."""

import itertools

import jax
from flax import nnx

from jaxtrain.interop import LINEAR, NameTable, TorchParam


class MLP(nnx.Module):
    """Images or vectors [B, …] flattened to `sizes[0]` features → logits [B, `sizes[-1]`]."""

    def __init__(self, sizes: tuple[int, ...] = (784, 512, 10), *, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(n, m, rngs=rngs) for n, m in itertools.pairwise(sizes)])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], -1)
        for layer in self.layers[:-1]:
            x = jax.nn.relu(layer(x))
        return self.layers[-1](x)


def torch_names(n_layers: int) -> NameTable:
    """The names in `torch.nn.Sequential(Flatten(), Linear, ReLU, Linear, …)`."""
    table = {}
    for i in range(n_layers):
        table[f"layers/{i}/kernel"] = TorchParam(f"{2 * i + 1}.weight", LINEAR)
        table[f"layers/{i}/bias"] = TorchParam(f"{2 * i + 1}.bias")
    return NameTable(table)
