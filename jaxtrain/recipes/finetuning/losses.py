"""The losses of fine-tuning, of batches of rows."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

import jaxtrain as jt
from jaxtrain import losses
from jaxtrain.recipes.finetuning.trained_decoder import FineTunedModel


def supervised_loss(
    model: FineTunedModel, per_sequence: bool, params: Any, batch: Mapping[str, Any], rng: Any
) -> tuple[jt.Loss, Any]:
    """Return the loss of the tokens of answers.

    Args:
      model: The model.
      per_sequence: Whether every sequence counts the same, whatever its length.
      params: Its params.
      batch: Rows [B, T], whose weights are those of the examples.
      rng: Key of dropout and noise; None in evaluation.
    """
    of_tokens = -model.log_probs(params, batch, rng)
    return losses.supervised(of_tokens, batch["weight"], segments=batch["segments"], per_sequence=per_sequence), {}


def preference_loss(
    model: FineTunedModel, beta: float, params: Any, batch: Mapping[str, Any], rng: Any
) -> tuple[jt.Loss, Any]:
    """Return the DPO loss of pairs, and the accuracy and the margin of their rewards.

    As in TRL there is no dropout, so that the rewards are 0 at the start.

    Args:
      model: The model.
      beta: Factor of the rewards.
      params: Its params.
      batch: Rows [B, 2 · T], first the chosen text, then the rejected, with the weight of the example.
      rng: Not used.
    """
    del rng
    texts = {name: x.reshape(-1, x.shape[1] // 2) for name, x in batch.items()}

    def answers(log_probs: jax.Array) -> tuple[jax.Array, jax.Array]:
        wide = np.promote_types(log_probs.dtype, np.float32)
        sums = (log_probs.astype(wide) * (texts["weight"] > 0).astype(wide)).sum(-1).reshape(-1, 2)
        return sums[:, 0], sums[:, 1]

    chosen, rejected = answers(model.log_probs(params, texts, None))
    base_chosen, base_rejected = answers(model.base_log_probs(params, texts))
    weight = batch["weight"].max(-1)
    is_pair = weight > 0  # not the padding of an evaluation
    margin = beta * ((chosen - base_chosen) - (rejected - base_rejected))
    return jt.Loss.of(losses.dpo(chosen, rejected, base_chosen, base_rejected, beta=beta), weight), reward_metrics(
        margin, is_pair
    )


def reward_metrics(margin: jax.Array, is_pair: jax.Array) -> dict[str, jt.Loss]:
    """Return the accuracy and the mean of the margins by which chosen texts are rewarded more than rejected ones.

    Args:
      margin: float [B].
      is_pair: Whether a row is a pair, bool [B]; the padding of an evaluation is none.
    """
    return {
        "reward_accuracy": jt.Loss.of((margin > 0).astype(margin.dtype), is_pair),
        "reward_margin": jt.Loss.of(margin, is_pair),
    }
