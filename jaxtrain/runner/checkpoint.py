"""Save and restore checkpoints: atomic, verified by checksums, written in the background.

A step is written to the folder `STEP.partial`: the state by orbax, `run.json`, last the manifest. Renaming it to `STEP`
is the commit. Only the copy off the device blocks the loop. With several processes each one writes and reads what its
devices hold, in one folder; the first one does everything else.
"""

import contextlib
import json
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from jaxtrain.distributed import processes
from jaxtrain.errors import RunFailed, UserError
from jaxtrain.folder_files import is_folder, make_folder, read_json, remove_folder, write_file
from jaxtrain.paths import merge, require_distinct_names
from jaxtrain.run import Recipe, Task
from jaxtrain.runner.manifest import DamagedCheckpoint, sync, verify, write_manifest
from jaxtrain.runner.recipe_step import state_shapes, training_step
from jaxtrain.runner.state_files import StateFiles
from jaxtrain.runner.unsaved import Unsaved
from jaxtrain.step import TrainState

_PARTIAL = ".partial"
_STATE, _RUN = "state", "run.json"
_STEP = re.compile("[0-9]{1,15}")


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are retained.

    Raises:
      UserError: A number is out of range.

    Example:
      >>> sorted(Retention(last=1, best=1, every=10).retained({0: 2.3, 4: 0.7, 8: 0.9, 10: None, 12: 0.8}))
      [4, 10, 12]
    """

    last: int = 3
    """The n newest."""
    best: int = 1
    """The n with the lowest eval_loss."""
    every: int | None = None
    """Those whose step is a multiple of n; None for none."""

    def __post_init__(self) -> None:
        if self.last < 1:
            raise UserError(f"keep_last must be at least 1, got {self.last}: a run resumes from its last checkpoint")
        if self.best < 0:
            raise UserError(f"keep_best must be at least 0, got {self.best}")
        if self.every is not None and self.every < 1:
            raise UserError(f"keep_every must be at least 1, got {self.every}")

    def retained(self, losses: Mapping[int, float | None]) -> set[int]:
        """Return the steps to retain, given the eval_loss of each step, None if it was not evaluated."""
        evaluated = [step for step in losses if losses[step] is not None]
        every = {step for step in losses if self.every and step and step % self.every == 0}
        best = sorted(evaluated, key=lambda step: (losses[step], step))[: self.best]
        return {*sorted(losses)[-self.last :], *best, *every}


class Checkpoints:
    """The checkpoints of one run. Only `save`, and `restore(on_damaged=…)`, change files.

    Args:
      path: The folder of checkpoints; the first save creates it.
      retention: Which checkpoints are retained; the last three and the best one by default.
      unsaved: Parameters that are left out; none by default.
      constant: What `restore` returns with the data of every save, as JSON.
    """

    def __init__(
        self,
        path: Path,
        retention: Retention | None = None,
        unsaved: Unsaved | None = None,
        constant: Mapping[str, Any] | None = None,
    ) -> None:
        self._path = path.absolute()
        self._run = path.parent
        self._retention = retention or Retention()
        self._unsaved = unsaved or Unsaved()
        self._constant = constant or {}
        self._digests = self._unsaved.saved_digests()  # before the run goes on, and the files may change
        self._files = StateFiles()
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._commit: tuple[int, Future[None]] | None = None
        self._losses: dict[int, float | None] = {}
        self._has_failed = False

    def __enter__(self) -> "Checkpoints":
        logging.getLogger("absl").addFilter(_not_from_orbax)
        self._hook, self._previous_hook = self._drop_closed_loop, sys.unraisablehook
        sys.unraisablehook = self._hook
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None or processes.count() == 1:
                self.wait()
        finally:
            self._thread.shutdown()
            # A failed save was raised already; closing orbax would raise its other errors.
            with contextlib.suppress(*[Exception] if self._has_failed else []):
                self._files.close()
            logging.getLogger("absl").removeFilter(_not_from_orbax)
            # Writes that go on after a failed one may end later than this. Another library may have chained its hook.
            if not self._has_failed and sys.unraisablehook == self._hook:
                sys.unraisablehook = self._previous_hook

    def _drop_closed_loop(self, late: Any) -> None:
        """Drop the errors of TensorStore's writes after one has failed, which was raised: orbax closed their loop.

        They call `call_soon_threadsafe` from C++: it is the outermost frame, as in no program written in Python.
        """
        frame = late.exc_traceback and late.exc_traceback.tb_frame.f_code.co_name
        if not (isinstance(late.exc_value, RuntimeError) and frame == "call_soon_threadsafe" and late.object is None):
            self._previous_hook(late)

    def save(self, state: TrainState, data: Mapping[str, Any], eval_loss: float | None = None) -> None:
        """Save a state under its step, unless that step is saved already; returns when `state` may be donated.

        Args:
          state: The training state.
          data: What else a resumed run needs, such as the loader's position, as JSON.
          eval_loss: Validation loss of the state, for `Retention.best`.

        Raises:
          RunFailed: This save cannot begin, or the one before it could not be committed.
          UserError: Two arrays of the state have one name in the files.
        """
        require_distinct_names(state, "the state", in_files=True)
        self.wait()
        step, data = int(state.step), {**data, **self._constant}
        if processes.once(lambda: self._is_saved(step)):
            return
        state = self._unsaved.saved_state(state)
        if _in_host_memory(state):
            self._commit = step, self._thread.submit(self._write, step, _copied(state), data, eval_loss)
            return
        try:
            self._begin(step, state)
        except Exception as error:
            raise self._failed(step, error) from error
        self._commit = step, self._thread.submit(self._finish, step, data, eval_loss)

    @property
    def idle(self) -> bool:
        """Whether no save is in progress."""
        return self._commit is None or self._commit[1].done()

    def wait(self) -> None:
        """Wait until the last save is committed.

        Raises:
          RunFailed: It could not be committed.
        """
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
        """Whether a step is saved. Removes what interrupted saves left."""
        try:
            self._run.mkdir(parents=True, exist_ok=True)
            make_folder(self._path)
        except OSError as error:
            raise self._failed(step, error) from error
        for remains in self._path.glob(f"*{_PARTIAL}"):
            remove_folder(remains)
        return step in saved_steps(self._path)

    def restore(
        self, like: TrainState, on_damaged: Callable[[str], None] | None = None, *, before: int | None = None
    ) -> tuple[TrainState, dict[str, Any]]:
        """Restore the newest checkpoint.

        Args:
          like: A state, or its shapes, with the shapes, dtypes and shardings to restore.
          on_damaged: If given, a damaged checkpoint is moved to `damaged/`, reported by this callback, and the one
            before it is restored. Without it, a damaged checkpoint is an error.
          before: Restore the newest checkpoint before this step.

        Returns:
          A tuple (state, data), as they were saved.

        Raises:
          UserError: There is no intact checkpoint, it holds a state of other shapes, or files that parameters are read
            from have changed.
        """
        folder = Path(processes.once(lambda: str(self._verified(on_damaged, before))))
        self._check_digests(folder)
        state = self._unsaved.complete_state(self._files.read(folder / _STATE, self._unsaved.saved_state(like)), like)
        return state, _saved(folder)["data"]

    def restore_params(self, like: Any, *, average: Any = None) -> Any:
        """Restore only the parameters of the newest checkpoint.

        Args:
          like: The parameters, or their shapes.
          average: Their moving average, or its shapes, to restore it in the places of the parameters that it has; None
            for the parameters themselves.

        Raises:
          UserError: As `restore`.
        """
        folder = self._verified(None)
        self._check_digests(folder)
        rest = self._unsaved.saved(like)
        if average is not None:
            rest = jax.tree.map(lambda x, like: like if x is None else None, average, rest, is_leaf=lambda x: x is None)
        parts = {name: part for name, part in (("params", rest), ("ema", average)) if jax.tree.leaves(part)}
        saved = {"params": rest, **self._files.read(folder / _STATE, parts, partial_restore=True)}
        params = saved["params"] if average is None else merge(saved["ema"], saved["params"])
        return self._unsaved.complete(params, like)

    def _check_digests(self, folder: Path) -> None:
        self._unsaved.check_digests(_saved(folder).get("digests"))

    def _partial(self, step: int) -> Path:
        return self._path / f"{step}{_PARTIAL}"

    def _write(self, step: int, state: TrainState, data: dict[str, Any], eval_loss: float | None) -> None:
        self._begin(step, state)
        self._finish(step, data, eval_loss)

    def _begin(self, step: int, state: TrainState) -> None:
        self._files.save(self._partial(step) / _STATE, state)

    def _finish(self, step: int, data: dict[str, Any], eval_loss: float | None) -> None:
        """Commit a save, then evict: in this order, so that a kill leaves an intact checkpoint at any moment."""
        self._files.wait()
        if not processes.is_first():
            return
        partial = self._partial(step)
        self._files.check(partial / _STATE)
        finite = eval_loss if eval_loss is not None and math.isfinite(eval_loss) else None
        write_file(
            partial / _RUN,
            json.dumps({"data": data, "eval_loss": finite, **({"digests": self._digests} if self._digests else {})}),
        )
        write_manifest(partial)
        partial.rename(self._path / str(step))
        sync(self._path)
        self._evict()

    def _evict(self) -> None:
        for step in saved_steps(self._path):
            if step not in self._losses:
                self._losses[step] = _eval_loss(self._path / str(step))
        self._losses = {step: self._losses[step] for step in saved_steps(self._path)}
        for step in self._losses.keys() - self._retention.retained(self._losses):
            # Renamed first, so that a kill leaves no half of a checkpoint under a step's name.
            remove_folder((self._path / str(step)).rename(self._partial(step)))

    def _failed(self, step: int, error: Exception) -> RunFailed:
        self._has_failed = True
        # On a full disk the other files need the space.
        remove_folder(self._partial(step))
        newest = max(saved_steps(self._path), default=None)
        left = "there is no checkpoint before it" if newest is None else f"the checkpoint of step {newest} is intact"
        return RunFailed(
            f"step {step} could not be saved in {self._run} ({_reason(error)}): {left}; fix that, then continue with "
            "--resume auto"
        )

    def _open(self, folder: Path) -> None:
        """Open the state of a checkpoint. Raises `DamagedCheckpoint`."""
        try:
            self._files.check(folder / _STATE)
        except Exception as error:  # TensorStore raises many types
            raise DamagedCheckpoint(f"{_STATE} cannot be opened: {_reason(error)}") from error

    def _verified(self, on_damaged: Callable[[str], None] | None, before: int | None = None) -> Path:
        """Return the newest folder that matches its manifest."""
        damaged = self._path / "damaged"
        for step in sorted((s for s in saved_steps(self._path) if before is None or s < before), reverse=True):
            folder = self._path / str(step)
            try:
                verify(folder)
                self._open(folder)
            except DamagedCheckpoint as error:
                if not folder.exists():  # evicted by a running process meanwhile
                    return self._verified(on_damaged, before)
                if on_damaged is None:
                    raise UserError(
                        f"the checkpoint of step {step} in {self._run} is damaged ({error}): "
                        f"jaxtrain train --resume --out {self._run} continues from the one before it"
                    ) from error
                try:
                    make_folder(damaged)
                    n = sum(re.fullmatch(rf"{step}(-\d+)?", p.name) is not None for p in damaged.iterdir())
                    moved = folder.rename(damaged / (f"{step}-{n}" if n else f"{step}"))
                except OSError as failed:
                    raise UserError(
                        f"{damaged} cannot be written ({_reason(failed)}), where the damaged checkpoint of step {step} "
                        "belongs: make it a writable folder"
                    ) from failed
                on_damaged(f"the checkpoint of step {step} is damaged ({error}): moved to {moved}")
            else:
                return folder
        if damaged.exists():
            raise UserError(f"{self._run} has no intact checkpoint left, see {damaged}: start again with another --out")
        raise UserError(
            f"{self._run} has no checkpoint: start it again with jaxtrain train --resume auto --out {self._run}"
        )


def _not_from_orbax(record: logging.LogRecord) -> bool:
    """Drop orbax's records: it logs every phase of a save, and the tracebacks of errors that it raises too."""
    return "orbax" not in Path(record.pathname).parts or record.levelno >= logging.CRITICAL


def saved_steps(path: Path) -> list[int]:
    """Return the steps that have a checkpoint in the folder `path`, intact or damaged, in no order.

    Raises:
      UserError: The folder cannot be read, or is a link.
    """
    try:
        return [int(p.name) for p in path.iterdir() if _STEP.fullmatch(p.name)] if is_folder(path) else []
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): replace it by the folder of checkpoints") from error


def restore_params(path: Path, like: Any, *, average: Any = None, task: Task | None = None) -> Any:
    """Restore the parameters of the newest checkpoint.

    Args:
      path: The folder of checkpoints.
      like: The parameters, or their shapes.
      average: Their moving average, or its shapes, to restore in their places; None for the parameters themselves.
      task: The task of the run, which creates the parameters that its checkpoints leave out; None if there are none.

    Raises:
      UserError: There is no intact checkpoint, or it holds other shapes.
    """
    with Checkpoints(path, unsaved=None if task is None else Unsaved.of(task)) as checkpoints:
        return checkpoints.restore_params(like, average=average)


def restore_state(path: Path, recipe: Recipe, task: Task) -> TrainState:
    """Restore the state of the newest checkpoint.

    Args:
      path: The folder of checkpoints.
      recipe: The settings of the run.
      task: The task of the recipe.

    Raises:
      UserError: There is no intact checkpoint, or it holds other shapes.
    """
    like = state_shapes(training_step(recipe, task), task, recipe)
    with Checkpoints(path, unsaved=Unsaved.of(task)) as checkpoints:
        state, _ = checkpoints.restore(like)
    return state


def _in_host_memory(state: TrainState) -> bool:
    """Whether orbax would read the state in place, in memory of this process that the next steps could not reuse."""
    devices = state.step.devices()
    return processes.count() == 1 and all(device.platform == "cpu" for device in devices)


@jax.jit
def _copied(state: TrainState) -> TrainState:
    return jax.tree.map(jax.numpy.copy, state)


def _saved(folder: Path) -> dict[str, Any]:
    """Read the run.json of a checkpoint. Raises `UserError`."""
    try:
        saved = read_json(folder / _RUN)
        if not (isinstance(saved, dict) and isinstance(saved.get("data"), dict)):
            raise ValueError("it has no position in the data")
        return saved
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / _RUN} cannot be read ({_reason(error)}): remove {folder}") from error


def _eval_loss(folder: Path) -> float | None:
    """Read the eval_loss; None if it was not evaluated or the folder is damaged."""
    try:
        loss = read_json(folder / _RUN)["eval_loss"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return loss if isinstance(loss, float) else None


def _reason(error: Exception) -> str:
    """Return the cause in one line: the operating system's message if it is a system error."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error)
    # TensorStore's page-long message ends with the error number: "… [os_error_code='28']".
    number = re.search(r"\[os_error_code='(\d+)'", text)
    return os.strerror(int(number[1])) if number else next(iter(text.splitlines()), type(error).__name__)
