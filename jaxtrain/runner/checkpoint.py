"""Checkpoints: the whole `TrainState` and the data position, by orbax."""

import logging
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxtrain.errors import UserError
from jaxtrain.step import TrainState

KEPT = 3
# orbax reports every phase of every save at INFO through absl.
logging.getLogger("absl").setLevel(logging.WARNING)


class Checkpoints:
    """The checkpoints of one run: saved in the background, the newest `KEPT` of them kept."""

    def __init__(self, path: Path) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, enable_async_checkpointing=True)
        self._path = path
        self._manager = ocp.CheckpointManager(path.absolute(), options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._manager.wait_until_finished()
        self._manager.close()

    def save(self, state: TrainState, data: dict[str, Any]) -> None:
        """Save under `state.step`, unless that step is saved already."""
        step = int(state.step)
        if step != self._manager.latest_step():
            items = ocp.args.Composite(state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(data))
            self._manager.save(step, args=items)

    def restore(self, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """(state, data position) of the newest checkpoint, with the shapes and dtypes of `like`.

        Raises `UserError` where there is none.
        """
        items = ocp.args.Composite(state=ocp.args.StandardRestore(_abstract(like)), data=ocp.args.JsonRestore())
        restored = self._manager.restore(self._newest(), args=items)
        return restored["state"], restored["data"]

    def restore_params(self, like: Any) -> Any:
        """The parameters alone of the newest checkpoint. Raises `UserError` where there is none."""
        item = {"params": _abstract(like)}
        shardings = ocp.checkpoint_utils.construct_restore_args(item)
        tree = ocp.args.PyTreeRestore(item, restore_args=shardings, partial_restore=True)
        return self._manager.restore(self._newest(), args=ocp.args.Composite(state=tree))["state"]["params"]

    def _newest(self) -> int:
        step = self._manager.latest_step()
        if step is None:
            raise UserError(f"{self._path.parent} has no checkpoint: train it first, without --resume")
        return int(step)


def _abstract(tree: Any) -> Any:
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or here), tree)


def restore_params(path: Path, like: Any) -> Any:
    """The parameters alone of the newest checkpoint under `path`. Raises `UserError` where there is none."""
    with Checkpoints(path) as checkpoints:
        return checkpoints.restore_params(like)
