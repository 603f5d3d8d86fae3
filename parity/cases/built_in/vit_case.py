"""The Vision Transformer against `transformers.ViTForImageClassification`."""

from dataclasses import replace
from typing import Any

from flax import nnx
from torch.nn import Module
from transformers import ViTConfig as HFConfig
from transformers import ViTForImageClassification

from jaxtrain.models import functional
from jaxtrain.models.vit import ViT, ViTConfig, to_hf, torch_names
from parity.case import AdamW, Case
from parity.cases.built_in import image_batches
from parity.cases.built_in.resnet_case import torch_loss

CONFIG = ViTConfig(
    # Two rows and columns of patches that are not square; what remains of the image is not used.
    image_size=(9, 13),
    patch_size=(4, 6),
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    num_labels=5,
)


def case(dropout: float = 0.0) -> Case:
    """Return a case on 9×13 images in 4×6 patches; half of `dropout` is the rate of the attention."""
    return sized(replace(CONFIG, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout / 2))


def sized(config: ViTConfig, rows: int = 16) -> Case:
    """Return batches of `rows` images of the config's size."""
    apply, params_like = functional(nnx.eval_shape(lambda: ViT(config, rngs=nnx.Rngs(0))))
    return Case(
        name="vit",
        torch_model=lambda: _torch_model(config),
        torch_loss=torch_loss,
        loss_fn=image_batches.loss_fn(apply),
        params_like=params_like,
        names=torch_names(config),
        batch=image_batches.images(*config.image_shape, classes=config.num_labels),
        rows=rows,
        # With the default eps, Adam makes steps of the rounding noise that is the gradient of the key bias.
        optimizer=AdamW(lr=1e-3, eps=1e-5, weight_decay=0.1),
        clip_norm=1.0,
    )


def _torch_model(config: ViTConfig) -> Module:
    fields: dict[str, Any] = to_hf(config)
    return ViTForImageClassification(HFConfig(**fields))
