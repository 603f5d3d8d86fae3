"""Batches and loss of image classifiers in both frameworks."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

import jaxtrain
from jaxtrain.losses import cross_entropy
from jaxtrain.step import LossFn
from parity.case import Batch


def images(*shape: int, classes: int = 10) -> Callable[[int, int], Batch]:
    """Return batches of Gaussian noise: "image" float32 [rows, *shape], "label" int64 [rows]."""

    def batch(seed: int, rows: int) -> Batch:
        rng = np.random.default_rng(seed)
        return {
            "image": rng.standard_normal((rows, *shape), np.float32),
            "label": rng.integers(classes, size=rows),
        }

    return batch


def loss_fn(apply: Callable[..., Any]) -> LossFn:
    """Return the cross-entropy of the logits `apply(params, images, rng)`, summed over images."""

    def loss(params: Any, batch: Any, rng: Any) -> tuple[jaxtrain.Loss, dict[str, Any]]:
        losses = cross_entropy(apply(params, batch["image"], rng), batch["label"])
        return jaxtrain.Loss(losses.sum(), weight=len(losses)), {}

    return loss


def torch_loss(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Return the same loss of `model(images)`."""
    return F.cross_entropy(model(batch["image"]), batch["label"], reduction="sum"), len(batch["label"])
