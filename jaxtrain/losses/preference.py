"""Losses of pairs: a chosen and a rejected answer to the same prompt.

They take log-probabilities of whole answers, sums over the tokens of `-cross_entropy`, or rewards. Each returns a loss
per pair; formulas and names of options are those of TRL.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxtrain.errors import UserError
from jaxtrain.losses.operation import operation
from jaxtrain.losses.shapes import require_alike


@operation("beta", "label_smoothing")
def dpo(
    chosen: jax.Array,
    rejected: jax.Array,
    reference_chosen: jax.Array,
    reference_rejected: jax.Array,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> jax.Array:
    """Direct preference optimization (Rafailov et al. 2023): -log σ(β · ((c − c_ref) − (r − r_ref))).

    The reference is the model before training, or the model without its adapters; its log-probabilities are constants,
    which can be computed once for all pairs.

    Args:
      chosen: float[...], log-probability of the chosen answer of each pair.
      rejected: float[...], log-probability of the rejected answer.
      reference_chosen: float[...], log-probability of the chosen answer under the reference.
      reference_rejected: float[...], log-probability of the rejected answer under the reference.
      beta: Factor of the difference; the larger, the nearer the model stays to the reference.
      label_smoothing: Probability, in [0, 0.5), that the label of a pair is wrong (conservative DPO, Mitchell 2023).

    Returns:
      float[...].

    Raises:
      UserError: The shapes differ, `beta` is not positive, or `label_smoothing` is out of range.

    Example:
      >>> log_probs = jnp.array([-3.0]), jnp.array([-4.0]), jnp.array([-3.5]), jnp.array([-3.5])
      >>> round(float(dpo(*log_probs, beta=1.0)[0]), 4)
      0.3133
    """
    require_alike(
        chosen=chosen, rejected=rejected, reference_chosen=reference_chosen, reference_rejected=reference_rejected
    )
    _require_positive(beta)
    if not 0.0 <= label_smoothing < 0.5:
        raise UserError(f"label_smoothing must be in [0, 0.5), got {label_smoothing}")
    reference = jax.lax.stop_gradient((reference_chosen, reference_rejected))
    margin = beta * ((chosen - reference[0]) - (rejected - reference[1]))
    losses = -jax.nn.log_sigmoid(margin)
    if label_smoothing:
        losses = (1 - label_smoothing) * losses - label_smoothing * jax.nn.log_sigmoid(-margin)
    return losses


@operation("beta")
def ipo(
    chosen: jax.Array,
    rejected: jax.Array,
    reference_chosen: jax.Array,
    reference_rejected: jax.Array,
    chosen_tokens: jax.Array,
    rejected_tokens: jax.Array,
    *,
    beta: float = 0.1,
) -> jax.Array:
    """Identity preference optimization (Azar et al. 2023), on log-probabilities per token, as in TRL.

    Args:
      chosen: As of `dpo`.
      rejected: As of `dpo`.
      reference_chosen: As of `dpo`.
      reference_rejected: As of `dpo`.
      chosen_tokens: Numbers [...] of tokens of the chosen answers.
      rejected_tokens: Numbers [...] of tokens of the rejected answers.
      beta: The paper's τ: the target of the difference is 1 / 2β.

    Returns:
      float[...].

    Raises:
      UserError: The shapes differ or `beta` is not positive.

    Example:
      >>> log_probs = jnp.array([-3.0]), jnp.array([-4.0]), jnp.array([-3.5]), jnp.array([-3.5])
      >>> round(float(ipo(*log_probs, jnp.array([1]), jnp.array([2]), beta=1.0)[0]), 4)
      0.0625
    """
    require_alike(
        chosen=chosen,
        rejected=rejected,
        reference_chosen=reference_chosen,
        reference_rejected=reference_rejected,
        chosen_tokens=chosen_tokens,
        rejected_tokens=rejected_tokens,
    )
    _require_positive(beta)
    reference = jax.lax.stop_gradient((reference_chosen, reference_rejected))
    ratio = (chosen - reference[0]) / _at_least_one(chosen_tokens, chosen)
    rejected_ratio = (rejected - reference[1]) / _at_least_one(rejected_tokens, rejected)
    return jnp.square(ratio - rejected_ratio - 1 / (2 * beta))


@operation("center")
def bradley_terry(chosen: jax.Array, rejected: jax.Array, *, margin: ArrayLike = 0.0, center: float = 0.0) -> jax.Array:
    """Loss of a reward model (Bradley and Terry 1952; Ouyang et al. 2022): -log σ(c − r − margin).

    Args:
      chosen: float[...], reward of the chosen answer of each pair.
      rejected: float[...], reward of the rejected answer.
      margin: Number or float[...], by how much the chosen one is better (Touvron et al. 2023).
      center: Factor of (c + r)², which keeps rewards around 0 (Eisenstein et al. 2023).

    Returns:
      float[...].

    Raises:
      UserError: The shapes differ.

    Example:
      >>> round(float(bradley_terry(jnp.array([1.0]), jnp.array([0.0]))[0]), 4)
      0.3133
    """
    require_alike(chosen=chosen, rejected=rejected, **({"margin": jnp.asarray(margin)} if jnp.ndim(margin) else {}))
    losses = -jax.nn.log_sigmoid(chosen - rejected - margin)
    return losses + center * jnp.square(chosen + rejected) if center else losses


def _require_positive(beta: float) -> None:
    if beta <= 0:
        raise UserError(f"beta must be positive, got {beta}")


def _at_least_one(tokens: jax.Array, like: jax.Array) -> jax.Array:
    return jnp.maximum(tokens, 1).astype(like.dtype)
