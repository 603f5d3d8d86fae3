"""Losses on the distances or similarities of embeddings.

At a margin they have the gradient of PyTorch before 2.14, whose `clamp` passes it on at its bounds.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.losses.classification import cross_entropy
from jaxtrain.losses.operation import operation
from jaxtrain.losses.shapes import require_alike
from jaxtrain.losses.subgradients import clamp, norm

_EPSILON = float(np.float32(1e-12))
"""Added to the squared lengths, also in float64 (a float in `aten/src/ATen/native/Loss.cpp`)."""


@operation("margin")
def cosine_embedding(a: jax.Array, b: jax.Array, targets: jax.Array, *, margin: float = 0.0) -> jax.Array:
    """Cosine embedding loss, as `torch.nn.functional.cosine_embedding_loss(reduction="none")`.

    1 − cos where the target is 1; max(0, cos − margin) where it is −1.

    Args:
      a: float[..., features].
      b: float[..., features].
      targets: 1 or −1, [...].
      margin: Bound on the cosine of dissimilar pairs.

    Returns:
      float[...].

    Raises:
      UserError: The shapes differ.

    Example:
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
    """Triplet loss, as `torch.nn.functional.triplet_margin_loss(reduction="none")`.

    max(0, margin + distance(anchor, positive) − distance(anchor, negative)), in the p-norm.

    Args:
      anchor: float[..., features].
      positive: float[..., features].
      negative: float[..., features].
      margin: Margin between the distances.
      p: Order of the norm.
      swap: Whether to use the distance of positive and negative if it is smaller than that of anchor and negative.

    Returns:
      float[...].

    Raises:
      UserError: The shapes differ.

    Example:
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
    """Hinge embedding loss, as `torch.nn.functional.hinge_embedding_loss(reduction="none")`.

    The distance where the target is 1; max(0, margin − distance) where it is −1.

    Args:
      distances: float[...].
      targets: 1 or −1, the same shape.
      margin: Distance that dissimilar pairs should have.

    Returns:
      float[...].

    Raises:
      UserError: The shapes differ.

    Example:
      >>> hinge_embedding(jnp.array([0.25, 0.25]), jnp.array([1, -1])).tolist()
      [0.25, 0.75]
    """
    require_alike(distances=distances, targets=targets)
    apart = jnp.where(targets != 1, clamp(margin - distances, 0), 0)
    return apart + jnp.where(targets != -1, distances, 0)


def info_nce(similarities: jax.Array) -> jax.Array:
    """InfoNCE: cross-entropy of each row's own column against all others.

    Args:
      similarities: float[N, M ≥ N], divided by the temperature; the positive of row i is column i.

    Returns:
      float[N].

    Example:
      >>> print(info_nce(jnp.array([[0.0, 0.0], [0.0, 0.0]])).round(4))
      [0.6931 0.6931]

    References:
      van den Oord et al., Representation Learning with Contrastive Predictive Coding, 2018.
    """
    return cross_entropy(similarities, jnp.arange(len(similarities)))


def clip(similarities: jax.Array) -> jax.Array:
    """CLIP's loss: the mean of `info_nce` over the images and over the texts.

    Summed and divided by N it is `image_text_contrastive_loss` of `transformers`.

    Args:
      similarities: float[N, N], of texts and their images, divided by the temperature.

    Returns:
      float[N].

    Raises:
      UserError: `similarities` is not square.

    Example:
      >>> print(clip(jnp.array([[0.0, 0.0], [0.0, 0.0]])).round(4))
      [0.6931 0.6931]

    References:
      Radford et al., Learning Transferable Visual Models From Natural Language Supervision, 2021.
    """
    if similarities.ndim != 2 or len(similarities) != len(similarities.T):
        raise UserError(f"similarities must be [N, N], one text per image, got {list(similarities.shape)}")
    return (info_nce(similarities) + info_nce(similarities.T)) / 2
