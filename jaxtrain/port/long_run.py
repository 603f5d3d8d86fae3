"""The process that trains by a script itself, several times for many updates: `python -m jaxtrain.port.long_run`.

The script runs as by `python SCRIPT`. Of each update it sends the loss, the learning rates and a digest of the batches.
Its random numbers have seeds that are given: those of the DataLoader that it trains on, by epoch as in a run of the
recipe, and those of all else from the first call of `backward` on.

A perturbed run shows how far rounding alone takes the losses: after each update every parameter becomes the next number
above or below, and nothing is in an autocast region.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jaxtrain.data import RandomStates, begin_epoch, tensor_to_numpy
from jaxtrain.errors import UserError
from jaxtrain.port.cut import Feed
from jaxtrain.port.feeder import all_batches
from jaxtrain.port.kept_files import kept_files
from jaxtrain.port.recording import Update
from jaxtrain.port.refused import Refused, Stop
from jaxtrain.port.script import Watch, run, seed_all
from jaxtrain.port.short_passes import short_pass
from jaxtrain.port.windows import Windows
from jaxtrain.torch_import import Line

SECONDS = 20.0
"""After which a run ends with its next update, if it has made `FEWEST`; no more runs begin after three times these."""
FEWEST = 20


@dataclass(frozen=True)
class LongRun:
    """How a script trains.

    Attributes:
      updates: Number of updates after which it is stopped.
      loader: Number of the DataLoader that it trains on; None for batches that are read from its updates.
      inputs: File of what its programs have in common, for these batches.
      data_seed: Seed of the order of that DataLoader.
      model_seed: Seed of all other random numbers.
      is_perturbed: Whether the run is perturbed by rounding.
    """

    updates: int
    loader: int | None
    inputs: str | None
    data_seed: int
    model_seed: int
    is_perturbed: bool


@dataclass(frozen=True)
class Made:
    """An update that was made.

    Attributes:
      loss: Sum of the losses that `backward` was called on.
      rates: The learning rates of the optimizer's groups, without repetitions, in ascending order.
      batch: Digest of its batches; "" if they were not read.
      is_applied: Whether the parameters were updated, and not skipped by a `GradScaler`.
    """

    loss: float
    rates: tuple[float, ...]
    batch: str
    is_applied: bool = True


def digest_of(arrays: Iterable[Any]) -> str:
    """Return a digest of the arrays of a batch, in any order: floating ones as float32, others as int64.

    Args:
      arrays: Arrays of NumPy.

    Example:
      >>> digest_of([np.float64([0.5]), np.int32([1])]) == digest_of([np.int64([1]), np.float32([0.5])])
      True
    """
    found = []
    for array in arrays:
        x = np.asarray(array)
        x = np.ascontiguousarray(x, np.float32 if np.issubdtype(x.dtype, np.floating) else np.int64)
        found.append(hashlib.blake2b(x.tobytes() + str(x.shape).encode(), digest_size=16).hexdigest())
    return " ".join(sorted(found))


class Follower(Watch):
    """Sends what a script does in each update.

    Args:
      script: The script.
      how: How it trains.
      send: Called with each update.
    """

    def __init__(self, script: Path, how: LongRun, send: Callable[[Made], None]) -> None:
        super().__init__(script, how.updates, self._made_update)
        self._how, self._send = how, send
        self._windows = None if how.inputs is None else Windows(Feed.of_json(Path(how.inputs).read_text()))
        self._rng = np.random.default_rng(how.model_seed)
        self._epoch, self._count, self._count_before = 0, 0, 0
        self._window: list[dict[str, torch.Tensor]] = []
        self._is_seeded, self._begin = False, 0.0

    def replacements(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield what is replaced in PyTorch."""
        yield from super().replacements()
        if self._how.is_perturbed:
            init = torch.autocast.__init__

            def off(this: Any, *args: Any, **kwargs: Any) -> None:
                init(this, *args[:2], **{**kwargs, "enabled": False})

            yield torch.autocast, "__init__", off

    def digest(self, x: torch.Tensor | None) -> str | None:
        """Return nothing: gradients and parameters are not compared."""
        return None

    def one_pass(self, loader: Any) -> Iterator[Any]:
        """Return the batches of a pass: all of them, but for data that no update reads."""
        if self._how.loader is None:
            return all_batches(loader)
        if loader is self.recording.loaders[self._how.loader].loader:
            return self._seeded_pass(loader)
        return short_pass(loader, lambda: None)

    def _seeded_pass(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of the DataLoader in the order of a seed; a pass that no update follows counts as none."""
        self._epoch += self._count > self._count_before
        self._count_before, states = self._count, RandomStates(loader)
        begin_epoch(loader, self._epoch)
        states.seed(self._how.data_seed, self._epoch)
        with states:
            batches = all_batches(loader)
        while True:
            with states:
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of a loss."""
        super().backward(loss, *args, **kwargs)
        if not self._is_seeded:
            seed_all(self._how.model_seed)
            self._is_seeded = True

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Read the batches of an update."""
        result = super().before_step(optimizer, args, kwargs)
        if not self._joins:
            self._read_window([*self.recording.optimizers].index(id(optimizer)))
        return result

    def _join(self, optimizer: Any, line: Line) -> None:
        """Leave the update as it was sent when the first of several optimizers made it."""

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Perturb the parameters."""
        if self._how.is_perturbed:
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                one_ulp_off(p, self._rng)
        super().after_step(optimizer, args, kwargs)

    def _read_window(self, number: int) -> None:
        if self._windows is not None and not self._how.is_perturbed:
            with contextlib.ExitStack() as stack:
                stack.enter_context(self.recorder.inside())
                try:
                    self._window = self._windows.read(number, self._update.backwards, self._optimizers)
                except UserError as error:
                    raise Refused(error) from None

    def _made_update(self, count: int) -> None:
        """Send an update, and keep nothing of it."""
        update, self._count = self.recording.updates[-1], count
        if update.optimizer is None:
            self._read_window(0)
        loss = sum(float(backward.loss) for backward in update.backwards)
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        rates = tuple(sorted({float(group["lr"]) for group in groups}))
        self._send(Made(loss, rates, self._digest_of_batches(update), update.optimizer is not None))
        self.recording.updates[-1] = Update()
        self._window = []
        self._begin = self._begin or time.monotonic()
        if count >= FEWEST and time.monotonic() - self._begin > SECONDS:
            raise Stop

    def _digest_of_batches(self, update: Update) -> str:
        """Return the digest of what an update reads of its batches."""
        if self._how.loader is None:
            windows = [{name: tensor_to_numpy(x) for name, x in window.items()} for window in self._window]
            return digest_of(np.stack([window[name] for window in windows]) for name in windows[0]) if windows else ""
        read = [
            {leaf.key: tensor_to_numpy(backward.tensors[value]) for value, leaf in backward.leaves.items()}
            for backward in update.backwards
        ]
        return digest_of(np.concatenate([batch[key] for batch in read]) for key in read[0])


def one_ulp_off(x: torch.Tensor, rng: np.random.Generator) -> None:
    """Change every number of a tensor to the next one of its dtype, up or down at random."""
    with torch.no_grad():
        real = torch.view_as_real(x) if x.is_complex() else x
        towards = torch.as_tensor(rng.choice([-np.inf, np.inf], real.shape), dtype=real.dtype, device=real.device)
        real.copy_(torch.nextafter(real, towards))


def main(args: list[str]) -> None:
    """Send the updates of runs of a script, each with the number of its run; those of a seed run at once.

    Args:
      args: A file descriptor, a folder for files that are kept, the runs of each seed as JSON, the script, and its own
        arguments.
    """
    pipe, kept, seeds, script, *own = args
    connection = Connection(int(pipe), readable=False)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    begin, count = time.monotonic(), 0
    for runs in json.loads(seeds):
        if time.monotonic() - begin > 3 * SECONDS:
            return
        # Not spawned: each would import PyTorch anew.
        processes = []
        for how in runs:
            given = (connection, count, Path(kept) / str(count), LongRun(**how), Path(script), own)
            processes.append(multiprocessing.get_context("fork").Process(target=_train, args=given))
            processes[-1].start()
            count += 1
        for process in processes:
            process.join()
            if process.exitcode != 0:
                sys.exit(1)


def _train(connection: Connection, number: int, kept: Path, how: LongRun, script: Path, own: list[str]) -> None:
    """Send the updates of a run."""
    torch.set_num_threads(max(1, torch.get_num_threads() // 2))
    kept.mkdir()
    try:
        with kept_files(kept):
            run(script, own, Follower(script, how, lambda made: connection.send((number, asdict(made)))))
    except BrokenPipeError:  # nobody waits for it any more
        return
    except UserError as error:
        connection.send(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
