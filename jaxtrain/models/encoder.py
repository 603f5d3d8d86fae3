"""What the encoders BERT and ViT share: self-attention, layers and their PyTorch names, and the scan over blocks.

Blocks are alike, so their parameters are stacked along a leading layer axis and scanned over; each is a unit of
rematerialisation, in which "attention" and "hidden" (what enters its two projections into the residual stream) have
names.
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
from jaxtrain.models.linear import Linear
from jaxtrain.transforms import block, kernel

Key = jax.Array | None

gelu = kernel(partial(jax.nn.gelu, approximate=False))
"""x Φ(x) by the error function, as `torch.nn.functional.gelu`; JAX's default is an approximation by tanh."""


class SelfAttention(nnx.Module):
    """[B, T, width] → the same, its output projection included: every token sees every token that `mask` lets it see.

    `mask` bool, broadcastable to [B, heads, T, T]; with a key, weights are dropped at the rate `dropout`.
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
    "blocks/attention/(query|key|value)/kernel": P(None, "fsdp", "tensor"),
    "blocks/attention/(query|key|value)/bias": P(None, ("tensor", "fsdp")),
    "blocks/attention/out/kernel": P(None, "tensor", "fsdp"),
}
"""By path, the axes of a mesh that divide each axis (`jaxtrain.distributed`)."""


def linear(n: int, m: int, std: float, *, bias: bool = True, rngs: nnx.Rngs) -> Linear:
    """A linear layer, weights normal of standard deviation `std`, bias 0."""
    return Linear(n, m, use_bias=bias, kernel_init=nnx.initializers.normal(std), rngs=rngs)


def stacked(make: Callable[[nnx.Rngs], Any], layers: int, *, rngs: nnx.Rngs) -> Any:
    """One block whose parameters have a leading axis of `layers`."""
    return nnx.vmap(lambda key: make(nnx.Rngs(key)))(jax.random.split(rngs.params(), layers))


def scanned(blocks: Any, layers: int, x: jax.Array, mask: jax.Array | None, rng: Key) -> jax.Array:
    """`x` through the stacked `blocks`, each called as `block(x, mask, rng)` with a key of its own."""
    graphdef, parameters = nnx.split(blocks)
    apply = block(lambda layer, x, mask, rng: nnx.merge(graphdef, layer)(x, mask, rng))
    rngs = None if rng is None else jax.random.split(rng, layers)
    x, _ = lax.scan(lambda x, layer: (apply(layer[0], x, mask, layer[1]), None), x, (parameters, rngs))
    return x


def split(rng: Key, n: int) -> list[Key]:
    """So many keys, or so many times None."""
    return [None] * n if rng is None else list(jax.random.split(rng, n))


def linear_names(ours: str, theirs: str, *, bias: bool = True) -> dict[str, TorchParam]:
    """A linear layer's entries in a name table."""
    weight = {f"{ours}/kernel": TorchParam(f"{theirs}.weight", LINEAR)}
    return weight | ({f"{ours}/bias": TorchParam(f"{theirs}.bias")} if bias else {})


def norm_names(ours: str, theirs: str) -> dict[str, TorchParam]:
    """A layer normalisation's."""
    return {f"{ours}/scale": TorchParam(f"{theirs}.weight"), f"{ours}/bias": TorchParam(f"{theirs}.bias")}
