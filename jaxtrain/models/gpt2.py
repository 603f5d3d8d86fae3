"""GPT-2 (Radford et al. 2019), as `transformers.GPT2LMHeadModel` computes it.

The parameters of the blocks are stacked along a leading layer axis and the model scans over them, so one block is
compiled whatever the depth. Each block is a unit of rematerialization; "attention" and "hidden" name the inputs of its
two projections into the residual stream.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxtrain.errors import UserError
from jaxtrain.interop import NameTable, TorchParam
from jaxtrain.models.files.hf_config import fields_from_hf, require
from jaxtrain.models.layers.decoder import KVCache, Visible, attend, token_positions, visible_keys
from jaxtrain.models.layers.dropout import dropout as _dropout
from jaxtrain.models.layers.layer_norm import LayerNorm
from jaxtrain.models.layers.linear import Linear, product
from jaxtrain.passes import block, kernel

_gelu = kernel(partial(jax.nn.gelu, approximate=True))


@dataclass(frozen=True)
class GPT2Config:
    """Configuration of a GPT-2, with the field names of `transformers.GPT2Config`.

    `dropout` stands for its `resid_pdrop`, `embd_pdrop` and `attn_pdrop`.

    Raises:
      UserError: The width is not divisible by the heads.
    """

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    dropout: float = 0.0
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head:
            raise UserError(f"n_embd {self.n_embd} is not divisible by n_head {self.n_head}: change one of them")


class GPT2(nnx.Module):
    """GPT-2 with a language-modeling head tied to the token embedding.

    Called with tokens int [B, T] it returns logits [B, T, vocab_size]; the other inputs are those of
    `jaxtrain.models.llama.Llama`, with a dropout key `rng` for training mode.
    """

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        normal = nnx.initializers.normal(config.initializer_range)
        # Plain parameters, because nnx.Embed converts to the dtype it was created with.
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
        x, _, cache = self.features(tokens, rng, positions, segments, cache)
        return self.logits(x) if cache is None else (self.logits(x), cache)

    def features(
        self,
        tokens: jax.Array,
        rng: jax.Array | None,
        positions: jax.Array | None,
        segments: jax.Array | None,
        cache: KVCache | None,
    ) -> tuple[jax.Array, None, KVCache | None]:
        """Return what `logits` are computed from, no auxiliary outputs, and the updated cache, as those of a Llama."""
        config, t = self.config, tokens.shape[1]
        _check_length(config, t)
        embed_rng, blocks_rng = (None, None) if rng is None else jax.random.split(rng)
        visible = visible_keys(t, segments, None, cache)
        x = self.wte[...][tokens] + self.wpe[...][token_positions(positions, t, cache)]
        x = _dropout(x, config.dropout, embed_rng)
        graphdef, layers = nnx.split(self.blocks)
        apply = block(lambda layer, *inputs: nnx.merge(graphdef, layer)(*inputs))
        rngs = None if blocks_rng is None else jax.random.split(blocks_rng, config.n_layer)
        numbers = None if cache is None else np.arange(config.n_layer, dtype=np.int32)
        x, keys = lax.scan(lambda x, layer: apply(layer[0], x, visible, *layer[1:]), x, (layers, rngs, numbers))
        return x, None, None if cache is None else cache.append(keys, segments, np.zeros(config.n_layer, bool))

    def logits(self, x: jax.Array) -> jax.Array:
        """Return the logits [B, T, vocab_size] of the last block's output [B, T, n_embd]."""
        return product(self.ln_f(x), self.projection)

    def hidden(
        self,
        tokens: jax.Array,
        rng: jax.Array | None = None,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
    ) -> jax.Array:
        """Return the hidden states [B, T, n_embd] whose product with `projection` are the logits."""
        return self.ln_f(self.features(tokens, rng, positions, segments, None)[0])

    @property
    def projection(self) -> jax.Array:
        """Kernel [n_embd, vocab_size] of the language-modeling head."""
        return self.wte[...].T

    @property
    def context_length(self) -> int:
        """Largest number of tokens in a sequence."""
        return self.config.n_positions

    def empty_cache(self, rows: int, slots: int) -> KVCache:
        """Return a cache for `slots` tokens in each of `rows` rows, in the dtype of the parameters."""
        config = self.config
        _check_length(config, slots)
        shape = (rows, slots, config.n_head, config.n_embd // config.n_head)
        return KVCache.empty([None] * config.n_layer, shape, self.wte[...].dtype)


class Block(nnx.Module):
    """Pre-norm block: x + attention(norm(x)), then x + mlp(norm(x)), on [B, T, n_embd]."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs) -> None:
        width, std = config.n_embd, config.initializer_range
        self.config = config
        self.ln_1 = LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.qkv = _linear(width, 3 * width, std, rngs)
        # Projections into the residual stream are initialized by depth (section 2.3 of the paper).
        into_residual = std / math.sqrt(2 * config.n_layer)
        self.attn_proj = _linear(width, width, into_residual, rngs)
        self.ln_2 = LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.fc = _linear(width, 4 * width, std, rngs)
        self.mlp_proj = _linear(4 * width, width, into_residual, rngs)

    def __call__(
        self, x: jax.Array, visible: Visible, rng: jax.Array | None, layer: jax.Array | None
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        rate = self.config.dropout
        rngs = [None] * 3 if rng is None else jax.random.split(rng, 3)
        attended, keys = self.attention(self.ln_1(x), visible, rngs[0], layer)
        x = x + _dropout(self.attn_proj(checkpoint_name(attended, "attention")), rate, rngs[1])
        hidden = checkpoint_name(_gelu(self.fc(self.ln_2(x))), "hidden")
        return x + _dropout(self.mlp_proj(hidden), rate, rngs[2]), keys

    def attention(
        self, x: jax.Array, visible: Visible, rng: jax.Array | None, layer: jax.Array | None
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        """Return causal self-attention of [B, T, n_embd] before its output projection, and keys and values to cache."""
        b, t, width = x.shape
        heads = self.config.n_head
        q, k, v = (y.reshape(b, t, heads, width // heads) for y in jnp.split(self.qkv(x), 3, axis=-1))
        attended = attend(q, k, v, visible, layer, rng, window=None, dropout=self.config.dropout)
        return attended.reshape(b, t, width), None if layer is None else (k, v)


def _stacked_blocks(config: GPT2Config, rngs: nnx.Rngs) -> Block:
    """Return one `Block` whose parameters have a leading layer axis."""
    keys = jax.random.split(rngs.params(), config.n_layer)
    return nnx.vmap(lambda key: Block(config, rngs=nnx.Rngs(key)))(keys)


def _check_length(config: GPT2Config, tokens: int) -> None:
    # JAX would clamp a position that is too large.
    if tokens > config.n_positions:
        raise UserError(f"{tokens} tokens exceed n_positions {config.n_positions}: use shorter sequences")


def _linear(n: int, m: int, std: float, rngs: nnx.Rngs) -> Linear:
    return Linear(n, m, kernel_init=nnx.initializers.normal(std), rngs=rngs)


SHARDING = {
    "wte": P("tensor", "fsdp"),
    "wpe": P(None, "fsdp"),
    "blocks/(qkv|fc)/kernel": P("pipeline", "fsdp", "tensor"),
    "blocks/(qkv|fc)/bias": P("pipeline", ("tensor", "fsdp")),
    "blocks/(attn|mlp)_proj/kernel": P("pipeline", "tensor", "fsdp"),
    "blocks/.*/(bias|scale)": P("pipeline", "fsdp"),
    "ln_f/(bias|scale)": P("fsdp"),
}
"""Mesh axes that shard each axis, by parameter path (`jaxtrain.distributed`). `tensor` is that of Megatron-LM (Shoeybi
et al. 2019): the columns of the first product of each half of a block, the rows of the second, the vocabulary."""


def torch_names(config: GPT2Config | None = None) -> NameTable:
    """Return the names in `transformers.GPT2LMHeadModel`, whose Conv1D stores [in, out] as JAX does.

    `config` is not used: the names are the same for all.
    """
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
    """Return the `GPT2Config` of a Hugging Face config.json.

    Raises:
      UserError: A setting that changes the result is not supported, or the three dropout rates differ.
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
        raise UserError(f"n_inner {config['n_inner']} is not supported: only 4 * n_embd, {4 * width}, is")
    rates = {name: config.get(name, 0.1) for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    if len(set(rates.values())) > 1:
        raise UserError(f"dropout rates {rates} must be equal")
    return GPT2Config(**given, dropout=rates["resid_pdrop"])


def to_hf(config: GPT2Config) -> dict[str, Any]:
    """Return the config.json from which `transformers` creates the same model.

    Example:
      >>> from_hf(to_hf(GPT2Config(n_layer=3))) == GPT2Config(n_layer=3)
      True
    """
    values = {field.name: getattr(config, field.name) for field in fields(config) if field.name != "dropout"}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout)
    return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **values, **rates}
