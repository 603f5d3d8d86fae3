"""Tiny models of published families with random weights, and their inputs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import nn
from torch.utils import _pytree

ROWS, LENGTH, VOCABULARY, WIDTH = 2, 8, 61, 32
IMAGE_TOKEN, FEATURES = VOCABULARY - 1, 4
"""The token that stands for a feature of an image, and the number of an image's features."""
TEXT = {
    **{"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"intermediate_size": 48, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2},
    "pad_token_id": 0,
}
GROUPED = {**TEXT, "num_key_value_heads": 2, "use_cache": False}
EXPERTS = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ENCODER_DECODER = {
    **{"vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "use_cache": False},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
    **{"max_position_embeddings": 32, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
    "decoder_start_token_id": 2,
}
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
        made._experts_implementation = "batched_mm"  # PyTorch's grouped products have no float64 on the CPU
        return Floats(getattr(transformers, name)(made)).train()

    return Family(module, inputs)


def tokens_of(seed: int, name: str = "input_ids") -> dict[str, np.ndarray]:
    return {name: np.random.default_rng(seed).integers(3, VOCABULARY, (ROWS, LENGTH))}


def padded_of(seed: int) -> dict[str, np.ndarray]:
    mask = np.ones((ROWS, LENGTH), np.int64)
    mask[1, -3:] = 0
    return {**tokens_of(seed), "attention_mask": mask}


def _pairs(seed: int) -> dict[str, np.ndarray]:
    return {**tokens_of(seed), **tokens_of(seed + 1, "decoder_input_ids")}


def images_of(seed: int) -> dict[str, np.ndarray]:
    return {"pixel_values": normal_of(seed, ROWS, 3, 16, 16)}


def normal_of(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _decoder(family: str, **options: Any) -> Family:
    return _transformer(f"{family}ForCausalLM", f"{family}Config", tokens_of, **{**GROUPED, **options})


def _plain(make: Callable[[], nn.Module], *shapes: tuple[int, ...]) -> Family:
    """A module of `torch.nn` with positional arguments."""

    class Positional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = make()
            for param in self.module.parameters():
                # The gradient of a key's bias is rounding alone: beside a bias of 0 AdamW would make it visible.
                if not param.any():
                    nn.init.uniform_(param, -0.1, 0.1)

        def forward(self, **inputs: Any) -> tuple[torch.Tensor, ...]:
            leaves = _pytree.tree_leaves(self.module(*inputs.values()))
            return tuple(x for x in leaves if x.is_floating_point())

    return Family(
        lambda: Positional().train(),
        lambda seed: {f"x{i}": normal_of(seed + i, *shape) for i, shape in enumerate(shapes)},
    )


def _features(*shape: int) -> Callable[[int], dict[str, np.ndarray]]:
    """Inputs of a speech model that takes features, with tokens for its decoder."""
    return lambda seed: {"input_features": normal_of(seed, ROWS, *shape), **tokens_of(seed, "decoder_input_ids")}


def _with_images(name: str, config: str, text: str, vision: str, **options: Any) -> Family:
    """A language model that reads the features of an image in the place of some tokens."""
    texts = {"model_type": text, **GROUPED, "head_dim": 8, **({"sliding_window": 4} if text == "gemma3_text" else {})}
    images = {"model_type": vision, **VISION}

    def inputs(seed: int) -> dict[str, np.ndarray]:
        tokens = np.minimum(tokens_of(seed)["input_ids"], IMAGE_TOKEN - 1)
        tokens[:, 1 : 1 + FEATURES] = IMAGE_TOKEN
        types = {"token_type_ids": (tokens == IMAGE_TOKEN).astype(np.int64)} if text.startswith("gemma") else {}
        return {"input_ids": tokens, **images_of(seed), **types}

    def module() -> nn.Module:
        made = getattr(transformers, config)(
            text_config=texts, vision_config=images, image_token_index=IMAGE_TOKEN, **options
        )
        return Floats(getattr(transformers, name)(made)).train()

    return Family(module, inputs)


def _clip() -> nn.Module:
    text = transformers.CLIPTextConfig(**TEXT)
    config = transformers.CLIPConfig(
        text_config=text.to_dict(), vision_config=transformers.CLIPVisionConfig(**VISION).to_dict(), projection_dim=16
    )

    class Embeddings(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = transformers.CLIPModel(config)

        def forward(self, **inputs: Any) -> tuple[torch.Tensor, ...]:
            result = self.module(**inputs)
            return result.logits_per_image, result.text_embeds

    return Embeddings().train()


def _image_network() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        *(nn.ConvTranspose2d(8, 4, 3, stride=2, padding=1, output_padding=1), nn.MaxPool2d(2), nn.GroupNorm(2, 4)),
        *(nn.PixelShuffle(2), nn.Upsample(scale_factor=2, mode="bilinear"), nn.AdaptiveAvgPool2d(3), nn.Dropout2d(0.1)),
        *(nn.Flatten(), nn.Linear(9, 4), nn.BatchNorm1d(4), nn.Hardswish(), nn.LogSoftmax(-1)),
    )


FAMILIES: dict[str, Family] = {
    "gpt2": _transformer(
        *("GPT2LMHeadModel", "GPT2Config", tokens_of),
        **{"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 32, "use_cache": False},
    ),
    "llama": _decoder("Llama"),
    "bert": _transformer("BertForMaskedLM", "BertConfig", padded_of, **TEXT),
    "t5": _transformer(
        *("T5ForConditionalGeneration", "T5Config", _pairs),
        **{"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
        use_cache=False,
    ),
    "vit": _transformer("ViTForImageClassification", "ViTConfig", images_of, **VISION, hidden_dropout_prob=0.1),
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
    "gemma3": _transformer("Gemma3ForCausalLM", "Gemma3TextConfig", tokens_of, **GROUPED, head_dim=8, sliding_window=4),
    "phi3": _decoder("Phi3"),
    "olmo2": _decoder("Olmo2"),
    "granite": _decoder("Granite"),
    "cohere": _decoder("Cohere"),
    "starcoder2": _decoder("Starcoder2"),
    "stablelm": _decoder("StableLm"),
    "mixtral": _decoder("Mixtral", num_local_experts=4),
    "qwen3_moe": _transformer("Qwen3MoeForCausalLM", "Qwen3MoeConfig", tokens_of, **EXPERTS, head_dim=8),
    "gpt_neox": _transformer("GPTNeoXForCausalLM", "GPTNeoXConfig", tokens_of, **TEXT, use_cache=False),
    "opt": _transformer(
        *("OPTForCausalLM", "OPTConfig", tokens_of),
        **{"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"ffn_dim": 48, "word_embed_proj_dim": WIDTH, "max_position_embeddings": 32, "use_cache": False},
    ),
    "mamba": _transformer(
        *("MambaForCausalLM", "MambaConfig", tokens_of),
        **{"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "state_size": 4, "use_cache": False},
    ),
    "roberta": _transformer("RobertaForMaskedLM", "RobertaConfig", padded_of, **TEXT),
    "albert": _transformer("AlbertForMaskedLM", "AlbertConfig", padded_of, **TEXT, embedding_size=16),
    "distilbert": _transformer(
        *("DistilBertForMaskedLM", "DistilBertConfig", padded_of),
        **{"vocab_size": VOCABULARY, "dim": WIDTH, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
        max_position_embeddings=32,
    ),
    "electra": _transformer("ElectraForMaskedLM", "ElectraConfig", padded_of, **TEXT, embedding_size=16),
    "modernbert": _transformer(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        padded_of,
        **TEXT,
        cls_token_id=1,
        sep_token_id=2,
        local_attention=4,
    ),
    "dinov2": _transformer("Dinov2ForImageClassification", "Dinov2Config", images_of, **VISION),
    "convnext": _transformer(
        *("ConvNextForImageClassification", "ConvNextConfig", images_of),
        **{"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 2, "image_size": 16},
    ),
    "resnet": _transformer(
        *("ResNetForImageClassification", "ResNetConfig", images_of),
        **{"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"},
    ),
    "gru": _plain(lambda: nn.GRU(8, 8, 2, bidirectional=True, batch_first=True), (ROWS, 5, 8)),
    "attention": _plain(
        lambda: nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True), *[(ROWS, 5, WIDTH)] * 3
    ),
    "smollm3": _decoder("SmolLM3"),
    "phi": _decoder("Phi", num_key_value_heads=4),
    "deepseek_v3": _transformer(
        *("DeepseekV3ForCausalLM", "DeepseekV3Config", tokens_of),
        **{**GROUPED, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1},
        **{"num_experts_per_tok": 2, "moe_intermediate_size": 16, "q_lora_rank": 16, "kv_lora_rank": 16},
        **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1},
    ),
    "falcon": _transformer(
        *("FalconForCausalLM", "FalconConfig", tokens_of),
        **{"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"use_cache": False, "hidden_dropout": 0.1},
    ),
    "gpt_neo": _transformer(
        *("GPTNeoForCausalLM", "GPTNeoConfig", tokens_of),
        **{"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_layers": 2, "num_heads": 4, "window_size": 4},
        **{"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 32, "use_cache": False},
    ),
    "gptj": _transformer(
        *("GPTJForCausalLM", "GPTJConfig", tokens_of),
        **{"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 32, "rotary_dim": 4},
        **{"use_cache": False, "resid_pdrop": 0.1},
    ),
    "bloom": _transformer(
        *("BloomForCausalLM", "BloomConfig", tokens_of),
        **{"vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_layer": 2, "n_head": 4, "use_cache": False},
        hidden_dropout=0.1,
    ),
    "mamba2": _transformer(
        *("Mamba2ForCausalLM", "Mamba2Config", tokens_of),
        **{"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "state_size": 8, "num_heads": 8},
        **{"head_dim": 8, "n_groups": 2, "chunk_size": 4, "use_cache": False},
    ),
    "rwkv": _transformer(
        *("RwkvForCausalLM", "RwkvConfig", tokens_of),
        **{"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "use_cache": False},
    ),
    "deberta_v2": _transformer(
        *("DebertaV2ForMaskedLM", "DebertaV2Config", padded_of),
        **{**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
        **{"norm_rel_ebd": "layer_norm", "share_att_key": True},
    ),
    "mpnet": _transformer("MPNetForMaskedLM", "MPNetConfig", padded_of, **TEXT),
    "xlnet": _transformer(
        *("XLNetLMHeadModel", "XLNetConfig", tokens_of),
        **{
            "vocab_size": VOCABULARY,
            "d_model": WIDTH,
            "n_layer": 2,
            "n_head": 4,
            "d_inner": 48,
            "use_mems_train": False,
        },
    ),
    "fnet": _transformer(
        *("FNetForMaskedLM", "FNetConfig", tokens_of),
        **{"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "intermediate_size": 48},
        max_position_embeddings=32,
    ),
    "bart": _transformer("BartForConditionalGeneration", "BartConfig", _pairs, **ENCODER_DECODER, dropout=0.1),
    "whisper": _transformer(
        *("WhisperForConditionalGeneration", "WhisperConfig", _features(8, 32)),
        **{**ENCODER_DECODER, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16},
        dropout=0.1,
    ),
    "clip": Family(_clip, lambda seed: {**padded_of(seed), **images_of(seed)}),
    "wav2vec2": _transformer(
        *("Wav2Vec2ForCTC", "Wav2Vec2Config", lambda seed: {"input_values": normal_of(seed, ROWS, 400)}),
        **{**TEXT, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2},
        **{"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "layerdrop": 0.0, "mask_time_prob": 0.0},
    ),
    "llava": _with_images("LlavaForConditionalGeneration", "LlavaConfig", "llama", "clip_vision_model"),
    "gemma3_images": _with_images(
        *("Gemma3ForConditionalGeneration", "Gemma3Config", "gemma3_text", "siglip_vision_model"),
        mm_tokens_per_image=FEATURES,
    ),
    "deit": _transformer("DeiTForImageClassification", "DeiTConfig", images_of, **VISION, hidden_dropout_prob=0.1),
    "beit": _transformer("BeitForImageClassification", "BeitConfig", images_of, **VISION, hidden_dropout_prob=0.1),
    "siglip_vision": _transformer(
        "SiglipVisionModel", "SiglipVisionConfig", images_of, **VISION, attention_dropout=0.1
    ),
    "swin": _transformer(
        *("SwinForImageClassification", "SwinConfig", images_of),
        **{"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
    ),
    "segformer": _transformer(
        *("SegformerForImageClassification", "SegformerConfig", images_of),
        **{"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32]},
        **{"patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [2, 2], "mlp_ratios": [2, 2]},
    ),
    # With two rows BatchNorm's last layers have few values: PyTorch's own runs from weights one ulp off part.
    "mobilenet_v2": _transformer(
        *("MobileNetV2ForImageClassification", "MobileNetV2Config"),
        lambda seed: {"pixel_values": normal_of(seed, 4 * ROWS, 3, 32, 32)},
        **{"depth_multiplier": 0.05, "expand_ratio": 2, "image_size": 32},
    ),
    "hubert": _transformer(
        *("HubertForCTC", "HubertConfig", lambda seed: {"input_values": normal_of(seed, ROWS, 400)}),
        **{**TEXT, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2},
        **{"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "layerdrop": 0.0, "mask_time_prob": 0.0},
    ),
    "timesformer": _transformer(
        *("TimesformerForVideoClassification", "TimesformerConfig"),
        lambda seed: {"pixel_values": normal_of(seed, ROWS, 2, 3, 16, 16)},
        **{**VISION, "num_frames": 2, "hidden_dropout_prob": 0.1},
    ),
}
