"""Parts shared by the encoders BERT and ViT: self-attention, layers with their PyTorch names, the scan over blocks.

The parameters of the blocks are stacked along a leading layer axis and scanned over. Each block is a unit of
rematerialization; "attention" and "hidden" name the inputs of its two projections into the residual stream.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxtrain.interop import LINEAR, TorchParam
from jaxtrain.models.attention import attention
from jaxtrain.models.layers.linear import Linear
from jaxtrain.passes import block, kernel

Key = jax.Array | None

gelu = kernel(partial(jax.nn.gelu, approximate=False))
"""Exact GELU, x Φ(x), as `torch.nn.functional.gelu`; JAX's default is the tanh approximation."""


class SelfAttention(nnx.Module):
    """Bidirectional multi-head self-attention on [B, T, width], including the output projection.

    Called as `layer(x, mask, rng)` with a mask bool, broadcastable to [B, heads, T, T], True where a query attends to a
    key, and a dropout key; both may be None.
    """

    def __init__(
        self, width: int, heads: int, std: float, *, dropout: float = 0.0, qkv_bias: bool = True, rngs: nnx.Rngs
    ) -> None:
        self.heads, self.dropout = heads, dropout
        self.query = linear(width, width, std, bias=qkv_bias, rngs=rngs)
        self.key = linear(width, width, std, bias=qkv_bias, rngs=rngs)
        self.value = linear(width, width, std, bias=qkv_bias, rngs=rngs)
        self.out = linear(width, width, std, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array | None, rng: Key) -> jax.Array:
        b, t, width = x.shape
        q, k, v = (
            project(x).reshape(b, t, self.heads, width // self.heads) for project in (self.query, self.key, self.value)
        )
        attended = attention(q, k, v, mask=mask, dropout=self.dropout, rng=rng)
        return self.out(checkpoint_name(attended.reshape(b, t, width), "attention"))


ATTENTION_SHARDING = {
    "blocks/attention/(query|key|value)/kernel": P("pipeline", "fsdp", "tensor"),
    "blocks/attention/(query|key|value)/bias": P("pipeline", ("tensor", "fsdp")),
    "blocks/attention/out/kernel": P("pipeline", "tensor", "fsdp"),
}
"""Mesh axes that shard each axis, by parameter path (`jaxtrain.distributed`)."""


def linear(n: int, m: int, std: float, *, bias: bool = True, rngs: nnx.Rngs) -> Linear:
    """Return a linear layer with normal weights of standard deviation `std` and a zero bias."""
    return Linear(n, m, use_bias=bias, kernel_init=nnx.initializers.normal(std), rngs=rngs)


def stack_blocks(make: Callable[[nnx.Rngs], Any], layers: int, *, rngs: nnx.Rngs) -> Any:
    """Return one block whose parameters have a leading axis of size `layers`."""
    return nnx.vmap(lambda key: make(nnx.Rngs(key)))(jax.random.split(rngs.params(), layers))


def scan_blocks(blocks: Any, layers: int, x: jax.Array, mask: jax.Array | None, rng: Key) -> jax.Array:
    """Apply the stacked blocks in turn, each as `block(x, mask, rng)` with its own key."""
    graphdef, parameters = nnx.split(blocks)
    apply = block(lambda layer, x, mask, rng: nnx.merge(graphdef, layer)(x, mask, rng))
    rngs = None if rng is None else jax.random.split(rng, layers)
    x, _ = lax.scan(lambda x, layer: (apply(layer[0], x, mask, layer[1]), None), x, (parameters, rngs))
    return x


def split_key(rng: Key, n: int) -> list[Key]:
    """Return n keys, or n times None without a key."""
    return [None] * n if rng is None else list(jax.random.split(rng, n))


def linear_names(ours: str, theirs: str, *, bias: bool = True) -> dict[str, TorchParam]:
    """Return the entries of a linear layer in a name table."""
    weight = {f"{ours}/kernel": TorchParam(f"{theirs}.weight", LINEAR)}
    return weight | ({f"{ours}/bias": TorchParam(f"{theirs}.bias")} if bias else {})


def norm_names(ours: str, theirs: str) -> dict[str, TorchParam]:
    """Return the entries of a layer normalization in a name table."""
    return {f"{ours}/scale": TorchParam(f"{theirs}.weight"), f"{ours}/bias": TorchParam(f"{theirs}.bias")}
