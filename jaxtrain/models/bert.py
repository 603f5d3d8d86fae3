"""BERT (Devlin et al. 2018, arXiv:1810.04805).

It computes what `transformers.BertForMaskedLM` and `BertForSequenceClassification` compute.
"""

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
from jaxtrain.models.files.hf_config import fields_from_hf, labels_from_hf, labels_to_hf, require
from jaxtrain.models.layers.dropout import dropout
from jaxtrain.models.layers.encoder import (
    ATTENTION_SHARDING,
    Key,
    SelfAttention,
    gelu,
    linear,
    linear_names,
    norm_names,
    scan_blocks,
    split_key,
    stack_blocks,
)
from jaxtrain.models.layers.layer_norm import LayerNorm
from jaxtrain.models.layers.linear import product


@dataclass(frozen=True)
class BertConfig:
    """Configuration of a BERT, with the field names of `transformers.BertConfig`.

    Attributes:
      classifier_dropout: Dropout rate before the classifier; None for `hidden_dropout_prob`.
      pad_token_id: Token whose embedding gets no gradient as an input, as `torch.nn.Embedding(padding_idx=…)`; None
        for no such token.
      num_labels: Number of classes of the classifier; None for the masked-language-modeling head.

    Raises:
      UserError: The width is not divisible by the heads.
    """

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    classifier_dropout: float | None = None
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    num_labels: int | None = None

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise UserError(
                f"hidden_size {self.hidden_size} is not divisible by num_attention_heads {self.num_attention_heads}: "
                "change one of them"
            )


class Bert(nnx.Module):
    """BERT with a masked-language-modeling head or a classifier.

    Called as `model(tokens, mask, token_types, rng)`:

    Args:
      tokens: int [B, T].
      mask: [B, T], True or 1 at tokens, False or 0 at padding; None for no padding.
      token_types: int [B, T]; None for type 0 everywhere.
      rng: Dropout key for training mode, or None.

    Returns:
      Logits [B, T, vocab_size] of the masked language model, or [B, num_labels] of the classifier.

    Raises:
      UserError: T exceeds `max_position_embeddings`.
    """

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embeddings = Embeddings(config, rngs=rngs)
        self.blocks = stack_blocks(lambda rngs: Block(config, rngs=rngs), config.num_hidden_layers, rngs=rngs)
        self.head = (MaskedLM if config.num_labels is None else Classifier)(config, rngs=rngs)

    def __call__(
        self,
        tokens: jax.Array,
        mask: jax.Array | None = None,
        token_types: jax.Array | None = None,
        rng: Key = None,
    ) -> jax.Array:
        embed_rng, blocks_rng, head_rng = split_key(rng, 3)
        x = self.embeddings(tokens, jnp.zeros_like(tokens) if token_types is None else token_types, embed_rng)
        key_mask = None if mask is None else mask.astype(bool)[:, None, None]
        x = scan_blocks(self.blocks, self.config.num_hidden_layers, x, key_mask, blocks_rng)
        return self.head(x, self.embeddings.word[...], head_rng)


class Embeddings(nnx.Module):
    """Sum of token, type and position embeddings, normalized: [B, T] → [B, T, hidden_size]."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        normal = nnx.initializers.normal(config.initializer_range)

        def table(rows: int) -> nnx.Param:
            return nnx.Param(normal(rngs.params(), (rows, config.hidden_size)))

        self.word = table(config.vocab_size)
        self.position = table(config.max_position_embeddings)
        self.token_type = table(config.type_vocab_size)
        self.norm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        if config.pad_token_id is not None:
            self.word[...] = self.word[...].at[config.pad_token_id].set(0.0)

    def __call__(self, tokens: jax.Array, token_types: jax.Array, rng: Key) -> jax.Array:
        config, t = self.config, tokens.shape[1]
        if t > config.max_position_embeddings:
            raise UserError(f"rows of {t} tokens exceed max_position_embeddings {config.max_position_embeddings}")
        words = self.word[...][tokens]
        if config.pad_token_id is not None:
            # As `torch.nn.Embedding(padding_idx=…)`: no gradient as an input, but one as a prediction.
            words = jnp.where((tokens == config.pad_token_id)[..., None], lax.stop_gradient(words), words)
        x = words + self.token_type[...][token_types] + self.position[...][None, :t]
        return dropout(self.norm(x), config.hidden_dropout_prob, rng)


class Block(nnx.Module):
    """Post-norm block: norm(x + attention(x)), then norm(x + mlp(x)), on [B, T, hidden_size]."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs) -> None:
        width, std, epsilon = config.hidden_size, config.initializer_range, config.layer_norm_eps
        self.rate = config.hidden_dropout_prob
        self.attention = SelfAttention(
            width, config.num_attention_heads, std, dropout=config.attention_probs_dropout_prob, rngs=rngs
        )
        self.attention_norm = LayerNorm(width, epsilon)
        self.intermediate = linear(width, config.intermediate_size, std, rngs=rngs)
        self.output = linear(config.intermediate_size, width, std, rngs=rngs)
        self.output_norm = LayerNorm(width, epsilon)

    def __call__(self, x: jax.Array, mask: jax.Array | None, rng: Key) -> jax.Array:
        rngs = split_key(rng, 3)
        x = self.attention_norm(dropout(self.attention(x, mask, rngs[0]), self.rate, rngs[1]) + x)
        hidden = checkpoint_name(gelu(self.intermediate(x)), "hidden")
        return self.output_norm(dropout(self.output(hidden), self.rate, rngs[2]) + x)


class MaskedLM(nnx.Module):
    """Masked-language-modeling head, its output projection tied to the word embeddings."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs) -> None:
        width = config.hidden_size
        self.bias = nnx.Param(jnp.zeros(config.vocab_size))
        self.dense = linear(width, width, config.initializer_range, rngs=rngs)
        self.norm = LayerNorm(width, config.layer_norm_eps)

    def __call__(self, x: jax.Array, words: jax.Array, rng: Key) -> jax.Array:
        del rng
        return product(self.norm(gelu(self.dense(x))), words.T) + self.bias[...][None, None]


class Classifier(nnx.Module):
    """Classification head on the first token of a row."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs) -> None:
        assert config.num_labels is not None
        width, std = config.hidden_size, config.initializer_range
        self.rate = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.pooler = linear(width, width, std, rngs=rngs)
        self.classifier = linear(width, config.num_labels, std, rngs=rngs)

    def __call__(self, x: jax.Array, words: jax.Array, rng: Key) -> jax.Array:
        del words
        return self.classifier(dropout(jnp.tanh(self.pooler(x[:, 0])), self.rate, rng))


SHARDING = {
    **ATTENTION_SHARDING,
    "embeddings/word": P("tensor", "fsdp"),
    "embeddings/(position|token_type)": P(None, "fsdp"),
    "blocks/intermediate/kernel": P("pipeline", "fsdp", "tensor"),
    "blocks/intermediate/bias": P("pipeline", ("tensor", "fsdp")),
    "blocks/output/kernel": P("pipeline", "tensor", "fsdp"),
    "blocks/.*/(bias|scale)": P("pipeline", "fsdp"),
    "head/bias": P(("tensor", "fsdp")),
    "head/.*/kernel": P("fsdp", None),
    ".*/(bias|scale)": P("fsdp"),
}
"""Mesh axes that shard each axis, by parameter path (`jaxtrain.distributed`), as for GPT-2."""


def torch_names(config: BertConfig) -> NameTable:
    """Return the names in `transformers.BertForMaskedLM` or `BertForSequenceClassification`."""
    table = {
        f"embeddings/{ours}": TorchParam(f"bert.embeddings.{ours}_embeddings.weight")
        for ours in ("word", "position", "token_type")
    }
    layer = "bert.encoder.layer.{layer}"
    table |= norm_names("embeddings/norm", "bert.embeddings.LayerNorm")
    for ours, theirs in {
        "query": "self.query",
        "key": "self.key",
        "value": "self.value",
        "out": "output.dense",
    }.items():
        table |= linear_names(f"blocks/attention/{ours}", f"{layer}.attention.{theirs}")
    table |= norm_names("blocks/attention_norm", f"{layer}.attention.output.LayerNorm")
    table |= linear_names("blocks/intermediate", f"{layer}.intermediate.dense")
    table |= linear_names("blocks/output", f"{layer}.output.dense")
    table |= norm_names("blocks/output_norm", f"{layer}.output.LayerNorm")
    if config.num_labels is not None:
        table |= linear_names("head/pooler", "bert.pooler.dense") | linear_names("head/classifier", "classifier")
        return NameTable(table)
    predictions = "cls.predictions"
    table["head/bias"] = TorchParam(f"{predictions}.bias")
    table |= linear_names("head/dense", f"{predictions}.transform.dense")
    table |= norm_names("head/norm", f"{predictions}.transform.LayerNorm")
    tied = {"weight": "bert.embeddings.word_embeddings.weight", "bias": f"{predictions}.bias"}
    return NameTable(table, tied={f"{predictions}.decoder.{alias}": name for alias, name in tied.items()})


HEADS = {"BertForMaskedLM": None, "BertForSequenceClassification": "num_labels"}
"""Field of a config.json that the head depends on, by architecture."""


def from_hf(config: Mapping[str, Any]) -> BertConfig:
    """Return the `BertConfig` of a Hugging Face config.json, of the current or an older `transformers`.

    The head is that of the first of "architectures"; without any it is the masked language model's.

    Raises:
      UserError: A setting that changes the result is not supported.
    """
    require(
        config,
        model_type="bert",
        hidden_act="gelu",
        is_decoder=False,
        add_cross_attention=False,
        position_embedding_type="absolute",
        pruned_heads={},
        quantization_config=None,
    )
    architecture = (config.get("architectures") or ["BertForMaskedLM"])[0]
    if architecture not in HEADS:
        raise UserError(f"architecture {architecture!r} is not supported: only {', '.join(HEADS)} are")
    if architecture == "BertForMaskedLM":
        require(config, tie_word_embeddings=True)
    config.get("tie_word_embeddings")  # read: a classifier has no output layer that could be tied
    labels = labels_from_hf(config) if HEADS[architecture] else None
    return BertConfig(**(fields_from_hf(config, BertConfig) | {"num_labels": labels}))


def to_hf(config: BertConfig) -> dict[str, Any]:
    """Return the config.json from which `transformers` creates the same model.

    Example:
      >>> from_hf(to_hf(BertConfig(num_labels=3))) == BertConfig(num_labels=3)
      True
    """
    values = {field.name: getattr(config, field.name) for field in fields(config) if field.name != "num_labels"}
    architecture = "BertForMaskedLM" if config.num_labels is None else "BertForSequenceClassification"
    labels = {} if config.num_labels is None else labels_to_hf(config.num_labels)
    return {"model_type": "bert", "architectures": [architecture], "hidden_act": "gelu", **values, **labels}
