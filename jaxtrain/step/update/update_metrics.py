"""The metrics of an update."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.step.accumulate import nonzero_weight
from jaxtrain.step.loss_scale import current_scale, used_scales
from jaxtrain.step.nonfinite import Nonfinite
from jaxtrain.step.objective import Loss
from jaxtrain.step.state import TrainState, applied_updates

Metrics = dict[str, jax.Array]


def update_metrics(
    old: TrainState,
    new: TrainState,
    *,
    grad_norm: jax.Array,
    skip: jax.Array | bool,
    lr: jax.Array | None,
    nonfinite: Nonfinite,
) -> Metrics:
    """Return the metrics of one update, from the states before and after it."""
    of_blocks = used_scales(old.loss_scale, new.loss_scale)
    return {
        **({} if lr is None else {"lr": lr}),
        "grad_norm": grad_norm,
        "loss_scale": jnp.asarray(current_scale(old.loss_scale), np.float32),
        **({} if of_blocks is None else {"loss_scales": of_blocks}),
        "skipped": jnp.asarray(skip),
        "applied": applied_updates(new),
        "attempted": new.step,
        "nonfinite_micro_batch": nonfinite.micro_batch,
        "nonfinite_leaf": nonfinite.leaf,
    }


def weighted_means(loss: Loss, metrics: dict[str, Loss]) -> Metrics:
    """Return the weight, and the means of the loss and of the loss_fn's metrics, from their sums."""
    sums = {"loss": loss, **metrics}
    return {"weight": loss.weight, **{name: s.total / nonzero_weight(s.weight) for name, s in sums.items()}}
