"""Parameters that checkpoints leave out: frozen ones that the task's `init` creates again, bit for bit."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxtrain.paths import Frozen, none_frozen, path_name
from jaxtrain.run import Initial, Task
from jaxtrain.step import TrainState


@dataclass(frozen=True)
class Unsaved:
    """Parameters, and their copies in the moving average, that a checkpoint does not hold.

    Attributes:
      is_unsaved: Predicate on a parameter's path.
      create: Creates all parameters of the run as they were before the first step.
      create_on_host: The same in the host's memory, from which a mesh has its shards.
    """

    is_unsaved: Frozen = none_frozen
    create: Callable[[], Any] = dict
    create_on_host: Callable[[], Any] = dict

    @classmethod
    def of(cls, task: Task) -> "Unsaved":
        """Return those of a task."""
        if task.unsaved is None:
            return cls()
        return cls(task.unsaved, lambda: task.initial().params, lambda: initial_on_host(task).params)

    def saved(self, params: Any) -> Any:
        """Return parameters with None for those that are not saved."""
        if self.is_unsaved is none_frozen:
            return params
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: None if self.is_unsaved(path_name(path)) else leaf, params
        )

    def saved_state(self, state: TrainState) -> TrainState:
        """Return a state with None for what is not saved."""
        return state._replace(params=self.saved(state.params), ema=self.saved(state.ema))

    def complete(self, saved: Any, like: Any) -> Any:
        """Return restored parameters with those that were not saved.

        Args:
          saved: Result of `saved`, with arrays.
          like: All parameters, or their shapes, with the dtypes and shardings to create.
        """
        if self.is_unsaved is none_frozen:
            return saved

        def leaf(path: Any, like: Any, created: jax.Array, restored: Any) -> Any:
            # A policy may have other dtypes than the initial parameters.
            return created.astype(like.dtype) if self.is_unsaved(path_name(path)) else restored

        return jax.tree_util.tree_map_with_path(leaf, like, self._created(like), saved)

    def complete_state(self, saved: TrainState, like: TrainState) -> TrainState:
        """Return a restored state with what was not saved."""
        params = self.complete(saved.params, like.params)
        ema = None if like.ema is None else self.complete(saved.ema, like.ema)
        return saved._replace(params=params, ema=ema)

    def _created(self, like: Any) -> Any:
        shardings = jax.tree.map(lambda x: x.sharding, like)
        if all(isinstance(sharding, NamedSharding) for sharding in jax.tree.leaves(shardings)):
            return jax.device_put(self.create_on_host(), shardings)
        return self.create()


def initial_on_host(task: Task) -> Initial:
    """Create the initial arrays of a task in the host's memory, so that no device has to hold all of them."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return task.initial()
