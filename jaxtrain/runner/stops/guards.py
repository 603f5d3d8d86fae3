"""Guards of a run: an applied inf or NaN, a loss spike, and updates that are always skipped.

A step is checked by its metrics while the next one runs, so that the device never waits. Before a state is saved all of
it is checked: a checkpoint is never invalid, and never evicts a valid one.
"""

import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxtrain.data import check_zip
from jaxtrain.data.loader import Batch
from jaxtrain.errors import UserError
from jaxtrain.folder_files import make_folder, new_file, open_file
from jaxtrain.observe import Rollback
from jaxtrain.paths import path_name
from jaxtrain.run import Recipe
from jaxtrain.runner.fetched_batches import DispatchedStep
from jaxtrain.step import TrainState, cause_in_batch, current_scale, failed_assumption, finite_leaves, leaf_name

WINDOW = 64
"""Applied updates whose median loss a loss is compared to."""
FEWEST = 16
"""Fewest of them for a comparison."""
MOST_ROLLBACKS = 3
"""Consecutive rollbacks to one checkpoint before the run fails."""


class RunInvalid(Exception):  # noqa: N818
    """A step after which the run cannot continue.

    Attributes:
      step: The step.
      reason: What is wrong with it.
    """

    def __init__(self, step: DispatchedStep, reason: str) -> None:
        super().__init__(reason)
        self.step, self.reason = step, reason


class Spike(RunInvalid):
    """A step whose loss spiked."""


class Guard:
    """Checks the steps of a run.

    Args:
      recipe: The settings of the run.
      params: Its parameters, or their shapes, for the names of leaves.
      loss_fn: Its loss, which may have assumptions about a batch.
    """

    def __init__(self, recipe: Recipe, params: Any, loss_fn: Any = None) -> None:
        self._loss_fn = loss_fn
        self._factor, self._max_skips = recipe.spike_factor, recipe.max_skips
        self._params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._newest: DispatchedStep | None = None
        self._is_checked = True
        self._skips, self._reached_skip_limit = 0, False
        self._nonfinite = -1, -1  # micro-batch and leaf of the last gradient that was not finite
        self._target, self._rollbacks = -1, 0
        self._bad_batch: str | None = None
        self._has_warned = False

    @property
    def reached_skip_limit(self) -> bool:
        """Whether `max_skips` updates in a row were skipped."""
        return self._reached_skip_limit

    def add(self, step: DispatchedStep) -> None:
        """Add a dispatched step and check the one before it.

        Raises:
          RunInvalid: The step before it is invalid; `Spike` if its loss spiked.
        """
        # The copies are under way before the values are read.
        for name in ("loss", "nonfinite_leaf", "skipped"):
            step.metrics[name].copy_to_host_async()
        self.settle()
        self._newest, self._is_checked = step, False

    def settle(self) -> None:
        """Check the newest step, waiting for it. Raises as `add`."""
        if not self._is_checked and self._newest is not None:
            self._is_checked = True
            self._check(self._newest)

    def check(self, state: TrainState) -> None:
        """Check the newest step and the state after it, before that is saved. Raises as `add`."""
        self.settle()
        if self._newest is not None and (where := find_nonfinite_array(state)):
            raise RunInvalid(self._newest, f"{where} holds inf or NaN, though loss and gradient were finite")

    def _check(self, step: DispatchedStep) -> None:
        # np.asarray is the cheapest conversion of a scalar.
        loss, leaf = float(np.asarray(step.metrics["loss"])), int(np.asarray(step.metrics["nonfinite_leaf"]))
        is_skipped = bool(np.asarray(step.metrics["skipped"]))
        self._skips = self._skips + 1 if is_skipped else 0
        self._reached_skip_limit |= self._skips >= self._max_skips
        if leaf >= 0:
            self._nonfinite = int(step.metrics["nonfinite_micro_batch"]), leaf
        if cause := failed_assumption(self._loss_fn, loss, step.batch.arrays):
            # No overflow: the same batch is NaN with every loss scale.
            raise RunInvalid(step, f"the loss is {loss:g}, {cause}")
        if is_skipped and not self._has_warned:
            # Integers are no cause here: a scale that is too large has the same effect.
            cause = cause_in_batch(loss, step.batch.arrays, ranges=False)
            self._has_warned = cause is not None
            self._bad_batch = cause and f"warning: step {step.step} was skipped: the loss is {loss:g}, {cause}"
        if leaf < 0 and math.isfinite(loss):
            if self._factor is not None:
                self._check_loss(step, loss, self._factor)
        elif not is_skipped:
            where = "is finite"
            if leaf >= 0:
                name = leaf_name(self._params, leaf)
                where = f"has its first inf or NaN in {name}, micro-batch {self._nonfinite[0]}"
            raise RunInvalid(step, f"the loss is {loss:g} and its gradient {where}")

    def _check_loss(self, step: DispatchedStep, loss: float, factor: float) -> None:
        if len(self._losses) >= FEWEST and loss > factor * (usual := median(self._losses)) > 0:
            raise Spike(step, f"the loss is {loss:g}, more than {factor:g} times {usual:g}, the median before it")
        self._losses.append(loss)

    def warning(self) -> str | None:
        """Return a warning, once, of a batch that makes its loss NaN or inf, so that its update is skipped."""
        text, self._bad_batch = self._bad_batch, None
        return text

    def skip_limit_message(self, step: int, state: TrainState) -> str:
        """Return the error of a run whose updates are always skipped."""
        micro_batch, leaf = self._nonfinite
        loss = float(self._newest.metrics["loss"]) if self._newest else 0.0
        cause = self._newest and cause_in_batch(loss, self._newest.batch.arrays)
        return (
            f"step {step}: {self._max_skips} updates in a row were skipped, their gradients inf or NaN down to "
            f"loss scale {float(current_scale(state.loss_scale)):g}, the last one first in "
            f"{leaf_name(state.params, leaf)}, micro-batch {micro_batch}; the state is saved: "
            f"{f'the loss is {loss:g}, {cause}; if that is not it, ' if cause else ''}start again with a lower --lr or "
            "with --precision bf16"
        )

    def roll_back(self, target: int, state: Mapping[str, Any] | None, *, skips: int) -> bool:
        """Return to the checkpoint of step `target`, which holds `state`; False after too many rollbacks to it."""
        self._rollbacks = self._rollbacks + 1 if target == self._target else 1
        self._target, self._newest, self._skips = target, None, skips
        if self._rollbacks > MOST_ROLLBACKS:
            return False
        self._losses = deque((state or {}).get("losses", []), maxlen=WINDOW)
        return True

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs to check as this one would, as JSON."""
        return {"losses": list(self._losses), "rollbacks": [self._target, self._rollbacks]}

    def restore(self, state: Mapping[str, Any] | None, *, skips: int = 0) -> None:
        """Continue from `state()`, None if the checkpoint has none, after `skips` consecutive skips."""
        self._skips = skips
        if state is not None:
            self._losses = deque(state["losses"], maxlen=WINDOW)
            self._target, self._rollbacks = state["rollbacks"]


class SavedStep(NamedTuple):
    """The step that ended a run, as `write_batch` saved it."""

    batch: Batch
    metrics: dict[str, Any]
    rollback: Rollback | None
    """The rollback before it, if no line reports that."""


def write_batch(folder: Path, step: DispatchedStep, rollback: Rollback | None) -> Path:
    """Write the step as `step-N.npz`, for `jaxtrain replay`, atomically.

    Raises:
      OSError: The operating system refuses the write.
    """
    make_folder(folder)
    path = folder / f"step-{step.step}.npz"
    event = rollback.to_json() if rollback else {}
    parts: dict[str, Mapping[str, Any]] = {"batch": step.batch.arrays, "metrics": step.metrics, "event": event}
    arrays = {f"{part}/{name}": np.asarray(x) for part, named in parts.items() for name, x in named.items()}
    with new_file(path) as file:
        np.savez(file, allow_pickle=False, **arrays)
    return path


def read_batch(folder: Path, step: int) -> SavedStep | None:
    """Read what `write_batch` wrote; None if there is nothing of that step.

    Args:
      folder: The folder `replay` of the run.
      step: The step that ended the run.

    Raises:
      UserError: The file cannot be read.
    """
    path = folder / f"step-{step}.npz"
    if not path.is_symlink() and not path.exists():
        return None
    parts: dict[str, dict[str, Any]] = {"batch": {}, "metrics": {}, "event": {}}
    try:
        check_zip(path)
        with open_file(path, folder.parent) as opened, np.load(opened, allow_pickle=False) as file:
            for key in file.files:
                part, _, name = key.partition("/")
                parts[part][name] = file[key]
        rollback = Rollback.from_json(parts["event"]) if parts["event"] else None
    except Exception as error:  # zipfile, zlib and NumPy raise their own
        raise UserError(f"{path} cannot be read ({error}): delete it, and the batch is read from the data") from error
    return SavedStep(parts["batch"], parts["metrics"], rollback)


def find_nonfinite_array(state: TrainState) -> str | None:
    """Return the name of the first array of a state that holds inf or NaN; None if all are finite.

    Scalars are not checked: the best loss of a plateau schedule begins at inf.

    Args:
      state: The training state.
    """
    parts = {name: getattr(state, name) for name in ("params", "model_state", "opt_state", "ema", "compensation")}
    arrays = [(path, x) for path, x in jax.tree.leaves_with_path(parts) if x.ndim]
    finite = np.asarray(_finite([x for _, x in arrays]))
    return None if finite.all() else path_name(arrays[int(finite.argmin())][0])


@jax.jit
def _finite(arrays: list[jax.Array]) -> jax.Array:
    return finite_leaves(arrays)
