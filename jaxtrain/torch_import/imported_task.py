"""The task of a training run on an imported module."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.errors import UserError
from jaxtrain.interop import NameTable, TorchParam
from jaxtrain.paths import Frozen, none_frozen
from jaxtrain.run import Initial, Task
from jaxtrain.step import LossFn
from jaxtrain.torch_import.ops.int64 import holds_int64


def task_of(
    loss_fn: LossFn,
    params: Any,
    state: Mapping[str, Any] | None,
    constants: Mapping[str, Any],
    *,
    names: NameTable,
    state_names: NameTable | None,
    frozen: Frozen,
    no_decay: Callable[[str], bool],
    fields: Mapping[str, Any],
) -> Task:
    """Return the task of an imported module, as `ImportedModel.task`.

    Args:
      loss_fn: Its loss, of four arguments if it has a state.
      params: Initial parameters.
      state: Initial state, or None.
      constants: Buffers that do not change, which PyTorch's checkpoints contain.
      names: Table of the parameters.
      state_names: Table of the state, or None.
      frozen: Predicate of the parameters that are not trained.
      no_decay: Predicate of the parameters that do not decay.
      fields: Further fields of the task.
    """
    if large := [name for name, x in constants.items() if holds_int64(x)]:
        raise UserError(
            f"the buffer {large[0]!r} has integers beyond int32, which a checkpoint cannot hold: register it with "
            "persistent=False"
        )
    whole = {**(state or {}), **constants}
    moving = {} if state_names is None else state_names.params

    def init() -> Initial:
        # Copies, which a training step may donate.
        return Initial(*jax.tree.map(jnp.array, (params, whole or None)))

    def with_constants(params: Any, batch: Any, rng: Any, model_state: Any) -> Any:
        # The loss of a module whose buffers do not change.
        result: tuple[Any, ...] = loss_fn(params, batch, rng)
        return (*result, model_state)

    with_constants.failed_assumption = getattr(loss_fn, "failed_assumption", None)  # type: ignore[attr-defined]

    given = {
        "init": init,
        "loss_fn": with_constants if whole and state is None else loss_fn,
        "frozen": None if frozen is none_frozen else frozen,
        "no_decay": no_decay,
        "names": names,
        "buffers": NameTable({**moving, **{name: TorchParam(name) for name in constants}}) if whole else None,
    }
    return Task(**{**given, **fields})
