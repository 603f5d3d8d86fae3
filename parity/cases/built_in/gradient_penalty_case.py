"""A Wasserstein critic with gradient penalty (Gulrajani et al. 2017, arXiv:1704.00028): the loss contains a
gradient."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor
from torch.nn import Module, Softplus

import jaxtrain
from jaxtrain.losses import norm
from parity.case import AdamW, Batch, Case
from parity.cases.built_in import perceptron

FEATURES = 8
SIZES = [(FEATURES, 16), (16, 16), (16, 1)]
PENALTY = 10.0


def case() -> Case:
    """f(fake) − f(real) + 10·(‖∇f(x̂)‖ − 1)², x̂ between fake and real at the place given by the batch; f of
    8-16-16-1."""
    return Case(
        name="gradient-penalty",
        # Softplus, not ReLU: its second derivative exists.
        torch_model=lambda: perceptron.torch_model(SIZES, lambda: Softplus(threshold=1e9)),
        torch_loss=_torch_loss,
        loss_fn=loss_fn,
        params_like=perceptron.params_like(SIZES),
        names=perceptron.torch_names(SIZES),
        batch=_batch,
        rows=16,
        # The last bias has gradient f(fake) − f(real) = 0: with the default eps, Adam makes steps of its rounding.
        optimizer=AdamW(lr=2e-3, eps=1e-5, weight_decay=0.1),
        clip_norm=5.0,
    )


def critic(params: Any, x: Any) -> Any:
    """Return the score, a scalar, of one example [FEATURES]."""
    return perceptron.forward(params, x, jax.nn.softplus)[0]


def loss_fn(params: Any, batch: Any, rng: Any) -> tuple[jaxtrain.Loss, dict[str, Any]]:
    """Return the loss of the critic, summed over pairs."""
    del rng

    def loss(real: Any, fake: Any, mix: Any) -> Any:
        slope = jax.grad(critic, argnums=1)(params, mix * real + (1 - mix) * fake)
        penalty = PENALTY * (norm(slope) - 1) ** 2
        return critic(params, fake) - critic(params, real) + penalty

    losses = jax.vmap(loss)(batch["real"], batch["fake"], batch["mix"])
    return jaxtrain.Loss(losses.sum(), weight=len(losses)), {}


def _torch_loss(model: Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    real, fake, mix = batch["real"], batch["fake"], batch["mix"][:, None]
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    penalty = PENALTY * (torch.linalg.vector_norm(slope, dim=1) - 1) ** 2
    losses = (model(fake) - model(real))[:, 0] + penalty
    return losses.sum(), len(losses)


def _batch(seed: int, rows: int) -> Batch:
    rng = np.random.default_rng(seed)
    return {
        "real": rng.standard_normal((rows, FEATURES), np.float32) + 1,
        "fake": rng.standard_normal((rows, FEATURES), np.float32),
        "mix": rng.random(rows, np.float32),
    }
