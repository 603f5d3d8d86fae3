"""A model of any size in a folder: sharded safetensors in bfloat16 whose data are holes, which take no disk."""

import json
import struct
from pathlib import Path

import torch
import transformers

from tests.data.finetuning.templates import byte_level, write_folder

LLAMA_7B = {"max_position_embeddings": 4096}  # the other defaults of `LlamaConfig` are those of Llama 2 7B
LLAMA_70B = LLAMA_7B | {
    **{"hidden_size": 8192, "intermediate_size": 28672},
    **{"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8},
}
SHARD = 5 * 10**9


def write_sparse_llama(folder: Path, sizes: dict[str, int]) -> Path:
    """Write the folder of a Llama, with a tokenizer and a chat template."""
    write_folder(folder, "chatml", byte_level())
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**sizes))
    model.config.save_pretrained(folder)
    shards, size = [{}], 0
    for name, x in model.state_dict().items():
        if size + 2 * x.numel() > SHARD:
            shards.append({})
            size = 0
        offsets = [size, size + 2 * x.numel()]
        shards[-1][name] = {"dtype": "BF16", "shape": list(x.shape), "data_offsets": offsets}
        size = offsets[1]
    weight_map = {}
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        header = json.dumps(tensors).encode()
        with (folder / file).open("wb") as opened:
            opened.write(struct.pack("<Q", len(header)) + header)
            opened.truncate(8 + len(header) + max(x["data_offsets"][1] for x in tensors.values()))
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def write_conversations(path: Path, rows: int) -> Path:
    """Write conversations that fill at least so many rows of 4,096 tokens."""
    chat = [{"role": "user", "content": "What is 6 times 7? " * 30}, {"role": "assistant", "content": "42. " * 100}]
    path.write_text((json.dumps({"messages": chat}) + "\n") * (8 * rows))
    return path
