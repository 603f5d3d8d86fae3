"""The parameters of the Llama family: the mesh axes that shard them and their names in `transformers`."""

from collections.abc import Mapping

from jax.sharding import PartitionSpec as P

from jaxtrain.interop import LINEAR, NameTable, TorchParam
from jaxtrain.models.llama.llama_config import LlamaConfig

SHARDING = {
    "embed_tokens": P("tensor", "fsdp"),
    "lm_head": P("fsdp", "tensor"),
    "layers/.*/([qkv]|gate|up)_proj/kernel": P("pipeline", "fsdp", "tensor"),
    "layers/.*/([qkv]|gate|up)_proj/bias": P("pipeline", ("tensor", "fsdp")),
    "layers/.*/(o|down)_proj/kernel": P("pipeline", "tensor", "fsdp"),
    "layers/.*/(bias|scale)": P("pipeline", "fsdp"),
    "norm/scale": P("fsdp"),
}
"""Mesh axes that shard each axis, by parameter path, as for GPT-2."""


def torch_names(config: LlamaConfig) -> NameTable:
    """Return the names in the `transformers` model of the same type."""
    return name_table(config, _linear_names({f"mlp.{name}_proj": config.mlp_bias for name in ("gate", "up", "down")}))


def name_table(config: LlamaConfig, mlp: Mapping[str, TorchParam]) -> NameTable:
    """Return the name table of a model of the family; `mlp` is the part for its MLPs."""
    tied = {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_word_embeddings else {}
    return NameTable({**_embedding_names(config), **_attention_names(config), **mlp}, tied)


def _embedding_names(config: LlamaConfig) -> dict[str, TorchParam]:
    names = {"embed_tokens": TorchParam("model.embed_tokens.weight"), "norm/scale": TorchParam("model.norm.weight")}
    return names if config.tie_word_embeddings else names | {"lm_head": TorchParam("lm_head.weight", LINEAR)}


def _attention_names(config: LlamaConfig) -> dict[str, TorchParam]:
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["self_attn.q_norm", "self_attn.k_norm"] if config.qk_norm else []
    biased = {f"self_attn.{name}_proj": config.qkv_bias for name in "qkv"}
    return {
        f"layers/{name.replace('.', '/')}/scale": TorchParam(f"model.layers.{{layer}}.{name}.weight") for name in norms
    } | _linear_names(biased | {"self_attn.o_proj": config.attention_bias})


def _linear_names(biased: Mapping[str, bool]) -> dict[str, TorchParam]:
    names = {}
    for name, bias in biased.items():
        ours, theirs = f"layers/{name.replace('.', '/')}", f"model.layers.{{layer}}.{name}"
        names[f"{ours}/kernel"] = TorchParam(f"{theirs}.weight", LINEAR)
        if bias:
            names[f"{ours}/bias"] = TorchParam(f"{theirs}.bias")
    return names
