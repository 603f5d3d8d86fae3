"""Multilayer perceptron: linear layers with ReLU and optional dropout between them."""

import itertools

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxtrain.interop import LINEAR, NameTable, TorchParam
from jaxtrain.models.layers.dropout import dropout


class MLP(nnx.Module):
    """Multilayer perceptron, called as `model(x, rng)`.

    It flattens images or vectors [B, ...] to `sizes[0]` features and returns logits [B, `sizes[-1]`]. Dropout follows
    every ReLU when there is a key `rng`.

    Args:
      sizes: Number of features of the input and of the output of every layer.
      dropout: Dropout rate.
      rngs: Source of the initial weights.
    """

    def __init__(self, sizes: tuple[int, ...] = (784, 512, 10), dropout: float = 0.0, *, rngs: nnx.Rngs) -> None:
        self.dropout = dropout
        self.layers = nnx.List([nnx.Linear(n, m, rngs=rngs) for n, m in itertools.pairwise(sizes)])

    def __call__(self, x: jax.Array, rng: jax.Array | None = None) -> jax.Array:
        x = x.reshape(x.shape[0], -1)
        hidden = self.layers[:-1]
        rngs = [None] * len(hidden) if rng is None else jax.random.split(rng, len(hidden))
        for layer, layer_rng in zip(hidden, rngs, strict=True):
            x = dropout(jax.nn.relu(layer(x)), self.dropout, layer_rng)
        return self.layers[-1](x)


SHARDING = {
    r"layers/\d*[02468]/kernel": P("fsdp", "tensor"),
    r"layers/\d*[13579]/kernel": P("tensor", "fsdp"),
    r"layers/\d*[02468]/bias": P(("tensor", "fsdp")),
    r"layers/\d*[13579]/bias": P("fsdp"),
}
"""Mesh axes that shard each axis, by parameter path (`jaxtrain.distributed`). Layers are sharded by columns and by rows
in turn, so that the activations between two of them stay sharded."""


def torch_names(n_layers: int) -> NameTable:
    """Return the names in `torch.nn.Sequential(Flatten(), Linear, ReLU, Linear, …)`."""
    table = {}
    for i in range(n_layers):
        table[f"layers/{i}/kernel"] = TorchParam(f"{2 * i + 1}.weight", LINEAR)
        table[f"layers/{i}/bias"] = TorchParam(f"{2 * i + 1}.bias")
    return NameTable(table)
