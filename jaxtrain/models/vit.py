"""The Vision Transformer (Dosovitskiy et al. 2020, arXiv:2010.11929).

It computes what `transformers.ViTForImageClassification` computes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxtrain.errors import UserError
from jaxtrain.interop import CONV, NameTable, TorchParam
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


@dataclass(frozen=True)
class ViTConfig:
    """Configuration of a ViT, with the field names of `transformers.ViTConfig`.

    Attributes:
      image_size: Side of a square, or (height, width), in pixels.
      patch_size: Side of a square, or (height, width), in pixels.
    """

    image_size: int | tuple[int, int] = 224
    patch_size: int | tuple[int, int] = 16
    num_channels: int = 3
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_dropout_prob: float = 0.0
    attention_probs_dropout_prob: float = 0.0
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    qkv_bias: bool = True
    num_labels: int = 1000

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of an image."""
        return (*_pair(self.image_size), self.num_channels)


class ViT(nnx.Module):
    """Vision Transformer classifier, called as `model(images, rng)` with a dropout key for training mode.

    It maps images [B, *image_shape] to logits [B, num_labels].

    Raises:
      UserError: On a call, if the images have another shape than that of the learned positions.
    """

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        width, std = config.hidden_size, config.initializer_range
        patch = _pair(config.patch_size)
        across, down = (side // size for side, size in zip(config.image_shape, patch, strict=False))
        normal, cut = nnx.initializers.normal(std), nnx.initializers.truncated_normal(std)
        self.cls_token = nnx.Param(cut(rngs.params(), (1, 1, width)))
        self.position_embeddings = nnx.Param(cut(rngs.params(), (1, across * down + 1, width)))
        self.patches = Patches(config.num_channels, width, patch, kernel_init=normal, rngs=rngs)
        self.blocks = stack_blocks(lambda rngs: Block(config, rngs=rngs), config.num_hidden_layers, rngs=rngs)
        self.norm = LayerNorm(width, config.layer_norm_eps)
        self.classifier = linear(width, config.num_labels, std, rngs=rngs)

    def __call__(self, images: jax.Array, rng: Key = None) -> jax.Array:
        config, rows = self.config, images.shape[0]
        if images.shape[1:] != config.image_shape:
            raise UserError(f"images must be {list(config.image_shape)}, got {list(images.shape[1:])}: resize them")
        embed_rng, blocks_rng = split_key(rng, 2)
        patches = self.patches(images)
        first = jnp.broadcast_to(self.cls_token[...], (rows, 1, config.hidden_size))
        x = jnp.concatenate([first, patches], axis=1) + self.position_embeddings[...]
        x = dropout(x, config.hidden_dropout_prob, embed_rng)
        x = scan_blocks(self.blocks, config.num_hidden_layers, x, None, blocks_rng)
        return self.classifier(self.norm(x)[:, 0])


class Patches(nnx.Conv):
    """Convolution of images [B, H, W, C] whose stride is the size of its kernel, to [B, patches, features].

    Each patch is used once, so that this is one matrix product. cuDNN has no convolution from bfloat16 to float32, in
    which the bias is added.
    """

    def __call__(self, images: jax.Array, out_sharding: Any = None) -> jax.Array:
        del out_sharding
        assert self.bias is not None
        kernel, bias = self.kernel[...], self.bias[...]
        height, width, channels, features = kernel.shape
        rows, down, across = images.shape[0], images.shape[1] // height, images.shape[2] // width
        whole = images[:, : down * height, : across * width].reshape(rows, down, height, across, width, channels)
        patches = whole.transpose(0, 1, 3, 2, 4, 5).reshape(rows * down * across, height * width * channels)
        embedded = patches @ kernel.reshape(-1, features) + bias.reshape(1, -1)
        return embedded.reshape(rows, down * across, features)


class Block(nnx.Module):
    """Pre-norm block: x + attention(norm(x)), then x + mlp(norm(x)), on [B, T, hidden_size]."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs) -> None:
        width, std, epsilon = config.hidden_size, config.initializer_range, config.layer_norm_eps
        self.rate = config.hidden_dropout_prob
        self.attention = SelfAttention(
            width,
            config.num_attention_heads,
            std,
            dropout=config.attention_probs_dropout_prob,
            qkv_bias=config.qkv_bias,
            rngs=rngs,
        )
        self.norm_before = LayerNorm(width, epsilon)
        self.norm_after = LayerNorm(width, epsilon)
        self.fc1 = linear(width, config.intermediate_size, std, rngs=rngs)
        self.fc2 = linear(config.intermediate_size, width, std, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array | None, rng: Key) -> jax.Array:
        rngs = split_key(rng, 3)
        x = x + dropout(self.attention(self.norm_before(x), mask, rngs[0]), self.rate, rngs[1])
        hidden = checkpoint_name(gelu(self.fc1(self.norm_after(x))), "hidden")
        return x + dropout(self.fc2(hidden), self.rate, rngs[2])


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


SHARDING = {
    **ATTENTION_SHARDING,
    "cls_token|position_embeddings": P(None, None, "fsdp"),
    "patches/kernel": P(None, None, None, "fsdp"),
    "blocks/fc1/kernel": P("pipeline", "fsdp", "tensor"),
    "blocks/fc1/bias": P("pipeline", ("tensor", "fsdp")),
    "blocks/fc2/kernel": P("pipeline", "tensor", "fsdp"),
    "blocks/.*/(bias|scale)": P("pipeline", "fsdp"),
    "classifier/kernel": P("fsdp", None),
    ".*/(bias|scale)": P("fsdp"),
}
"""Mesh axes that shard each axis, by parameter path (`jaxtrain.distributed`), as for GPT-2."""


def torch_names(config: ViTConfig) -> NameTable:
    """Return the names in `transformers.ViTForImageClassification`."""
    return _names(config, "vit.layers.{layer}", [f"attention.{x}_proj" for x in "qkvo"], ["mlp.fc1", "mlp.fc2"])


def file_names(config: ViTConfig) -> NameTable:
    """Return the names in checkpoint files, which `transformers` translates to the newer ones of its model."""
    attention = [
        f"attention.{name}" for name in ("attention.query", "attention.key", "attention.value", "output.dense")
    ]
    return _names(config, "vit.encoder.layer.{layer}", attention, ["intermediate.dense", "output.dense"])


def _names(config: ViTConfig, layer: str, attention: Sequence[str], mlp: Sequence[str]) -> NameTable:
    embeddings = "vit.embeddings"
    table = {
        "cls_token": TorchParam(f"{embeddings}.cls_token"),
        "position_embeddings": TorchParam(f"{embeddings}.position_embeddings"),
        "patches/kernel": TorchParam(f"{embeddings}.patch_embeddings.projection.weight", CONV),
        "patches/bias": TorchParam(f"{embeddings}.patch_embeddings.projection.bias"),
    }
    for ours, theirs in zip(("query", "key", "value", "out"), attention, strict=True):
        bias = config.qkv_bias or ours == "out"
        table |= linear_names(f"blocks/attention/{ours}", f"{layer}.{theirs}", bias=bias)
    table |= norm_names("blocks/norm_before", f"{layer}.layernorm_before")
    table |= norm_names("blocks/norm_after", f"{layer}.layernorm_after")
    for ours, theirs in zip(("fc1", "fc2"), mlp, strict=True):
        table |= linear_names(f"blocks/{ours}", f"{layer}.{theirs}")
    return NameTable(table | norm_names("norm", "vit.layernorm") | linear_names("classifier", "classifier"))


def from_hf(config: Mapping[str, Any]) -> ViTConfig:
    """Return the `ViTConfig` of a Hugging Face config.json.

    Raises:
      UserError: A setting that changes the result is not supported.
    """
    require(
        config,
        model_type="vit",
        architectures=["ViTForImageClassification"],
        hidden_act="gelu",
        quantization_config=None,
    )
    return ViTConfig(**(fields_from_hf(config, ViTConfig) | {"num_labels": labels_from_hf(config)}))


def to_hf(config: ViTConfig) -> dict[str, Any]:
    """Return the config.json from which `transformers` creates the same model.

    Example:
      >>> from_hf(to_hf(ViTConfig(image_size=(32, 64)))) == ViTConfig(image_size=(32, 64))
      True
    """
    values = {field.name: getattr(config, field.name) for field in fields(config) if field.name != "num_labels"}
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    return {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "hidden_act": "gelu",
        **values,
        **labels_to_hf(config.num_labels),
    }
