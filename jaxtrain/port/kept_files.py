"""Files that exist are kept while a script runs that is not trained to its end.

A script that is recorded or read as a source of batches saves models that are worth nothing. What it writes to a file
that existed before goes to a copy, which it also reads; what it saves by `torch.save` goes to a temporary file always.
"""

import builtins
import contextlib
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch


@contextlib.contextmanager
def kept_files(folder: Path) -> Iterator[None]:
    """Change no file that exists, and save none, while entered.

    Args:
      folder: An empty folder for what the script writes.
    """
    with contextlib.ExitStack() as patches:
        files = _Files(folder)
        for owner, name in ((builtins, "open"), (io, "open"), (torch, "save"), (torch, "load")):
            patches.enter_context(mock.patch.object(owner, name, files.replacement(name, getattr(owner, name))))
        yield


class _Files:
    """Copies of the files that a script writes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._copies: dict[str, Path] = {}
        clock = folder / "clock"  # that of files is coarser than Python's
        clock.touch()
        self._start = clock.stat().st_ctime_ns

    def replacement(self, name: str, function: Any) -> Any:
        """Return the function in place of one that opens, saves or loads a file."""

        def open_(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            writes = isinstance(mode, str) and any(x in mode for x in "wax+")
            is_kept = writes and _is_path(file) and os.path.isfile(file) and not self._is_new(file)
            return function(self._copy(file, mode) if is_kept else self._known(file), mode, *args, **kwargs)

        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            return function(obj, self._copy(f, "w") if _is_path(f) else f, *args, **kwargs)

        def load(f: Any, *args: Any, **kwargs: Any) -> Any:
            return function(self._known(f), *args, **kwargs)

        return {"open": open_, "save": save, "load": load}[name]

    def _is_new(self, file: Any) -> bool:
        """Return whether a file was made, or written by the script itself, since the script began."""
        return os.path.realpath(file) not in self._copies and os.stat(file).st_ctime_ns > self._start

    def _known(self, file: Any) -> Any:
        return self._copies.get(os.path.realpath(file), file) if _is_path(file) else file

    def _copy(self, file: Any, mode: str) -> Path:
        """Return the copy of a file: an empty one to write, else one with what it holds."""
        key = os.path.realpath(file)
        if key not in self._copies:
            copy = self._folder / str(len(self._copies))
            if "w" not in mode:
                shutil.copyfile(key, copy)
            self._copies[key] = copy
        return self._copies[key]


def _is_path(file: Any) -> bool:
    return isinstance(file, str | os.PathLike)
