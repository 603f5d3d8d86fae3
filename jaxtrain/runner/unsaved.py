"""Parameters that checkpoints leave out: frozen ones that the task reads or creates again, bit for bit."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxtrain.errors import UserError
from jaxtrain.paths import Frozen, none_frozen, path_name
from jaxtrain.run import Initial, Task
from jaxtrain.step import TrainState


@dataclass(frozen=True)
class Unsaved:
    """Parameters that a checkpoint does not hold. None is in the moving average, which has no frozen ones.

    Attributes:
      is_unsaved: Predicate on a parameter's path.
      task: The task that reads or creates them.
    """

    is_unsaved: Frozen = none_frozen
    task: Task | None = None

    @classmethod
    def of(cls, task: Task) -> "Unsaved":
        """Return those of a task."""
        return cls() if task.unsaved is None else cls(task.unsaved, task)

    @cached_property
    def digests(self) -> Mapping[str, str]:
        """Digests of the files that they are read from, by path."""
        return {} if self.task is None or self.task.digests is None else self.task.digests()

    def saved_digests(self) -> dict[str, str]:
        """Return the digests as a checkpoint holds them, by the names of the files: their folder may be moved."""
        return {Path(path).name: digest for path, digest in self.digests.items()}

    def check_digests(self, saved: Mapping[str, str] | None) -> None:
        """Raise `UserError` if the files differ from those of a checkpoint; None if it holds no digests."""
        found = self.saved_digests()
        if saved is None or saved == found:
            return
        changed = [path for path in self.digests if saved.get(Path(path).name) != found[Path(path).name]]
        raise UserError(
            f"{', '.join(changed or sorted(saved.keys() - found.keys()))}, which the run's parameters are read from, "
            "changed after the run started: restore it, or start a new run with another --out"
        )

    def saved(self, params: Any) -> Any:
        """Return parameters with None for those that are not saved."""
        if self.is_unsaved is none_frozen:
            return params
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: None if self.is_unsaved(path_name(path)) else leaf, params
        )

    def saved_state(self, state: TrainState) -> TrainState:
        """Return a state with None for what is not saved."""
        return state._replace(params=self.saved(state.params))

    def complete(self, saved: Any, like: Any) -> Any:
        """Return restored parameters with those that were not saved.

        Args:
          saved: Result of `saved`, with arrays.
          like: All parameters, or their shapes, with their dtypes and shardings.
        """
        if self.is_unsaved is none_frozen:
            return saved

        def leaf(path: Any, like: Any, created: jax.Array, restored: Any) -> Any:
            # A policy may have other dtypes than the initial parameters.
            return created.astype(like.dtype) if self.is_unsaved(path_name(path)) else restored

        return jax.tree_util.tree_map_with_path(leaf, like, self._created(saved, like), saved)

    def complete_state(self, saved: TrainState, like: TrainState) -> TrainState:
        """Return a restored state with what was not saved."""
        return saved._replace(params=self.complete(saved.params, like.params))

    def _created(self, saved: Any, like: Any) -> Any:
        """Return the initial parameters with the dtypes and shardings of `like`, None for those that were restored."""
        assert self.task is not None
        if self.task.load is not None:
            wanted = jax.tree.map(lambda x, like: like if x is None else None, saved, like, is_leaf=lambda x: x is None)
            return self.task.initial(Initial(wanted)).params
        shardings, create = jax.tree.map(lambda x: x.sharding, like), lambda: self.task.create().params
        is_sharded = all(isinstance(sharding, NamedSharding) for sharding in jax.tree.leaves(shardings))
        return jax.jit(create, out_shardings=shardings)() if is_sharded else create()
