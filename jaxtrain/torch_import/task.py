"""The task of a training run on an imported module."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxtrain.interop import NameTable, TorchParam
from jaxtrain.paths import none_frozen
from jaxtrain.run import Initial, Task

if TYPE_CHECKING:
    from jaxtrain.torch_import.model import ImportedModel


def task_of(model: "ImportedModel", loss: Callable[..., Any], fields: Mapping[str, Any]) -> Task:
    """Return the task of a model; `ImportedModel.task` describes it."""
    constants = model.saved_constants
    state = {**(model.state or {}), **constants}
    moving = {} if model.state_names is None else model.state_names.params
    loss_fn = model.loss(loss)

    def init() -> Initial:
        # Copies, which a training step may donate.
        return Initial(*jax.tree.map(jnp.array, (model.params, state or None)))

    def with_constants(params: Any, batch: Any, rng: Any, model_state: Any) -> Any:
        # The loss of a model whose buffers do not change.
        result: tuple[Any, ...] = loss_fn(params, batch, rng)
        return (*result, model_state)

    given = {
        "init": init,
        "loss_fn": with_constants if state and model.state is None else loss_fn,
        "frozen": None if model.frozen is none_frozen else model.frozen,
        "names": model.names,
        "buffers": NameTable({**moving, **{name: TorchParam(name) for name in constants}}) if state else None,
    }
    return Task(**{**given, **fields})
