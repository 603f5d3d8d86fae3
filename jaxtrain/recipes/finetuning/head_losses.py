"""The losses of models with a head on the last token, of batches of rows."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

import jaxtrain as jt
from jaxtrain import losses
from jaxtrain.recipes.finetuning.losses import reward_metrics
from jaxtrain.recipes.finetuning.trained_decoder import FineTunedModel
from jaxtrain.run import row_weights


def rewards(model: FineTunedModel, params: Any, batch: Mapping[str, Any], rng: jax.Array | None = None) -> jax.Array:
    """Return the rewards of the chosen and the rejected texts, float [B, 2].

    Args:
      model: The model.
      params: Its params.
      batch: `tokens`, int [B, 2 · T], first the chosen text, then the rejected.
      rng: Key of dropout; None for none.
    """
    tokens = batch["tokens"]
    scores = model.scores(params, tokens.reshape(-1, tokens.shape[1] // 2), rng)
    return scores.astype(np.promote_types(scores.dtype, np.float32)).reshape(-1, 2)


def reward_loss(
    model: FineTunedModel, center: float, params: Any, batch: Mapping[str, Any], rng: Any
) -> tuple[jt.Loss, Any]:
    """Return the loss of Bradley and Terry of pairs, and the accuracy and the margin of their rewards.

    As in TRL there is no dropout.

    Args:
      model: The model.
      center: Factor of the squared sums of rewards.
      params: Its params.
      batch: As of `rewards`.
      rng: Not used.
    """
    del rng
    chosen, rejected = rewards(model, params, batch).T
    is_pair, margin = weights(batch) > 0, chosen - rejected
    return jt.Loss.of(losses.bradley_terry(chosen, rejected, center=center), is_pair), reward_metrics(margin, is_pair)


def classification_loss(model: FineTunedModel, params: Any, batch: Mapping[str, Any], rng: Any) -> tuple[jt.Loss, Any]:
    """Return the cross-entropy of the labels, and the accuracy.

    Args:
      model: The model.
      params: Its params.
      batch: `tokens`, int [B, T], and `label`, int [B].
      rng: Key of dropout; None in evaluation.
    """
    predictions = jt.Predictions(model.scores(params, batch["tokens"], rng), batch["label"], weights(batch))
    return predictions.loss(), {"accuracy": predictions.accuracy()}


def weights(batch: Mapping[str, Any]) -> Any:
    """Return the weight of every row, float [B]."""
    return row_weights(batch, len(batch["tokens"]))
