"""Cases of published JAX models against the PyTorch models that they port, on a few rows of a tiny configuration."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import transformers

import jaxtrain as jt
from parity import AdamW, Case
from parity.case import Batch
from tests.foreign.edits import Edit, edited

ROWS, LENGTH, VOCAB, CLASSES = 2, 8, 48, 5
FLAX = "transformers.models.{0}.modeling_flax_{0}"
TEXT = {"vocab_size": VOCAB, "max_position_embeddings": 32}
WIDE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
IMAGE = {"image_size": 16, "patch_size": 4, "num_labels": CLASSES}
DRY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
OF_BART = {
    **{
        f"{side}_{what}": n
        for side in ("encoder", "decoder")
        for what, n in {"layers": 2, "attention_heads": 4}.items()
    },
    **{"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
    **{"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0},
}


@dataclass(frozen=True)
class Port:
    """A published model and its case.

    Attributes:
      module: The module that defines it.
      case: Creates the case.
      repairs: What keeps it from running with the installed JAX.
    """

    module: str
    case: Callable[[], Case]
    repairs: tuple[Edit, ...] = ()

    @contextmanager
    def edited(self, *edits: Edit) -> Iterator[Case]:
        """The case, whose model has changed lines while the context is entered."""
        with edited(self.module, [*self.repairs, *edits]):
            yield self.case()


PORTS: dict[str, Port] = {}
"""Ports by name."""


def port(module: str, *repairs: Edit) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    """Register a case under the name of the function that creates it."""

    def register(case: Callable[[], Case]) -> Callable[[], Case]:
        PORTS[case.__name__] = Port(module, case, repairs)
        return case

    return register


def text(seed: int, rows: int) -> Batch:
    tokens = np.random.default_rng(seed).integers(3, VOCAB, (rows, LENGTH + 1)).astype(np.int32)
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def pairs(seed: int, rows: int) -> Batch:
    batch = text(seed, rows)
    return {**batch, "decoder_input_ids": np.ascontiguousarray(batch["input_ids"][:, ::-1])}


def images(seed: int, rows: int) -> Batch:
    rng = np.random.default_rng(seed)
    pixels = rng.standard_normal((rows, 3, 16, 16)).astype(np.float32)
    return {"pixel_values": pixels, "labels": rng.integers(0, CLASSES, rows).astype(np.int32)}


def transformers_case(
    kind: str,
    config: Any,
    batch: Callable[[int, int], Batch],
    shape: tuple[int, ...],
    fixed: tuple[str, ...] = (),
    **torch_only: Any,
) -> Case:
    """`transformers`' Flax class `Flax<kind>` against its PyTorch class `<kind>`.

    Args:
      kind: Name of the PyTorch class.
      config: Configuration of both.
      batch: The batches; labels aside, their names are those of the models' arguments.
      shape: Shape of the first argument, for the initialization.
      fixed: Leaves of Flax that PyTorch does not train: they keep their initial zeros.
      **torch_only: Arguments of the PyTorch model alone.
    """
    config._attn_implementation = "eager"
    module = importlib.import_module(getattr(transformers, f"Flax{kind}").__module__)
    model = getattr(module, f"Flax{kind}")(config, input_shape=shape, _do_init=False)
    like = dict(jax.eval_shape(lambda: model.init_weights(jax.random.key(0), shape)))
    zeros = {name: jnp.zeros(like.pop(name).shape) for name in fixed}

    def loss_fn(params: Any, batch: Batch, rng: jax.Array | None) -> tuple[jt.Loss, dict[str, Any]]:
        inputs = {name: x for name, x in batch.items() if name != "labels"}
        logits = model(**inputs, params={**params, **zeros}).logits
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return jt.Loss(losses.sum(), losses.size), {}

    def torch_loss(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        inputs = {name: x for name, x in batch.items() if name != "labels"}
        logits, labels = model.eval()(**inputs, **torch_only).logits, batch["labels"].long()
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")
        return losses, labels.numel()

    return Case(
        name=f"transformers-{kind}",
        torch_model=lambda: getattr(transformers, kind)(config),
        torch_loss=torch_loss,
        loss_fn=loss_fn,
        params_like=like,
        names=None,
        batch=batch,
        rows=ROWS,
        optimizer=AdamW(lr=1e-2),
        clip_norm=1.0,
    )


def language_model(kind: str, config: Any) -> Case:
    config.pad_token_id = 1
    return transformers_case(kind, config, text, (1, LENGTH), attention_mask=torch.ones(ROWS, LENGTH))


@port(FLAX.format("gpt2"))
def gpt2() -> Case:
    dry = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    config = transformers.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=32, **dry)
    return language_model("GPT2LMHeadModel", config)


@port(FLAX.format("gptj"))
def gptj() -> Case:
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "rotary_dim": 4}
    dry = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    return language_model("GPTJForCausalLM", transformers.GPTJConfig(**sizes, **dry, tie_word_embeddings=False))


@port(FLAX.format("gpt_neo"))
def gpt_neo() -> Case:
    sizes = {"num_layers": 2, "num_heads": 4, "hidden_size": 32, "window_size": 4, **TEXT}
    dry = {"resid_dropout": 0, "embed_dropout": 0, "attention_dropout": 0}
    config = transformers.GPTNeoConfig(attention_types=[[["global", "local"], 1]], **sizes, **dry)
    return language_model("GPTNeoForCausalLM", config)


@port(FLAX.format("llama"))
def llama() -> Case:
    return language_model("LlamaForCausalLM", transformers.LlamaConfig(**TEXT, **WIDE, num_key_value_heads=2))


@port(FLAX.format("mistral"))
def mistral() -> Case:
    config = transformers.MistralConfig(**TEXT, **WIDE, num_key_value_heads=2, sliding_window=4)
    return language_model("MistralForCausalLM", config)


@port(FLAX.format("gemma"))
def gemma() -> Case:
    config = transformers.GemmaConfig(**TEXT, **WIDE, num_key_value_heads=2, head_dim=8)
    config.hidden_activation = "gelu_pytorch_tanh"
    return language_model("GemmaForCausalLM", config)


@port(FLAX.format("opt"))
def opt() -> Case:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 64, "num_attention_heads": 4, **TEXT}
    return language_model("OPTForCausalLM", transformers.OPTConfig(**sizes, dropout=0.0, word_embed_proj_dim=32))


@port(FLAX.format("bloom"))
def bloom() -> Case:
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    config = transformers.BloomConfig(**sizes, hidden_dropout=0.0, attention_dropout=0.0)
    return language_model("BloomForCausalLM", config)


@port(FLAX.format("xglm"))
def xglm() -> Case:
    sizes = {"d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4, **TEXT}
    dry = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    return language_model("XGLMForCausalLM", transformers.XGLMConfig(**sizes, **dry))


@port(FLAX.format("bert"))
def bert() -> Case:
    return language_model("BertForMaskedLM", transformers.BertConfig(**TEXT, **WIDE, **DRY))


@port(FLAX.format("electra"))
def electra() -> Case:
    return language_model("ElectraForMaskedLM", transformers.ElectraConfig(**TEXT, **WIDE, **DRY, embedding_size=16))


@port(FLAX.format("albert"))
def albert() -> Case:
    return language_model("AlbertForMaskedLM", transformers.AlbertConfig(**TEXT, **WIDE, **DRY, embedding_size=16))


@port(FLAX.format("distilbert"))
def distilbert() -> Case:
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, **TEXT}
    config = transformers.DistilBertConfig(**sizes, dropout=0.0, attention_dropout=0.0)
    return language_model("DistilBertForMaskedLM", config)


@port(FLAX.format("bart"))
def bart() -> Case:
    config = transformers.BartConfig(**TEXT, **OF_BART)
    return transformers_case("BartForConditionalGeneration", config, pairs, (1, LENGTH), fixed=("final_logits_bias",))


@port(
    FLAX.format("t5"),
    Edit("jnp.clip(relative_position, a_max=0)", "jnp.clip(relative_position, max=0)"),
    Edit("relative_position_if_large, a_max=num", "relative_position_if_large, max=num"),
)
def t5() -> Case:
    sizes = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    buckets = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16}
    config = transformers.T5Config(**sizes, **buckets, dropout_rate=0.0, decoder_start_token_id=0)
    return transformers_case("T5ForConditionalGeneration", config, pairs, (1, LENGTH))


@port(FLAX.format("whisper"))
def whisper() -> Case:
    sizes = {"vocab_size": VOCAB, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16}
    special = {"pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(**sizes, **OF_BART, **special, suppress_tokens=None, begin_suppress_tokens=None)

    def sounds(seed: int, rows: int) -> Batch:
        features = np.random.default_rng(seed).standard_normal((rows, 8, 16)).astype(np.float32)
        batch = text(seed, rows)
        return {"input_features": features, "decoder_input_ids": batch["input_ids"], "labels": batch["labels"]}

    return transformers_case("WhisperForConditionalGeneration", config, sounds, (1, 8, 16))


@port(FLAX.format("vit"))
def vit() -> Case:
    return transformers_case(
        "ViTForImageClassification", transformers.ViTConfig(**WIDE, **IMAGE, **DRY), images, (1, 16, 16, 3)
    )


@port(FLAX.format("beit"))
def beit() -> Case:
    config = transformers.BeitConfig(**WIDE, **IMAGE, **DRY, drop_path_rate=0.0, use_relative_position_bias=True)
    return transformers_case("BeitForImageClassification", config, images, (1, 16, 16, 3))


@port(FLAX.format("dinov2"))
def dinov2() -> Case:
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "mlp_ratio": 2,
        "layerscale_value": 0.5,
        **IMAGE,
    }
    return transformers_case(
        "Dinov2ForImageClassification", transformers.Dinov2Config(**sizes, **DRY), images, (1, 16, 16, 3)
    )


@port("diffusers.models.vae_flax")
def autoencoder_kl() -> Case:
    import diffusers

    sizes = {"block_out_channels": (8, 16), "latent_channels": 2, "norm_num_groups": 4, "sample_size": 16}
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    module = importlib.import_module("diffusers.models.vae_flax")
    model = module.FlaxAutoencoderKL(**sizes, **blocks)

    def loss_fn(params: Any, batch: Batch, rng: jax.Array | None) -> tuple[jt.Loss, dict[str, Any]]:
        pixels = batch["pixel_values"]
        return jt.Loss(jnp.square(model.apply({"params": params}, pixels).sample - pixels).sum(), pixels.size), {}

    def torch_loss(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        pixels = batch["pixel_values"]
        return torch.square(model.eval()(pixels).sample - pixels).sum(), pixels.numel()

    return Case(
        name="diffusers-AutoencoderKL",
        torch_model=lambda: diffusers.AutoencoderKL(**sizes, **blocks),
        torch_loss=torch_loss,
        loss_fn=loss_fn,
        params_like=jax.eval_shape(model.init_weights, jax.random.key(0)),
        names=None,
        batch=images,
        rows=ROWS,
        optimizer=AdamW(lr=1e-2),
        clip_norm=1.0,
    )


@port("diffusers.models.unets.unet_2d_condition_flax")
def unet() -> Case:
    import diffusers

    sizes = {"block_out_channels": (64,), "layers_per_block": 1, "cross_attention_dim": 16, "sample_size": 8}
    blocks = {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("CrossAttnUpBlock2D",)}
    module = importlib.import_module("diffusers.models.unets.unet_2d_condition_flax")
    model = module.FlaxUNet2DConditionModel(**sizes, **blocks)

    def batch(seed: int, rows: int) -> Batch:
        rng = np.random.default_rng(seed)
        normal = {"sample": (rows, 4, 8, 8), "noise": (rows, 4, 8, 8), "text": (rows, LENGTH, 16)}
        arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in normal.items()}
        return {**arrays, "timestep": rng.integers(0, 1000, rows).astype(np.int32)}

    def loss_fn(params: Any, batch: Batch, rng: jax.Array | None) -> tuple[jt.Loss, dict[str, Any]]:
        noise = model.apply({"params": params}, batch["sample"], batch["timestep"], batch["text"]).sample
        return jt.Loss(jnp.square(noise - batch["noise"]).sum(), noise.size), {}

    def torch_loss(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        noise = model.eval()(batch["sample"], batch["timestep"], batch["text"]).sample
        return torch.square(noise - batch["noise"]).sum(), noise.numel()

    return Case(
        name="diffusers-UNet2DConditionModel",
        torch_model=lambda: diffusers.UNet2DConditionModel(**sizes, **blocks),
        torch_loss=torch_loss,
        loss_fn=loss_fn,
        params_like=jax.eval_shape(model.init_weights, jax.random.key(0)),
        names=None,
        batch=batch,
        rows=ROWS,
        optimizer=AdamW(lr=1e-2),
        clip_norm=1.0,
    )


@port(FLAX.format("resnet"))
def resnet() -> Case:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    config = transformers.ResNetConfig(**sizes, num_labels=CLASSES)
    module = importlib.import_module(FLAX.format("resnet"))
    model = module.FlaxResNetForImageClassification(config, input_shape=(1, 16, 16, 3), _do_init=False)
    like = jax.eval_shape(lambda: model.init_weights(jax.random.key(0), (1, 16, 16, 3)))

    def loss_fn(params: Any, batch: Batch, rng: jax.Array | None, model_state: Any) -> Any:
        given = {"params": params, "batch_stats": model_state}
        out, new = model(batch["pixel_values"], params=given, train=True)
        losses = optax.softmax_cross_entropy_with_integer_labels(out.logits, batch["labels"])
        return jt.Loss(losses.sum(), losses.size), {}, new["batch_stats"]

    def torch_loss(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        logits, labels = model.train()(batch["pixel_values"]).logits, batch["labels"].long()
        return torch.nn.functional.cross_entropy(logits, labels, reduction="sum"), len(labels)

    return Case(
        name="transformers-ResNetForImageClassification",
        torch_model=lambda: transformers.ResNetForImageClassification(config),
        torch_loss=torch_loss,
        loss_fn=loss_fn,
        params_like=dict(like["params"]),
        names=None,
        batch=images,
        rows=4,
        optimizer=AdamW(lr=1e-2),
        clip_norm=1.0,
        state_like=dict(like["batch_stats"]),
    )
