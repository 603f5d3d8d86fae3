"""A multilayer perceptron: linear layers with ReLU, and dropout if asked, between."""

import itertools

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxtrain.interop import LINEAR, NameTable, TorchParam
from jaxtrain.models.dropout import dropout


class MLP(nnx.Module):
    """Images or vectors [B, …] flattened to `sizes[0]` features → logits [B, `sizes[-1]`].

    With a dropout key it drops behind every ReLU.
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
"""By path, the axes of a mesh that divide each axis (`jaxtrain.distributed`): layers are divided by columns and by rows
in turn, so that what is between two of them stays divided."""


def torch_names(n_layers: int) -> NameTable:
    """The names in `torch.nn.Sequential(Flatten(), Linear, ReLU, Linear, …)`."""
    table = {}
    for i in range(n_layers):
        table[f"layers/{i}/kernel"] = TorchParam(f"{2 * i + 1}.weight", LINEAR)
        table[f"layers/{i}/bias"] = TorchParam(f"{2 * i + 1}.bias")
    return NameTable(table)
