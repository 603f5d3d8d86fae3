"""The parameters of a T5: the mesh axes that shard them and their names in `transformers`."""

from jax.sharding import PartitionSpec as P

from jaxtrain.interop import LINEAR, NameTable, TorchParam
from jaxtrain.models.t5.t5_config import T5Config, is_gated

SHARDING = {
    "shared": P("tensor", "fsdp"),
    "lm_head/kernel": P("fsdp", "tensor"),
    ".*/relative_attention_bias": P("fsdp", "tensor"),
    ".*/blocks/.*_attention/[qkv]/kernel": P(None, "fsdp", "tensor"),
    ".*/blocks/.*_attention/o/kernel": P(None, "tensor", "fsdp"),
    ".*/blocks/mlp/(wi|linear)/kernel": P(None, "fsdp", "tensor"),
    ".*/blocks/mlp/wo/kernel": P(None, "tensor", "fsdp"),
    ".*/blocks/.*/scale": P(None, "fsdp"),
    ".*/final_layer_norm/scale": P("fsdp"),
}
"""Mesh axes that shard each axis, by parameter path, as for GPT-2."""


def torch_names(config: T5Config) -> NameTable:
    """Return the names in `transformers.T5ForConditionalGeneration`."""
    table = {"shared": TorchParam("shared.weight")}
    for stack in ("encoder", "decoder"):
        first = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        table[f"{stack}/relative_attention_bias"] = TorchParam(first)
        table[f"{stack}/final_layer_norm/scale"] = TorchParam(f"{stack}.final_layer_norm.weight")
        attentions = {"self": "SelfAttention"} | ({"cross": "EncDecAttention"} if stack == "decoder" else {})
        layer = f"{stack}.block.{{layer}}.layer"
        for i, (ours, theirs) in enumerate(attentions.items()):
            table[f"{stack}/blocks/{ours}_norm/scale"] = TorchParam(f"{layer}.{i}.layer_norm.weight")
            for name in "qkvo":
                kernel = TorchParam(f"{layer}.{i}.{theirs}.{name}.weight", LINEAR)
                table[f"{stack}/blocks/{ours}_attention/{name}/kernel"] = kernel
        i = len(attentions)
        table[f"{stack}/blocks/mlp_norm/scale"] = TorchParam(f"{layer}.{i}.layer_norm.weight")
        mlp = (
            {"wi": "wi_0", "linear": "wi_1", "wo": "wo"}
            if is_gated(config.feed_forward_proj)
            else {"wi": "wi", "wo": "wo"}
        )
        for ours, theirs in mlp.items():
            kernel = TorchParam(f"{layer}.{i}.DenseReluDense.{theirs}.weight", LINEAR)
            table[f"{stack}/blocks/mlp/{ours}/kernel"] = kernel
    tied = {f"{stack}.embed_tokens.weight": "shared.weight" for stack in ("encoder", "decoder")}
    if config.tie_word_embeddings:
        tied["lm_head.weight"] = "shared.weight"
    else:
        table["lm_head/kernel"] = TorchParam("lm_head.weight", LINEAR)
    return NameTable(table, tied=tied)
