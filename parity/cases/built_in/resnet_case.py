"""ResNet against `transformers.ResNetForImageClassification`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flax import nnx
from torch import Tensor
from torch.nn import Conv2d, Identity, Module
from torch.nn import functional as F
from transformers import ResNetConfig as HFConfig
from transformers import ResNetForImageClassification

import jaxtrain
from jaxtrain.losses import cross_entropy
from jaxtrain.models import functional_with_state
from jaxtrain.models.resnet import ResNet, ResNetConfig, to_hf, torch_buffers, torch_names
from parity.case import AdamW, Case
from parity.cases.built_in import image_batches

CLASSES = 5
BASIC = ResNetConfig(embedding_size=8, hidden_sizes=(8, 16), depths=(1, 1), layer_type="basic", num_labels=CLASSES)
BOTTLENECK = replace(BASIC, embedding_size=16, hidden_sizes=(16, 32), layer_type="bottleneck")
SMALL_STEM = replace(BASIC, stem_kernel=3, stem_stride=1, stem_pool=False, downsample_in_first_stage=True)


def case() -> Case:
    """Return a ResNet of basic layers, one without and one with a projection; running statistics are compared."""
    return sized("resnet", BASIC, side=16, clip_norm=2.4)


def bottleneck() -> Case:
    """Return the same with bottleneck layers."""
    return sized("resnet.bottleneck", BOTTLENECK, side=16, clip_norm=5.0)


def small_stem() -> Case:
    """Return the first with a 3×3 stem for 8×8 images, without stride and pooling, and a stride in every stage."""
    return sized("resnet.small-stem", SMALL_STEM, side=8, clip_norm=1.9)


def sized(name: str, config: ResNetConfig, side: int, clip_norm: float, rows: int = 8) -> Case:
    """Return a case on `rows` images of `side` × `side`."""
    apply, params_like, state_like = functional_with_state(nnx.eval_shape(lambda: ResNet(config, rngs=nnx.Rngs(0))))

    def loss_fn(params: Any, batch: Any, rng: Any, model_state: Any) -> tuple[jaxtrain.Loss, dict[str, Any], Any]:
        logits, model_state = apply(params, model_state, batch["image"], rng is not None)
        losses = cross_entropy(logits, batch["label"])
        return jaxtrain.Loss(losses.sum(), weight=len(losses)), {}, model_state

    return Case(
        name=name,
        torch_model=lambda: _torch_model(config),
        torch_loss=torch_loss,
        loss_fn=loss_fn,
        params_like=params_like,
        names=torch_names(config),
        batch=image_batches.images(side, side, config.num_channels, classes=config.num_labels),
        rows=rows,
        optimizer=AdamW(lr=1e-3, eps=1e-5, weight_decay=0.1),
        clip_norm=clip_norm,
        state_like=state_like,
        buffers=torch_buffers(config),
    )


def torch_loss(model: Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """Return the cross-entropy of a classifier of `transformers` on [B, H, W, C] images."""
    logits = model(pixel_values=batch["image"].permute(0, 3, 1, 2)).logits
    return F.cross_entropy(logits, batch["label"], reduction="sum"), len(logits)


def _torch_model(config: ResNetConfig) -> Module:
    standard = replace(config, stem_kernel=7, stem_stride=2, stem_pool=True)
    model = ResNetForImageClassification(HFConfig(**to_hf(standard)))
    stem = model.resnet.embedder
    if not config.stem_pool:
        stem.pooler = Identity()  # type: ignore[assignment]
    kernel, stride = config.stem_kernel, config.stem_stride
    if (kernel, stride) != (7, 2):
        stem.embedder.convolution = Conv2d(
            config.num_channels, config.embedding_size, kernel, stride, padding=kernel // 2, bias=False
        )
    return model
