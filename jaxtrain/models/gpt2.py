"""GPT-2 (Radford et al. 2019), as `transformers.GPT2LMHeadModel` computes it.

Blocks are alike, so their parameters are stacked along a leading layer axis and the model scans over them: one block
is compiled, however deep the model. Each block is a unit of rematerialisation, in which "attention" and "hidden" (what
enters its two projections into the residual stream) have names.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxtrain.errors import UserError
from jaxtrain.interop import NameTable, TorchParam
from jaxtrain.models.attention import attention
from jaxtrain.models.decoder import Kept, KVCache, expecting, places, remembered, visible
from jaxtrain.models.dropout import dropout as _dropout
from jaxtrain.models.hf_config import fields_from_hf, require
from jaxtrain.models.layer_norm import LayerNorm
from jaxtrain.models.linear import Linear, product
from jaxtrain.transforms import block


@dataclass(frozen=True)
class GPT2Config:
    """Sizes, dropout rate, initial weights' standard deviation; the names are those of `transformers.GPT2Config`."""

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    dropout: float = 0.0
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02


class GPT2(nnx.Module):
    """Tokens int [B, T] → logits [B, T, vocab_size]; with a cache, (logits, the cache with these tokens).

    With a dropout key it is in training mode. Positions, segments and cache are as in `jaxtrain.models.llama.Llama`.
    """

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        normal = nnx.initializers.normal(config.initializer_range)
        # Bare parameters: nnx.Embed keeps the dtype it was made with.
        self.wte = nnx.Param(normal(rngs.params(), (config.vocab_size, config.n_embd)))
        self.wpe = nnx.Param(normal(rngs.params(), (config.n_positions, config.n_embd)))
        self.blocks = _stacked_blocks(config, rngs)
        self.ln_f = LayerNorm(config.n_embd, config.layer_norm_epsilon)

    def __call__(
        self,
        tokens: jax.Array,
        rng: jax.Array | None = None,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
        cache: KVCache | None = None,
    ) -> Any:
        config, t = self.config, tokens.shape[1]
        _check_length(config, t)
        embed_rng, blocks_rng = (None, None) if rng is None else jax.random.split(rng)
        cache, segments = expecting(cache, segments, tokens)
        mask = visible(t, segments, None, cache)
        x = self.wte[...][tokens] + self.wpe[...][places(positions, t, cache)]
        x = _dropout(x, config.dropout, embed_rng)
        graphdef, layers = nnx.split(self.blocks)
        apply = block(lambda layer, *inputs: nnx.merge(graphdef, layer)(*inputs))
        rngs = None if blocks_rng is None else jax.random.split(blocks_rng, config.n_layer)
        at, kept = (None, None) if cache is None else (cache.length, (cache.k, cache.v))
        x, kept = lax.scan(lambda x, layer: apply(layer[0], x, mask, *layer[1:], at), x, (layers, rngs, kept))
        logits = product(self.ln_f(x), self.wte[...].T)
        return logits if cache is None or kept is None else (logits, cache.holding(kept, t))

    @property
    def context_length(self) -> int:
        """Largest number of tokens of a text."""
        return self.config.n_positions

    def empty_cache(self, rows: int, slots: int) -> KVCache:
        """For `slots` tokens in each of `rows`, in the dtype of the parameters."""
        config, dtype = self.config, self.wte[...].dtype
        _check_length(config, slots)
        return KVCache.empty(config.n_layer, rows, slots, config.n_head, config.n_embd // config.n_head, dtype)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): [B, T, n_embd] → the same."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs) -> None:
        width, std = config.n_embd, config.initializer_range
        self.config = config
        self.ln_1 = LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.qkv = _linear(width, 3 * width, std, rngs)
        # Projections into the residual stream start smaller with depth (section 2.3 of the paper).
        into_residual = std / math.sqrt(2 * config.n_layer)
        self.attn_proj = _linear(width, width, into_residual, rngs)
        self.ln_2 = LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.fc = _linear(width, 4 * width, std, rngs)
        self.mlp_proj = _linear(4 * width, width, into_residual, rngs)

    def __call__(
        self, x: jax.Array, mask: jax.Array | None, rng: jax.Array | None, kept: Kept | None, at: jax.Array | None
    ) -> tuple[jax.Array, Kept | None]:
        rate = self.config.dropout
        rngs = [None] * 3 if rng is None else jax.random.split(rng, 3)
        attended, kept = self.attention(self.ln_1(x), mask, rngs[0], kept, at)
        x = x + _dropout(self.attn_proj(checkpoint_name(attended, "attention")), rate, rngs[1])
        hidden = checkpoint_name(jax.nn.gelu(self.fc(self.ln_2(x)), approximate=True), "hidden")
        return x + _dropout(self.mlp_proj(hidden), rate, rngs[2]), kept

    def attention(
        self, x: jax.Array, mask: jax.Array | None, rng: jax.Array | None, kept: Kept | None, at: jax.Array | None
    ) -> tuple[jax.Array, Kept | None]:
        """Causal multi-head self-attention: [B, T, n_embd] → the same, before the output projection."""
        b, t, width = x.shape
        heads = self.config.n_head
        q, k, v = (y.reshape(b, t, heads, width // heads) for y in jnp.split(self.qkv(x), 3, axis=-1))
        k, v, kept = remembered(k, v, kept, at)
        attended = attention(q, k, v, mask=mask, causal=mask is None, dropout=self.config.dropout, rng=rng)
        return attended.reshape(b, t, width), kept


def _stacked_blocks(config: GPT2Config, rngs: nnx.Rngs) -> Block:
    """One `Block` whose parameters have a leading layer axis."""
    keys = jax.random.split(rngs.params(), config.n_layer)
    return nnx.vmap(lambda key: Block(config, rngs=nnx.Rngs(key)))(keys)


def _check_length(config: GPT2Config, tokens: int) -> None:
    # An index too large would be taken for the largest.
    if tokens > config.n_positions:
        raise UserError(f"{tokens} tokens are more than n_positions {config.n_positions}: shorten them, or retrain")


def _linear(n: int, m: int, std: float, rngs: nnx.Rngs) -> Linear:
    return Linear(n, m, kernel_init=nnx.initializers.normal(std), rngs=rngs)


SHARDING = {
    "wte": P("tensor", "fsdp"),
    "wpe": P(None, "fsdp"),
    "blocks/(qkv|fc)/kernel": P(None, "fsdp", "tensor"),
    "blocks/(qkv|fc)/bias": P(None, ("tensor", "fsdp")),
    "blocks/(attn|mlp)_proj/kernel": P(None, "tensor", "fsdp"),
    "blocks/.*/(bias|scale)": P(None, "fsdp"),
    "ln_f/(bias|scale)": P("fsdp"),
}
"""By path, the axes of a mesh that divide each axis (`jaxtrain.distributed`); `tensor` as in Megatron-LM (Shoeybi et
al. 2019): columns into a half of a block, rows out of it, the vocabulary of the embedding."""


def torch_names(config: GPT2Config | None = None) -> NameTable:
    """The names in `transformers.GPT2LMHeadModel`, whose Conv1D keeps [in, out] as JAX does; those of every config."""
    del config
    blocks = {
        "ln_1": "ln_1",
        "qkv": "attn.c_attn",
        "attn_proj": "attn.c_proj",
        "ln_2": "ln_2",
        "fc": "mlp.c_fc",
        "mlp_proj": "mlp.c_proj",
    }
    table = {
        "wte": TorchParam("transformer.wte.weight"),
        "wpe": TorchParam("transformer.wpe.weight"),
    }
    for ours, theirs in blocks.items():
        weight = "scale" if ours.startswith("ln") else "kernel"
        table[f"blocks/{ours}/{weight}"] = TorchParam(f"transformer.h.{{layer}}.{theirs}.weight")
        table[f"blocks/{ours}/bias"] = TorchParam(f"transformer.h.{{layer}}.{theirs}.bias")
    table["ln_f/scale"] = TorchParam("transformer.ln_f.weight")
    table["ln_f/bias"] = TorchParam("transformer.ln_f.bias")
    return NameTable(table, tied={"lm_head.weight": "transformer.wte.weight"})


def from_hf(config: Mapping[str, Any]) -> GPT2Config:
    """The `GPT2Config` of a Hugging Face config.json; its dropout rates are to be one.

    Raises `UserError` for what would change the numbers and is not supported.
    """
    require(
        config,
        model_type="gpt2",
        activation_function="gelu_new",
        is_causal=True,
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=False,
        tie_word_embeddings=True,
        quantization_config=None,
    )
    given = fields_from_hf(config, GPT2Config)
    width = given.get("n_embd", GPT2Config.n_embd)
    if config.get("n_inner") not in (None, 4 * width):
        raise UserError(f"n_inner {config['n_inner']} is not supported: only four times n_embd, {4 * width}, is")
    rates = {name: config.get(name, 0.1) for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    if len(set(rates.values())) > 1:
        raise UserError(f"dropout rates {rates} are not supported: make them one")
    return GPT2Config(**given, dropout=rates["resid_pdrop"])


def to_hf(config: GPT2Config) -> dict[str, Any]:
    """A config.json that `transformers` reads back into the same model.

    >>> from_hf(to_hf(GPT2Config(n_layer=3))) == GPT2Config(n_layer=3)
    True
    """
    said = {field.name: getattr(config, field.name) for field in fields(config) if field.name != "dropout"}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout)
    return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **said, **rates}
