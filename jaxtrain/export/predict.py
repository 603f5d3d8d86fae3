"""The `predict` of any task as a function for export: named weights and the arrays of a batch to predictions."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.export.inference import ROWS, Inference, widen
from jaxtrain.interop import leaves, unflatten
from jaxtrain.run import Input, Predictions, Recipe, Task, evaluation_batches

_STATE = "model_state/"
_REASON_LENGTH = 160


def predict_inference(recipe: Recipe, task: Task, params: Any, model_state: Any) -> Inference:
    """Build the inference function of a task's `predict`; float16 and bfloat16 weights become float32.

    The inputs are the arrays of a batch on which the logits depend, or the output if `predict` returns another array.
    The batch size is symbolic if `predict` can be traced so, else that of the run's evaluations.

    Args:
      recipe: The settings of the run.
      task: Its task.
      params: The trained parameters.
      model_state: The trained model_state.

    Raises:
      UserError: The task has no `predict`, or it returns several arrays or none that depends on the batch.
    """
    predict = task.predict
    if predict is None:
        raise UserError("the task has no `predict`, which is what is exported: define Task.predict")
    data = task.train if task.validation is None else task.validation
    batch = next(iter(evaluation_batches(data, task, recipe)))
    weights = {path: widen(x) for path, x in leaves(params)}
    if model_state is not None:
        weights |= {f"{_STATE}{path}": widen(x) for path, x in leaves(model_state)}
    like_params, like_state = jax.eval_shape(lambda *trees: trees, params, model_state)

    def output(arrays: Mapping[str, Any], weights: Mapping[str, Any]) -> Any:
        state = {path.removeprefix(_STATE): x for path, x in weights.items() if path.startswith(_STATE)}
        trained = unflatten(weights, like_params)
        found = predict(trained, arrays, None if like_state is None else unflatten(state, like_state))
        found = found.logits if isinstance(found, Predictions) else found
        if len(jax.tree.leaves(found)) != 1:
            kind = f"{type(found).__name__} of {len(jax.tree.leaves(found))} arrays"
            raise UserError(f"predict must return jaxtrain.Predictions or one array to be exported, got a {kind}")
        return jax.tree.leaves(found)[0]

    names = _inputs(output, batch, weights)
    if not names:
        raise UserError("the predictions do not depend on the batch: fix Task.predict")

    def logits(weights: Mapping[str, Any], *inputs: Any) -> Any:
        # What only the targets and weights depend on is not computed.
        rows = inputs[0].shape[0]
        rest = {name: jnp.zeros((rows, *x.shape[1:]), x.dtype) for name, x in batch.items() if name not in names}
        return output(rest | dict(zip(names, inputs, strict=True)), weights)

    inputs = {name: Input(batch[name].shape[1:], batch[name].dtype.type) for name in names}
    found = Inference(None, weights, inputs, logits, None, {name: batch[name][:ROWS] for name in names})
    reason = _why_fixed(found)
    if reason is None:
        return found
    rows = {name: batch[name] for name in names}
    note = f"the batch size is fixed, because predict cannot be traced with any ({reason})"
    return replace(found, rows=rows, batch=len(next(iter(rows.values()))), note=note)


def _inputs(output: Any, batch: Mapping[str, Any], weights: Mapping[str, Any]) -> list[str]:
    """Return the names of the arrays of a batch that the output depends on."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (dict(batch), dict(weights)))
    kept = jax.export.export(jax.jit(output))(*shapes).module_kept_var_idx
    return [name for i, name in enumerate(sorted(batch)) if i in kept]


def _why_fixed(inference: Inference) -> str | None:
    """Return why the function cannot be traced with a symbolic batch size; None if it can."""
    shapes = {name: jax.ShapeDtypeStruct(np.shape(x), x.dtype) for name, x in inference.weights.items()}
    try:
        out = jax.eval_shape(inference, shapes, *inference.symbolic())
    except Exception as error:  # any: the user's code may use the size as a number
        return f"{type(error).__name__}: {error}".partition("\n")[0][:_REASON_LENGTH]
    is_batched = bool(out.shape) and not isinstance(out.shape[0], int)
    return None if is_batched else f"it returns shape {list(out.shape)}"
