"""Meta-learning by MAML (Finn et al. 2017, arXiv:1703.03400): the loss is that of weights which a step of gradient
descent has already changed, and its gradient runs through that step.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import Module, Tanh
from torch.nn.functional import mse_loss

import jaxtrain
from parity.case import AdamW, Batch, Case
from parity.cases.built_in import perceptron

SHOTS = 10
SIZES = [(1, 16), (16, 16), (16, 1)]
INNER_LR = 0.1


def case() -> Case:
    """Return a case of sine waves, one per row: an inner step on 10 points, the loss on 10 others."""
    return Case(
        name="maml",
        torch_model=lambda: perceptron.torch_model(SIZES, Tanh),
        torch_loss=_torch_loss,
        loss_fn=loss_fn,
        params_like=perceptron.params_like(SIZES),
        names=perceptron.torch_names(SIZES),
        batch=_batch,
        rows=8,
        optimizer=AdamW(lr=1e-2, weight_decay=0.1),
        clip_norm=0.9,
    )


def loss_fn(params: Any, batch: Any, rng: Any) -> tuple[jaxtrain.Loss, dict[str, Any]]:
    """Return the loss after adaptation, summed over tasks."""
    del rng

    def error(params: Any, xs: Any, ys: Any) -> Any:
        return jnp.mean((perceptron.forward(params, xs, jnp.tanh) - ys) ** 2)

    def after_a_step(support_x: Any, support_y: Any, query_x: Any, query_y: Any) -> Any:
        grads = jax.grad(error)(params, support_x, support_y)
        adapted = jax.tree.map(lambda p, g: p - INNER_LR * g, params, grads)
        return error(adapted, query_x, query_y)

    losses = jax.vmap(after_a_step)(batch["support_x"], batch["support_y"], batch["query_x"], batch["query_y"])
    return jaxtrain.Loss(losses.sum(), weight=len(losses)), {}


def _torch_loss(model: Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    params: dict[str, Tensor] = dict(model.named_parameters())
    losses = []
    for support_x, support_y, query_x, query_y in zip(
        batch["support_x"], batch["support_y"], batch["query_x"], batch["query_y"], strict=True
    ):
        error = mse_loss(functional_call(model, params, support_x), support_y)
        grads = torch.autograd.grad(error, list(params.values()), create_graph=True)
        adapted = {name: p - INNER_LR * g for (name, p), g in zip(params.items(), grads, strict=True)}
        losses.append(mse_loss(functional_call(model, adapted, query_x), query_y))
    return torch.stack(losses).sum(), len(losses)


def _batch(seed: int, rows: int) -> Batch:
    rng = np.random.default_rng(seed)
    amplitude, phase = rng.uniform(0.1, 5.0, (rows, 1, 1)), rng.uniform(0.0, np.pi, (rows, 1, 1))
    x = {name: rng.uniform(-5.0, 5.0, (rows, SHOTS, 1)) for name in ("support", "query")}
    waves = {f"{name}_x": value for name, value in x.items()}
    waves |= {f"{name}_y": amplitude * np.sin(value - phase) for name, value in x.items()}
    return {name: array.astype(np.float32) for name, array in waves.items()}
