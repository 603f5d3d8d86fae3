"""Tiny models of published families with random weights, and their inputs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import nn
from torch.utils import _pytree

ROWS, LENGTH, VOCABULARY, WIDTH = 2, 8, 61, 32
TEXT = {
    **{"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"intermediate_size": 48, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2},
    "pad_token_id": 0,
}
GROUPED = {**TEXT, "num_key_value_heads": 2, "use_cache": False}
EXPERTS = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
VISION = {
    **{"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
    **{"image_size": 16, "patch_size": 8},
}


class Family(NamedTuple):
    """A family.

    Attributes:
      module: Creates the module in training mode. It returns a tuple of floating-point tensors.
      inputs: From a seed to its keyword arguments.
    """

    module: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, np.ndarray]]


class Floats(nn.Module):
    """A module with its floating-point results as a tuple."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **inputs: Any) -> tuple[torch.Tensor, ...]:
        leaves = _pytree.tree_leaves(self.module(**inputs))
        return tuple(x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point())


def _transformer(name: str, config: str, inputs: Callable[[int], dict[str, np.ndarray]], **options: Any) -> Family:
    def module() -> nn.Module:
        made = getattr(transformers, config)(**options)
        if hasattr(made, "num_experts") or "Mixtral" in config:
            made._experts_implementation = "batched_mm"  # PyTorch's grouped products have no float64 on the CPU
        return Floats(getattr(transformers, name)(made)).train()

    return Family(module, inputs)


def _tokens(seed: int, name: str = "input_ids") -> dict[str, np.ndarray]:
    return {name: np.random.default_rng(seed).integers(3, VOCABULARY, (ROWS, LENGTH))}


def _padded(seed: int) -> dict[str, np.ndarray]:
    mask = np.ones((ROWS, LENGTH), np.int64)
    mask[1, -3:] = 0
    return {**_tokens(seed), "attention_mask": mask}


def _pairs(seed: int) -> dict[str, np.ndarray]:
    return {**_tokens(seed), **_tokens(seed + 1, "decoder_input_ids")}


def _images(seed: int) -> dict[str, np.ndarray]:
    return {"pixel_values": _normal(seed, ROWS, 3, 16, 16)}


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _decoder(family: str, **options: Any) -> Family:
    return _transformer(f"{family}ForCausalLM", f"{family}Config", _tokens, **{**GROUPED, **options})


def _plain(make: Callable[[], nn.Module], *shapes: tuple[int, ...]) -> Family:
    """A module of `torch.nn` with positional arguments."""

    class Positional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = make()

        def forward(self, **inputs: Any) -> tuple[torch.Tensor, ...]:
            leaves = _pytree.tree_leaves(self.module(*inputs.values()))
            return tuple(x for x in leaves if x.is_floating_point())

    return Family(
        lambda: Positional().train(),
        lambda seed: {f"x{i}": _normal(seed + i, *shape) for i, shape in enumerate(shapes)},
    )


def _image_network() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        *(nn.ConvTranspose2d(8, 4, 3, stride=2, padding=1, output_padding=1), nn.MaxPool2d(2), nn.GroupNorm(2, 4)),
        *(nn.PixelShuffle(2), nn.Upsample(scale_factor=2, mode="bilinear"), nn.AdaptiveAvgPool2d(3), nn.Dropout2d(0.1)),
        *(nn.Flatten(), nn.Linear(9, 4), nn.BatchNorm1d(4), nn.Hardswish(), nn.LogSoftmax(-1)),
    )


FAMILIES: dict[str, Family] = {
    "gpt2": _transformer(
        *("GPT2LMHeadModel", "GPT2Config", _tokens),
        **{"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 32, "use_cache": False},
    ),
    "llama": _decoder("Llama"),
    "bert": _transformer("BertForMaskedLM", "BertConfig", _padded, **TEXT),
    "t5": _transformer(
        *("T5ForConditionalGeneration", "T5Config", _pairs),
        **{"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
        use_cache=False,
    ),
    "vit": _transformer("ViTForImageClassification", "ViTConfig", _images, **VISION, hidden_dropout_prob=0.1),
    "image_network": _plain(_image_network, (ROWS, 4, 8, 8)),
    "lstm": _plain(lambda: nn.LSTM(8, 8, 2, dropout=0.1, bidirectional=True, batch_first=True), (ROWS, 5, 8)),
    "transformer": _plain(
        lambda: nn.Transformer(WIDTH, 4, 1, 1, 48, batch_first=True), (ROWS, LENGTH, WIDTH), (ROWS, LENGTH, WIDTH)
    ),
    "mistral": _decoder("Mistral", sliding_window=4),
    "qwen2": _decoder("Qwen2"),
    "qwen3": _decoder("Qwen3", head_dim=8),
    "gemma": _decoder("Gemma", head_dim=8),
    "gemma2": _decoder("Gemma2", head_dim=8, sliding_window=4),
    "gemma3": _decoder("Gemma3", head_dim=8, sliding_window=4),
    "phi3": _decoder("Phi3"),
    "olmo2": _decoder("Olmo2"),
    "granite": _decoder("Granite"),
    "cohere": _decoder("Cohere"),
    "starcoder2": _decoder("Starcoder2"),
    "stablelm": _decoder("StableLm"),
    "mixtral": _decoder("Mixtral", num_local_experts=4),
    "qwen3_moe": _transformer("Qwen3MoeForCausalLM", "Qwen3MoeConfig", _tokens, **EXPERTS, head_dim=8),
    "gpt_neox": _transformer("GPTNeoXForCausalLM", "GPTNeoXConfig", _tokens, **TEXT, use_cache=False),
    "opt": _transformer(
        *("OPTForCausalLM", "OPTConfig", _tokens),
        **{"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"ffn_dim": 48, "word_embed_proj_dim": WIDTH, "max_position_embeddings": 32, "use_cache": False},
    ),
    "mamba": _transformer(
        *("MambaForCausalLM", "MambaConfig", _tokens),
        **{"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "state_size": 4, "use_cache": False},
    ),
    "roberta": _transformer("RobertaForMaskedLM", "RobertaConfig", _padded, **TEXT),
    "albert": _transformer("AlbertForMaskedLM", "AlbertConfig", _padded, **TEXT, embedding_size=16),
    "distilbert": _transformer(
        *("DistilBertForMaskedLM", "DistilBertConfig", _padded),
        **{"vocab_size": VOCABULARY, "dim": WIDTH, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
        max_position_embeddings=32,
    ),
    "electra": _transformer("ElectraForMaskedLM", "ElectraConfig", _padded, **TEXT, embedding_size=16),
    "modernbert": _transformer(
        "ModernBertForMaskedLM", "ModernBertConfig", _padded, **TEXT, cls_token_id=1, sep_token_id=2, local_attention=4
    ),
    "dinov2": _transformer("Dinov2ForImageClassification", "Dinov2Config", _images, **VISION),
    "convnext": _transformer(
        *("ConvNextForImageClassification", "ConvNextConfig", _images),
        **{"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 2, "image_size": 16},
    ),
    "resnet": _transformer(
        *("ResNetForImageClassification", "ResNetConfig", _images),
        **{"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"},
    ),
    "gru": _plain(lambda: nn.GRU(8, 8, 2, bidirectional=True), (5, ROWS, 8)),
    "attention": _plain(
        lambda: nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True), *[(ROWS, 5, WIDTH)] * 3
    ),
}
