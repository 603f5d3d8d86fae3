"""Checkpoints: the whole `TrainState` by orbax and all else that a run is, whole or not there, verified when read.

A step's folder is written under the name `STEP.partial`: the state by orbax, `run.json`, last the manifest. Renaming it
to `STEP` is the commit. All but the copy off the device is done in a thread of its own.

Of several processes each writes and reads what its devices hold, in one folder; all else the first one does.
"""

import contextlib
import json
import logging
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxtrain.distributed import processes
from jaxtrain.errors import RunFailed, UserError
from jaxtrain.recipes import Recipe
from jaxtrain.runner.manifest import DamagedCheckpoint, sync, verify, write_manifest
from jaxtrain.runner.optimizer import training_step
from jaxtrain.step import TrainState
from jaxtrain.tasks import Task

_PARTIAL = ".partial"
_STATE, _RUN = "state", "run.json"
# orbax reports every phase of every save through absl, and in full what it raises as well.
logging.getLogger("absl").setLevel(logging.CRITICAL)


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: the `last` ones, the `best` ones by eval_loss, and those of every `every`th step.

    >>> sorted(Retention(last=1, best=1, every=10).of({0: 2.3, 4: 0.7, 8: 0.9, 10: None, 12: 0.8}))
    [4, 10, 12]

    Raises UserError for a number out of range.
    """

    last: int = 3
    best: int = 1
    every: int | None = None

    def __post_init__(self) -> None:
        if self.last < 1:
            raise UserError(f"keep_last {self.last} keeps nothing to resume from: make it 1 or more")
        if self.best < 0:
            raise UserError(f"keep_best {self.best} is negative: make it 0 or more")
        if self.every is not None and self.every < 1:
            raise UserError(f"keep_every {self.every} is too small: make it 1 or more")

    def of(self, losses: Mapping[int, float | None]) -> set[int]:
        """Those of the steps that stay, given each one's eval_loss, None where none was taken."""
        evaluated = [step for step in losses if losses[step] is not None]
        every = {step for step in losses if self.every and step and step % self.every == 0}
        best = sorted(evaluated, key=lambda step: (losses[step], step))[: self.best]
        return {*sorted(losses)[-self.last :], *best, *every}


class Checkpoints:
    """The checkpoints of one run. Nothing is written, moved or deleted but by `save`, and `restore(set_aside=…)`."""

    def __init__(self, path: Path, keep: Retention | None = None) -> None:
        self._path = path.absolute()
        self._run = path.parent
        self._keep = keep or Retention()
        # Compressing what is nearly random takes the steps' cores for a fifth of the size.
        self._orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_compression=False))
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._commit: tuple[int, Future[None]] | None = None
        self._losses: dict[int, float | None] = {}
        self._broken = False

    def __enter__(self) -> "Checkpoints":
        self._unraisable, sys.unraisablehook = sys.unraisablehook, self._unraised
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None or processes.count() == 1:
                self.wait()
        finally:
            self._thread.shutdown()
            # What has failed is raised already; orbax's closing raises what else has.
            with contextlib.suppress(*[Exception] if self._broken else []):
                self._orbax.close()
            sys.unraisablehook = self._unraisable

    def _unraised(self, late: Any) -> None:
        # One write has failed, which is raised; TensorStore's other writes then find orbax's event loop gone.
        if str(late.exc_value) != "Event loop is closed":
            self._unraisable(late)

    def save(self, state: TrainState, data: Mapping[str, Any], eval_loss: float | None = None) -> None:
        """Save under `state.step`, unless that step is saved already; returns when `state` may be donated.

        `data` is what a run is besides its state, as JSON. Raises `RunFailed` where this save cannot begin or the one
        before it could not be committed.
        """
        self.wait()
        step = int(state.step)
        if processes.once(lambda: self._is_saved(step)):
            return
        if _in_host_memory(state):
            self._commit = step, self._thread.submit(self._write, step, _copied(state), dict(data), eval_loss)
            return
        try:
            self._begin(step, state)
        except Exception as error:
            raise self._failed(step, error) from error
        self._commit = step, self._thread.submit(self._finish, step, dict(data), eval_loss)

    @property
    def idle(self) -> bool:
        """Whether no save is on its way."""
        return self._commit is None or self._commit[1].done()

    def wait(self) -> None:
        """Until the last save is committed. Raises `RunFailed` where it could not be."""
        if self._commit is None:
            return
        (step, commit), self._commit = self._commit, None

        def committed() -> None:
            try:
                commit.result()
            except Exception as error:
                raise self._failed(step, error) from error

        if not processes.is_first():
            committed()
        processes.once(committed)

    def _is_saved(self, step: int) -> bool:
        """Whether it is; what an interrupted save has left is removed."""
        for remains in self._path.glob(f"*{_PARTIAL}"):
            shutil.rmtree(remains, ignore_errors=True)
        return step in saved_steps(self._path)

    def restore(
        self, like: TrainState, set_aside: Callable[[str], None] | None = None, *, before: int | None = None
    ) -> tuple[TrainState, dict[str, Any]]:
        """(state, data) of the newest checkpoint, with the shapes, dtypes and shardings of `like`.

        Of those before step `before`, where it is given.

        A damaged one is an error; with `set_aside` it is moved to `damaged/`, `set_aside` is told, and the one before
        it taken. Raises `UserError` where none is left, and where it is not of such a state.
        """
        folder = Path(processes.once(lambda: str(self._verified(set_aside, before))))
        return self._read(folder, like), json.loads((folder / _RUN).read_text())["data"]

    def restore_params(self, like: Any) -> Any:
        """The parameters alone of the newest checkpoint. Raises `UserError` as `restore` does."""
        return self._read(self._verified(None), {"params": like}, partial_restore=True)["params"]

    def _read(self, folder: Path, like: Any, **how: bool) -> Any:
        """The tree `like`. Raises `UserError` where another is saved: orbax would convert what it can, if it can."""
        there, here = _kinds(self._orbax.metadata(folder / _STATE).item_metadata.tree), _kinds(like)
        if how.get("partial_restore"):
            there = {name: there[name] for name in there.keys() & here.keys()}
        for name in sorted(there.keys() | here.keys()):
            if there.get(name) != here.get(name):
                raise UserError(
                    f"{folder} has {there.get(name, 'nothing')} at {name} where this recipe's state has "
                    f"{here.get(name, 'nothing')}: it is of another version, or its config.json was changed"
                )
        item = _abstract(like)
        shardings = ocp.checkpoint_utils.construct_restore_args(item)
        return self._orbax.restore(folder / _STATE, args=ocp.args.PyTreeRestore(item, shardings, **how))

    def _partial(self, step: int) -> Path:
        return self._path / f"{step}{_PARTIAL}"

    def _write(self, step: int, state: TrainState, data: dict[str, Any], eval_loss: float | None) -> None:
        self._begin(step, state)
        self._finish(step, data, eval_loss)

    def _begin(self, step: int, state: TrainState) -> None:
        self._orbax.save(self._partial(step) / _STATE, args=ocp.args.PyTreeSave(state))

    def _finish(self, step: int, data: dict[str, Any], eval_loss: float | None) -> None:
        """Commit a save, then evict: never the other way round, so that a kill finds a whole one at any moment."""
        self._orbax.wait_until_finished()
        if not processes.is_first():
            return
        partial = self._partial(step)
        finite = eval_loss if eval_loss is not None and math.isfinite(eval_loss) else None
        (partial / _RUN).write_text(json.dumps({"data": data, "eval_loss": finite}))
        write_manifest(partial)
        partial.rename(self._path / str(step))
        sync(self._path)
        self._evict()

    def _evict(self) -> None:
        for step in saved_steps(self._path):
            if step not in self._losses:
                self._losses[step] = _eval_loss(self._path / str(step))
        self._losses = {step: self._losses[step] for step in saved_steps(self._path)}
        for step in self._losses.keys() - self._keep.of(self._losses):
            # Renamed first: a kill leaves no half of a checkpoint under a step's name. What cannot go now goes later.
            shutil.rmtree((self._path / str(step)).rename(self._partial(step)), ignore_errors=True)

    def _failed(self, step: int, error: Exception) -> RunFailed:
        self._broken = True
        # On a full disk, what else is to be written needs the room.
        shutil.rmtree(self._partial(step), ignore_errors=True)
        newest = max(saved_steps(self._path), default=None)
        left = "there is none before it" if newest is None else f"the checkpoint of step {newest} is whole"
        return RunFailed(
            f"step {step} could not be saved in {self._run} ({_reason(error)}): {left}; mend that, then --resume auto"
        )

    def _verified(self, set_aside: Callable[[str], None] | None, before: int | None = None) -> Path:
        """The newest step's folder that matches its manifest."""
        damaged = self._path / "damaged"
        for step in sorted((s for s in saved_steps(self._path) if before is None or s < before), reverse=True):
            folder = self._path / str(step)
            try:
                verify(folder)
            except DamagedCheckpoint as error:
                if not folder.exists():  # evicted by the run while it was read
                    return self._verified(set_aside, before)
                if set_aside is None:
                    raise UserError(
                        f"the checkpoint of step {step} in {self._run} is damaged ({error}): "
                        f"jaxtrain train --resume --out {self._run} goes on from the one before it"
                    ) from error
                damaged.mkdir(exist_ok=True)
                n = sum(re.fullmatch(rf"{step}(-\d+)?", p.name) is not None for p in damaged.iterdir())
                moved = folder.rename(damaged / (f"{step}-{n}" if n else f"{step}"))
                set_aside(f"the checkpoint of step {step} is damaged ({error}): set aside as {moved}")
            else:
                return folder
        if damaged.exists():
            raise UserError(f"{self._run} has no whole checkpoint left, see {damaged}: start again with another --out")
        raise UserError(
            f"{self._run} has no checkpoint: jaxtrain train --resume auto --out {self._run} begins it again"
        )


def saved_steps(path: Path) -> list[int]:
    """The steps that have a checkpoint under `path`, whole or damaged."""
    return [int(p.name) for p in path.iterdir() if p.name.isdecimal()] if path.is_dir() else []


def restore_params(path: Path, like: Any) -> Any:
    """The parameters alone of the newest checkpoint under `path`. Raises `UserError` where there is none."""
    with Checkpoints(path) as checkpoints:
        return checkpoints.restore_params(like)


def restore_state(path: Path, recipe: Recipe, task: Task) -> TrainState:
    """The state in the newest checkpoint under `path`, of a run of `recipe`. Raises `UserError` where there is none."""
    step = training_step(recipe, task.loss_fn)
    like = step.shapes(lambda: task.init()[0], model_state=lambda: task.init()[1], seed=recipe.seed)
    with Checkpoints(path) as checkpoints:
        state, _ = checkpoints.restore(like)
    return state


def _in_host_memory(state: TrainState) -> bool:
    """Whether this process holds all of it, where orbax would read it in place: the next steps could not reuse it."""
    devices = state.step.devices()
    return processes.count() == 1 and all(device.platform == "cpu" for device in devices)


@jax.jit
def _copied(state: TrainState) -> TrainState:
    return jax.tree.map(jax.numpy.copy, state)


def _abstract(tree: Any) -> Any:
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or here), tree)


def _kinds(tree: Any) -> dict[str, str]:
    """Name -> dtype and shape, as saved: of a key its numbers."""

    def saved(x: Any) -> Any:
        return jax.eval_shape(jax.random.key_data, x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    leaves = {name: saved(x) for name, x in ocp.tree.to_flat_dict(tree, sep="/").items()}
    return {name: f"{x.dtype}{list(x.shape)}" for name, x in leaves.items()}


def _eval_loss(folder: Path) -> float | None:
    """As saved; None in a folder too damaged to say."""
    try:
        loss = json.loads((folder / _RUN).read_bytes())["eval_loss"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return loss if isinstance(loss, float) else None


def _reason(error: Exception) -> str:
    """What went wrong, in one line: the system's words where it was the system."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error)
    # TensorStore writes a page and ends it with the system's number: "… [os_error_code='28']".
    number = re.search(r"\[os_error_code='(\d+)'", text)
    return os.strerror(int(number[1])) if number else next(iter(text.splitlines()), type(error).__name__)
