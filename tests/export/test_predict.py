"""The `predict` of a task as a function for export."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.export.inference import ROWS
from jaxtrain.export.predict import predict_inference


@pytest.mark.parametrize("evaluated", ["train", "validation"])
def test_an_export_is_verified_on_rows_of_the_evaluation_or_else_of_the_training(evaluated: str) -> None:
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(3, 2)).astype(np.float32)}
    data = {name: {"x": rng.normal(size=(12, 3)).astype(np.float32)} for name in ("train", evaluated)}

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        raise AssertionError("an export computes no loss")

    def predict(params: Any, batch: Any, model_state: Any) -> Any:
        return jnp.tanh(batch["x"] @ params["w"])

    task = jt.Task(init=lambda: params, loss_fn=loss_fn, predict=predict, **data)
    inference = predict_inference(jt.Recipe(batch_size=8), task, params, None)
    rows = data[evaluated]["x"][:ROWS]
    np.testing.assert_array_equal(inference.rows["x"], rows)
    for count in (1, ROWS):
        logits = inference(inference.weights, rows[:count])
        np.testing.assert_allclose(logits, np.tanh(rows[:count] @ params["w"]), rtol=1e-6)
