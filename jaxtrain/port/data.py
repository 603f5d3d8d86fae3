"""The training data of a ported script: its own DataLoader, or what the script itself computes for an update."""

import contextlib
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jaxtrain.data import RandomStates, tensor_to_numpy
from jaxtrain.errors import UserError
from jaxtrain.user_file import with_hash_seed

_MADE: dict[tuple[Path, tuple[str, ...]], list[Any]] = {}


def script_loader(script: Path | str, args: Sequence[str], number: int, folder: Path | str | None = None) -> Any:
    """Return a DataLoader of a PyTorch script, by running the script until it begins to train.

    The script runs with its arguments, as by `python SCRIPT`, up to its first pass over that loader. What it prints
    until then is left out; files that exist are not changed.

    Args:
      script: The script.
      args: Its arguments.
      number: Number of the loader, in the order in which the script makes them.
      folder: The folder in which it runs; None for that of this process.

    Returns:
      The `torch.utils.data.DataLoader`.

    Raises:
      UserError: The script ends before.
    """
    key = (Path(script).resolve(), tuple(args))
    if key not in _MADE or len(_MADE[key]) <= number:
        from jaxtrain.port.kept_files import kept_files
        from jaxtrain.port.script import made_loaders

        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.chdir(folder or Path.cwd()),
            tempfile.TemporaryDirectory(prefix="jaxtrain-port-") as kept,
            kept_files(Path(kept)),
        ):
            keep_loaders(*key, made_loaders(key[0], args, number))
    if len(_MADE[key]) <= number:
        raise UserError(f"{script} ended before it read its DataLoader {number}: port the script again")
    return _MADE[key][number]


def keep_loaders(script: Path, args: Sequence[str], loaders: list[Any]) -> None:
    """Keep the loaders of a script that has run in this process, so that it does not run again."""
    _MADE[script.resolve(), tuple(args)] = loaders


class ScriptRows:
    """The rows of a script's DataLoader, one after another, for windows of several of its batches.

    Args:
      loader: The loader.
      names: Names of the values of a batch that is a tuple.

    Example:
      >>> from torch.utils.data import DataLoader
      >>> loader = DataLoader([{"x": i} for i in range(4)], batch_size=2)
      >>> [int(row["x"]) for row in ScriptRows(loader, ())]
      [0, 1, 2, 3]
    """

    def __init__(self, loader: Any, names: Sequence[str]) -> None:
        self._loader, self._names, self._epoch = loader, names, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        states = RandomStates(self._loader)
        states.seed(0, self._epoch)
        with states:
            batches = iter(self._loader)
        while True:
            with states:
                batch = next(batches, None)
            if batch is None:
                return
            named = batch if hasattr(batch, "items") else dict(zip(self._names, batch, strict=True))
            arrays = {name: tensor_to_numpy(x) for name, x in named.items()}
            for row in zip(*arrays.values(), strict=True):
                yield dict(zip(arrays, row, strict=True))


class ScriptBatches:
    """What a script computes for its updates without its model, one micro-batch after another.

    The script runs in a process of its own, from its beginning in every pass; calls of its modules are answered without
    computing them (`jaxtrain.port.feeder`).

    Args:
      script: The script.
      args: Its arguments.
      inputs: File of what its programs have in common, which `jaxtrain port` has written.
      folder: The folder in which it runs; None for that of this process.
      shift: What is added to the numbers of answers.
      seed: Seed of the random numbers after the first micro-batch; None for the script's own.

    Raises:
      UserError: While they are read: an update computes another program than those that were recorded.
    """

    def __init__(
        self,
        script: Path | str,
        args: Sequence[str],
        inputs: Path | str,
        folder: Path | str | None = None,
        shift: float = 0.0,
        seed: int | None = None,
    ) -> None:
        self._script, self._args, self._inputs = Path(script).resolve(), args, Path(inputs).resolve()
        self._folder, self._shift, self._seed = folder, shift, seed

    def seeded(self, seed: int) -> "ScriptBatches":
        """Return the batches of another run of the script, whose random numbers have a seed."""
        return ScriptBatches(self._script, self._args, self._inputs, self._folder, self._shift, seed)

    def __iter__(self) -> Generator[dict[str, Any], None, None]:
        # Its own files are removed here: it is killed when the run has all that it needs.
        with tempfile.TemporaryDirectory(prefix="jaxtrain-port-") as kept:
            given = [self._shift, self._seed, kept, self._inputs, self._script, *self._args]
            yield from sent("jaxtrain.port.feeder", given, self._script, self._folder)


def sent(
    module: str, given: Sequence[Any], script: Path, folder: Path | str | None, *, is_quiet: bool = False
) -> Generator[Any, None, None]:
    """Yield what a process that runs a script sends.

    Args:
      module: Its module, which gets a file descriptor to send by, and a text in place of an error of the user's.
      given: Its other arguments.
      script: The script.
      folder: The folder in which it runs; None for that of this process.
      is_quiet: Whether what the script prints to standard error is left out.

    Raises:
      UserError: The process has sent a text, or failed.
    """
    ours, theirs = os.pipe()
    command = [sys.executable, "-m", module, str(theirs), *map(str, given)]
    errors = subprocess.DEVNULL if is_quiet else None
    process = subprocess.Popen(
        command, pass_fds=[theirs], stdin=subprocess.DEVNULL, stderr=errors, cwd=folder, env=with_hash_seed()
    )
    os.close(theirs)
    try:
        with Connection(ours, writable=False) as connection:
            while True:
                try:
                    found = connection.recv()
                except EOFError:
                    break
                if isinstance(found, str):
                    raise UserError(found)
                yield found
        if process.wait() != 0:
            raise UserError(f"{script} ended with the exit status {process.returncode}: run it by itself")
    finally:
        process.kill()
        process.wait()


def micro_batch(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the micro-batch that is the only row of a batch.

    Args:
      batch: Arrays with a first axis of one.
    """
    return {name: x[0] for name, x in batch.items()}


def unless(condition: Any, new: Any, old: Any) -> Any:
    """Return a pytree of arrays, or another one if a condition holds.

    Args:
      condition: bool[].
      new: A pytree.
      old: A pytree of the same structure.
    """
    import jax
    import jax.numpy as jnp

    return jax.tree.map(lambda x, y: jnp.where(condition, y, x), new, old)


def turn(batch: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return which of several optimizers a batch is for, by its keys, and the batch.

    Args:
      batch: Arrays by names that begin with the number of the optimizer.

    Example:
      >>> turn({"1.x": 2.0, "1.y": 3.0})
      (1, {'x': 2.0, 'y': 3.0})
    """
    number = int(next(iter(batch)).partition(".")[0])
    return number, {name.partition(".")[2]: x for name, x in batch.items()}
