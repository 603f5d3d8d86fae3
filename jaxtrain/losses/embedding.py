"""Losses that say which embeddings are to be near each other."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.losses.classification import cross_entropy
from jaxtrain.losses.operation import operation
from jaxtrain.losses.shapes import require_alike
from jaxtrain.losses.subgradients import clamp, norm

_EPSILON = float(np.float32(1e-12))
"""Added to the squared lengths, in float64 too (`aten/src/ATen/native/Loss.cpp`: a float)."""


@operation("margin")
def cosine_embedding(a: jax.Array, b: jax.Array, targets: jax.Array, *, margin: float = 0.0) -> jax.Array:
    """`torch.nn.functional.cosine_embedding_loss(reduction="none")`: a and b [..., features], targets ±1 [...] → [...].

    1 − cos where the target is 1, the cosine's excess over the margin where it is −1.

    >>> print(cosine_embedding(jnp.eye(2), jnp.eye(2), jnp.array([1, -1]), margin=0.25).round(4))
    [0.   0.75]
    """
    require_alike(a=a, b=b)
    require_alike(a=a[..., 0], targets=targets)
    squares = (jnp.square(a).sum(-1) + _EPSILON) * (jnp.square(b).sum(-1) + _EPSILON)
    cosine = (a * b).sum(-1) / jnp.sqrt(squares)
    return jnp.where(targets == 1, 1 - cosine, jnp.where(targets == -1, clamp(cosine - margin, 0), 0))


@operation("margin", "p", "swap")
def triplet_margin(
    anchor: jax.Array,
    positive: jax.Array,
    negative: jax.Array,
    *,
    margin: float = 1.0,
    p: float = 2.0,
    swap: bool = False,
) -> jax.Array:
    """`torch.nn.functional.triplet_margin_loss(reduction="none")`: three of [..., features] → [...].

    How far the positive is from being nearer the anchor than the negative by the margin, in the p-norm. With `swap`
    the negative's distance is that to the positive where this is less.

    >>> triplet_margin(jnp.zeros((1, 2)), jnp.ones((1, 2)), jnp.ones((1, 2)), margin=0.5).tolist()
    [0.5]
    """
    require_alike(anchor=anchor, positive=positive, negative=negative)

    def distance(a: jax.Array, b: jax.Array) -> jax.Array:
        return norm(a - b + 1e-6, p, axis=-1)  # `torch.nn.functional.pairwise_distance`

    far = distance(anchor, negative)
    if swap:
        far = jnp.minimum(far, distance(positive, negative))
    return clamp(margin + distance(anchor, positive) - far, 0)


@operation("margin")
def hinge_embedding(distances: jax.Array, targets: jax.Array, *, margin: float = 1.0) -> jax.Array:
    """`torch.nn.functional.hinge_embedding_loss(reduction="none")`: distances and targets ±1, [...] → [...].

    The distance where the target is 1, what it lacks of the margin where it is −1.

    >>> hinge_embedding(jnp.array([0.25, 0.25]), jnp.array([1, -1])).tolist()
    [0.25, 0.75]
    """
    require_alike(distances=distances, targets=targets)
    apart = jnp.where(targets != 1, clamp(margin - distances, 0), 0)
    return apart + jnp.where(targets != -1, distances, 0)


def info_nce(similarities: jax.Array) -> jax.Array:
    """InfoNCE (van den Oord et al. 2018): similarities [N, M ≥ N] over temperature → [N], row i's own column being i.

    The other columns are its negatives: those of the other rows, and any more.

    >>> print(info_nce(jnp.array([[0.0, 0.0], [0.0, 0.0]])).round(4))
    [0.6931 0.6931]
    """
    return cross_entropy(similarities, jnp.arange(len(similarities)))


def clip(similarities: jax.Array) -> jax.Array:
    """CLIP's loss (Radford et al. 2021): similarities of N texts and their N images over temperature, [N, N] → [N].

    The mean of `info_nce` among the images and among the texts: summed and divided by N it is `transformers`'
    `image_text_contrastive_loss`.

    >>> print(clip(jnp.array([[0.0, 0.0], [0.0, 0.0]])).round(4))
    [0.6931 0.6931]
    """
    if similarities.ndim != 2 or len(similarities) != len(similarities.T):
        raise UserError(
            f"clip was given similarities {list(similarities.shape)}: give it a text for each image, [N, N]"
        )
    return (info_nce(similarities) + info_nce(similarities.T)) / 2
