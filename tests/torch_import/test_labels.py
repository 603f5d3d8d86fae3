"""Models of transformers with their own losses, and vision-language models: outputs and gradients are PyTorch's.

Their code computes losses, rotations and softmax in float32 by name. Here it does so in float64, on both sides, so that
rounding does not hide a difference.
"""

import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from tests.torch_import.families import (
    FEATURES,
    GROUPED,
    IMAGE_TOKEN,
    LENGTH,
    ROWS,
    TEXT,
    VISION,
    VOCABULARY,
    WIDTH,
    Floats,
    images_of,
    normal_of,
    padded_of,
    tokens_of,
)
from tests.torch_import.judge import judged

Made = tuple[nn.Module, dict[str, np.ndarray]]
SPEECH = {
    **{**TEXT, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2},
    **{"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "layerdrop": 0.0, "mask_time_prob": 0.0},
}
LLAMA = {"model_type": "llama", **GROUPED, "head_dim": 8}
START = VOCABULARY - 3


def made(name: str, config: Any) -> nn.Module:
    """Return a model in training mode without dropout."""
    parts = [config, *(x for x in vars(config).values() if isinstance(x, transformers.PreTrainedConfig))]
    for part in parts:
        for key, value in vars(part).items():
            if "dropout" in key and isinstance(value, float):
                setattr(part, key, 0.0)
    config._experts_implementation = "batched_mm"
    return Floats(getattr(transformers, name)(config)).train()


def config(name: str, **options: Any) -> Any:
    return getattr(transformers, name)(**options)


def labels(seed: int = 1) -> np.ndarray:
    found = tokens_of(seed)["input_ids"]
    found[1, -3:] = -100
    return found


def with_images(count: int = FEATURES) -> np.ndarray:
    """Return tokens of which some stand for the features of an image."""
    tokens = np.random.default_rng(0).integers(6, START, (ROWS, count + 6))
    tokens[:, 1 : 1 + count] = IMAGE_TOKEN
    tokens[:, 0] = START
    return tokens


def speech(name: str, settings: str, *, masked: bool = False, **options: Any) -> Made:
    mask = np.ones((ROWS, 400), np.int64)
    mask[1, 300:] = 0
    given = {"attention_mask": mask} if masked else {}
    return made(name, config(settings, **SPEECH, **options)), {
        **{"input_values": normal_of(0, ROWS, 400), **given, "labels": labels()[:, :5]},
    }


def longformer(*, is_global: bool) -> Made:
    settings = config("LongformerConfig", **{**TEXT, "attention_window": [4, 4], "max_position_embeddings": 40})
    first = np.zeros((ROWS, LENGTH), np.int64)
    first[:, 0] = 1
    given = {"global_attention_mask": first} if is_global else {}
    return made("LongformerForMaskedLM", settings), {**padded_of(0), **given, "labels": labels()}


def vilt() -> Made:
    settings = config("ViltConfig", **VISION, vocab_size=VOCABULARY, max_position_embeddings=32, max_image_length=-1)
    mask = np.ones((ROWS, 16, 16), np.int64)
    return made("ViltForMaskedLM", settings), {**padded_of(0), **images_of(0), "pixel_mask": mask, "labels": labels()}


def idefics(name: str) -> Made:
    vision = {**VISION, "patch_size": 4}
    settings = config(
        f"{name}Config", vision_config=vision, text_config=LLAMA, scale_factor=2, image_token_id=IMAGE_TOKEN
    )
    tokens = with_images()
    pixels = normal_of(0, ROWS, 1, 3, 16, 16)
    return made(f"{name}ForConditionalGeneration", settings), {
        **{"input_ids": tokens, "pixel_values": pixels, "labels": tokens},
    }


def qwen(name: str, **vision: Any) -> Made:
    rotation = {"rope_type": "default", "mrope_section": [1, 1, 2]}
    settings = config(
        f"{name}Config",
        vision_config={
            **{"depth": 2, "hidden_size": WIDTH, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2},
            **{"temporal_patch_size": 2, "in_channels": 3, **vision},
        },
        text_config={**GROUPED, "rope_scaling": rotation},
        image_token_id=IMAGE_TOKEN,
        video_token_id=VOCABULARY - 2,
        vision_start_token_id=START,
        vision_end_token_id=5,
    )
    tokens = with_images()
    return made(f"{name}ForConditionalGeneration", settings), {
        **{
            "input_ids": tokens,
            "pixel_values": normal_of(0, ROWS * 16, 96),
            "image_grid_thw": np.array([[1, 4, 4]] * ROWS),
        },
        **{"mm_token_type_ids": (tokens == IMAGE_TOKEN).astype(np.int64), "labels": tokens},
    }


def paligemma() -> Made:
    settings = config(
        "PaliGemmaConfig",
        text_config={"model_type": "gemma", **GROUPED, "head_dim": 8},
        vision_config={"model_type": "siglip_vision_model", **VISION, "projection_dim": WIDTH},
        **{"image_token_index": IMAGE_TOKEN, "projection_dim": WIDTH, "hidden_size": WIDTH},
    )
    tokens = with_images()
    types = (np.arange(tokens.shape[1]) > 6).astype(np.int64)[None].repeat(ROWS, 0)
    return made("PaliGemmaForConditionalGeneration", settings), {
        **{"input_ids": tokens, **images_of(0), "token_type_ids": types, "labels": tokens},
    }


def llava_next() -> Made:
    vision = {"model_type": "clip_vision_model", **VISION}
    settings = config(
        "LlavaNextConfig",
        **{"text_config": LLAMA, "vision_config": vision, "image_token_index": IMAGE_TOKEN},
        image_grid_pinpoints=[[16, 16], [32, 16]],
    )
    tokens = with_images(10)
    pixels, sizes = normal_of(0, ROWS, 2, 3, 16, 16), np.array([[16, 16]] * ROWS)
    return made("LlavaNextForConditionalGeneration", settings), {
        **{"input_ids": tokens, "pixel_values": pixels, "image_sizes": sizes, "labels": tokens},
    }


def siglip2() -> Made:
    settings = config("Siglip2VisionConfig", **VISION, num_patches=16, num_channels=3)
    settings.patch_size = 4
    return made("Siglip2VisionModel", settings), {
        **{"pixel_values": normal_of(0, ROWS, 16, 48), "pixel_attention_mask": np.ones((ROWS, 16), np.int64)},
        "spatial_shapes": np.array([[4, 4], [4, 4]]),
    }


def mixtral() -> Made:
    settings = config("MixtralConfig", **GROUPED, num_local_experts=4, output_router_logits=True)
    return made("MixtralForCausalLM", settings), {**padded_of(0), "labels": labels()}


def t5() -> Made:
    settings = config(
        "T5Config",
        **{"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
        **{"use_cache": False, "dropout_rate": 0.0, "decoder_start_token_id": 0},
    )
    return made("T5ForConditionalGeneration", settings), {**padded_of(0), "labels": labels()}


MODELS: dict[str, Callable[[], Made]] = {
    "wav2vec2": lambda: speech("Wav2Vec2ForCTC", "Wav2Vec2Config"),
    "wav2vec2, masked": lambda: speech("Wav2Vec2ForCTC", "Wav2Vec2Config", masked=True),
    "hubert, mean": lambda: speech("HubertForCTC", "HubertConfig", ctc_loss_reduction="mean", ctc_zero_infinity=True),
    "longformer": lambda: longformer(is_global=False),
    "longformer, global": lambda: longformer(is_global=True),
    "vilt": vilt,
    "idefics3": lambda: idefics("Idefics3"),
    "smolvlm": lambda: idefics("SmolVLM"),
    "qwen2_vl": lambda: qwen("Qwen2VL", embed_dim=WIDTH, mlp_ratio=2),
    "qwen2_5_vl": lambda: qwen(
        "Qwen2_5_VL", out_hidden_size=WIDTH, intermediate_size=48, window_size=16, fullatt_block_indexes=[1]
    ),
    "paligemma": paligemma,
    "llava_next": llava_next,
    "siglip2": siglip2,
    "mixtral": mixtral,
    "t5": t5,
}


class Float64(types.ModuleType):
    """The module `torch`, whose float32 is float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_losses_of_labels_and_images_are_pytorchs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def factory() -> Made:
        torch.manual_seed(0)
        model, example = MODELS[name]()
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
        for module in [*sys.modules.values()]:
            if module.__name__.startswith("transformers.") and vars(module).get("torch") is torch:
                monkeypatch.setattr(module, "torch", Float64("torch"))
        return model, example

    assert judged(factory) == "proved"
