"""Guards of a run: an inf or NaN that was applied, and a loss that leaps.

A step is judged by its metrics, when the next one is on its way: the device never waits for a judgement. What a step
left is looked at before it is saved, so that a spoiled state is never the newest checkpoint and evicts no sound one.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np

from jaxtrain.data.loader import Batch
from jaxtrain.errors import UserError
from jaxtrain.paths import path_name
from jaxtrain.recipes import Recipe
from jaxtrain.step import TrainState, finite_leaves, leaf_name

WINDOW = 64
"""Losses, of as many applied updates before it, that a loss is judged against."""
FEWEST = 16
"""And how many of them there must be."""
MOST_ROLLBACKS = 3
"""To one checkpoint, one after the other."""


@dataclass(frozen=True)
class DispatchedStep:
    """A step that was dispatched: its number, batch and metrics, and the data's position after it."""

    step: int
    batch: Batch
    next_batch: int
    metrics: Mapping[str, jax.Array]


class RunInvalid(Exception):  # noqa: N818
    """A step after which the run cannot go on, and what is wrong with it in words."""

    def __init__(self, taken: DispatchedStep, what: str) -> None:
        super().__init__(what)
        self.taken, self.what = taken, what


class Spike(RunInvalid):
    """A step whose loss leapt."""


class Guard:
    """Judges the steps of a run of `recipe` whose parameters are like `params`: `add` each, `settle` before it counts.

    `event`: the numbers of a rollback, until `take_event`.
    """

    def __init__(self, recipe: Recipe, params: Any) -> None:
        self._factor = recipe.spike_factor
        self._params = jax.eval_shape(lambda: params)
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._taken: DispatchedStep | None = None
        self._judged = True
        self._target, self._rollbacks = -1, 0
        self.event: dict[str, float] = {}

    def add(self, taken: DispatchedStep) -> None:
        """Take note of a dispatched step and judge the one before it. Raises `RunInvalid`, or `Spike`."""
        # On their way before they are asked for, so that asking costs no wait of its own.
        taken.metrics["loss"].copy_to_host_async()
        taken.metrics["nonfinite_leaf"].copy_to_host_async()
        self.settle()
        self._taken, self._judged = taken, False

    def settle(self) -> None:
        """Judge the newest step, waiting for it. Raises `RunInvalid`, or `Spike`."""
        if not self._judged and self._taken is not None:
            self._judged = True
            self._judge(self._taken)

    def check(self, state: TrainState) -> None:
        """Judge the newest step and all that it left, before that is saved. Raises `RunInvalid`, or `Spike`."""
        self.settle()
        if self._taken is not None and (where := find_nonfinite_array(state)):
            raise RunInvalid(self._taken, f"{where} holds inf or NaN, though loss and gradient were finite")

    def _judge(self, taken: DispatchedStep) -> None:
        # An array's conversion by NumPy is the cheapest there is.
        loss, leaf = float(np.asarray(taken.metrics["loss"])), int(np.asarray(taken.metrics["nonfinite_leaf"]))
        if leaf < 0 and math.isfinite(loss):
            if self._factor is not None:
                self._judge_loss(taken, loss, self._factor)
        elif not taken.metrics["skipped"]:  # as fp16 does now and then: nothing was applied
            where = "is finite"
            if leaf >= 0:
                micro_batch = int(taken.metrics["nonfinite_micro_batch"])
                where = f"has its first inf or NaN in {leaf_name(self._params, leaf)}, micro-batch {micro_batch}"
            raise RunInvalid(taken, f"the loss is {loss:g} and its gradient {where}")

    def _judge_loss(self, taken: DispatchedStep, loss: float, factor: float) -> None:
        if len(self._losses) >= FEWEST and loss > factor * (usual := median(self._losses)) > 0:
            raise Spike(taken, f"the loss is {loss:g}, more than {factor:g} times {usual:g}, the median before it")
        self._losses.append(loss)

    def roll_back(self, target: int, spike: Spike, saved: Mapping[str, Any]) -> bool:
        """Go back to the checkpoint of step `target`, which has `saved`; False after too many rollbacks to it."""
        self._rollbacks = self._rollbacks + 1 if target == self._target else 1
        self._target, self._taken = target, None
        if self._rollbacks > MOST_ROLLBACKS:
            return False
        self._losses = deque(saved.get("guard", {}).get("losses", []), maxlen=WINDOW)
        self.event = {
            "rolled_back_from": spike.taken.step,
            "rolled_back_to": target,
            "spike_loss": float(spike.taken.metrics["loss"]),
            "batches_skipped": spike.taken.next_batch - saved["next_batch"],
        }
        return True

    def take_event(self) -> dict[str, float]:
        """The numbers of a rollback that no line tells yet."""
        event, self.event = self.event, {}
        return event

    def state(self) -> dict[str, Any]:
        """What must be saved, as JSON, for the resumed run to judge as this one would."""
        return {"losses": list(self._losses), "rollbacks": [self._target, self._rollbacks]}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Go on from `state()`; None of a checkpoint that has none."""
        if state is not None:
            self._losses = deque(state["losses"], maxlen=WINDOW)
            self._target, self._rollbacks = state["rollbacks"]


def write_batch(folder: Path, taken: DispatchedStep, event: Mapping[str, float]) -> Path:
    """Write `step-N.npz` for `jaxtrain replay`: the batch, the step's metrics, and a rollback no line tells of.

    Raises `OSError` where the system refuses.
    """
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{taken.step}.npz"
    parts: dict[str, Mapping[str, Any]] = {"batch": taken.batch, "metrics": taken.metrics, "event": event}
    arrays = {f"{part}/{name}": np.asarray(x) for part, named in parts.items() for name, x in named.items()}
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    partial.replace(path)
    return path


def read_batch(folder: Path, step: int) -> tuple[Batch, dict[str, Any], dict[str, float]] | None:
    """(batch, metrics, event) as `write_batch` wrote them; None where there is none of the step.

    Raises `UserError` for a file that cannot be read.
    """
    path = folder / f"step-{step}.npz"
    if not path.exists():
        return None
    parts: dict[str, dict[str, Any]] = {"batch": {}, "metrics": {}, "event": {}}
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            for key in file.files:
                part, _, name = key.partition("/")
                parts[part][name] = file[key]
    except Exception as error:  # zipfile, zlib and NumPy each have their own
        raise UserError(f"{path} cannot be read ({error}): delete it to have the data read instead") from error
    return parts["batch"], parts["metrics"], {name: float(x) for name, x in parts["event"].items()}


def find_nonfinite_array(state: TrainState) -> str | None:
    """The first array of the state that holds inf or NaN. Scalars may: the best loss so far begins at inf."""
    parts = {name: getattr(state, name) for name in ("params", "model_state", "opt_state", "ema")}
    arrays = [(path, x) for path, x in jax.tree.leaves_with_path(parts) if x.ndim]
    finite = np.asarray(_finite([x for _, x in arrays]))
    return None if finite.all() else path_name(arrays[int(finite.argmin())][0])


@jax.jit
def _finite(arrays: list[jax.Array]) -> jax.Array:
    return finite_leaves(arrays)
