"""Losses: what is summed, what is ignored, and what the sum is divided by."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from torch import Tensor
from torch.nn import functional as F

from parity.mutate.mutant import Mutant
from tests.parity.mutants.network import criterion, normal

WEIGHTS = np.array([1, 2, 3, 4, 5], np.float32)


def padded(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw labels, every fourth of which is ignored."""
    return np.where(np.arange(shape[0]) % 4 == 2, -100, rng.integers(5, size=shape[0]))


def shares(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw probabilities of five classes."""
    x = np.exp(normal(rng, shape))
    return x / x.sum(1, keepdims=True)


def cross_entropy(
    z: Any,
    y: Any,
    ignore: bool = True,
    every: bool = False,
    weights: Any = None,
    smoothing: float = 0.0,
    axis: int = -1,
    unweighted: bool = False,
) -> tuple[Any, Any]:
    """Cross-entropy with all options of PyTorch's."""
    log_p = z - jax.nn.logsumexp(z, axis, keepdims=True)
    counted = (y >= 0) if ignore else jnp.ones_like(y, bool)
    picked = jnp.take_along_axis(log_p, jnp.maximum(y, 0)[:, None], -1)[:, 0]
    losses = -(1 - smoothing) * picked - smoothing * log_p.mean(-1)
    scale = counted if weights is None else counted * jnp.asarray(weights)[jnp.maximum(y, 0)]
    return (losses * scale).sum(), len(y) if every else counted.sum()


def mean_cross_entropy(z: Tensor, y: Tensor, **options: Any) -> tuple[Tensor, int]:
    """PyTorch's cross-entropy over the labels that are not ignored."""
    return F.cross_entropy(z, y, reduction="sum", **options), int((y >= 0).sum())


def square(z: Any, y: Any, factor: float = 1.0) -> tuple[Any, Any]:
    """The squared error."""
    return factor * jnp.square(z - y).sum(), z.size


def smooth(z: Any, y: Any, beta: float = 0.5, huber: bool = False) -> tuple[Any, Any]:
    """Smooth L1 loss, or Huber's."""
    d = jnp.abs(z - y)
    total = jnp.where(d < beta, d * d / 2, beta * (d - beta / 2)).sum()
    return (total if huber else total / beta), z.size


def divergence(z: Any, y: Any, rows: bool = False, log: bool = False, swapped: bool = False) -> tuple[Any, Any]:
    """Kullback-Leibler divergence."""
    log_q = jax.nn.log_softmax(z, -1)
    terms = jnp.exp(log_q) * (log_q - jnp.log(y)) if swapped else y * (jnp.log(y) - log_q)
    return terms.sum(), len(z) if rows else z.size


def binary(z: Any, y: Any, positive: float = 3.0) -> tuple[Any, Any]:
    """Binary cross-entropy of logits with weight 3 for positives."""
    return -(positive * y * jax.nn.log_sigmoid(z) + (1 - y) * jax.nn.log_sigmoid(-z)).sum(), z.size


def mutants(theirs: Any, right: Any, labels: Any, **wrong: Any) -> list[Mutant]:
    """A mutant for each of the functions `wrong`, by name."""
    clean = partial(criterion, theirs, right, labels)
    return [
        Mutant(
            name.replace("_", "-"),
            partial(criterion, theirs, ours, labels),
            clean,
            "forward",
            "loss",
            None if "mean" in name else ours,
        )
        for name, ours in wrong.items()
    ]


MUTANTS = [
    *mutants(
        mean_cross_entropy,
        cross_entropy,
        padded,
        cross_entropy_ignore_index=partial(cross_entropy, ignore=False),
        cross_entropy_mean_over_all=partial(cross_entropy, every=True),
        cross_entropy_class_axis=partial(cross_entropy, axis=0),
    ),
    *mutants(
        lambda z, y: mean_cross_entropy(z, y, weight=z.new_tensor(WEIGHTS)),
        partial(cross_entropy, weights=WEIGHTS),
        padded,
        cross_entropy_class_weights_dropped=cross_entropy,
    ),
    *mutants(
        partial(mean_cross_entropy, label_smoothing=0.1),
        partial(cross_entropy, smoothing=0.1),
        padded,
        cross_entropy_label_smoothing_dropped=cross_entropy,
    ),
    *mutants(
        lambda z, y: (F.mse_loss(z, y, reduction="sum"), z.numel()),
        square,
        normal,
        l2_loss_is_half=partial(square, factor=0.5),
    ),
    *mutants(
        lambda z, y: (F.smooth_l1_loss(z, y, reduction="sum", beta=0.5), z.numel()),
        smooth,
        normal,
        smooth_l1_is_huber=partial(smooth, huber=True),
        smooth_l1_beta=partial(smooth, beta=1.0),
    ),
    *mutants(
        lambda z, y: (F.kl_div(F.log_softmax(z, -1), y, reduction="sum"), z.numel()),
        divergence,
        shares,
        kl_div_mean_over_rows=partial(divergence, rows=True),
        kl_div_arguments_swapped=partial(divergence, swapped=True),
    ),
    *mutants(
        lambda z, y: (
            F.binary_cross_entropy_with_logits(z, y, reduction="sum", pos_weight=z.new_tensor(3.0)),
            z.numel(),
        ),
        binary,
        shares,
        binary_cross_entropy_pos_weight_dropped=partial(binary, positive=1.0),
    ),
]
