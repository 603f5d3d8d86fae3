"""Lock a run folder: it belongs to one process at a time."""

import errno
import fcntl
import os
import socket
from pathlib import Path
from types import TracebackType

from jaxtrain.errors import UserError
from jaxtrain.folder_files import lock_file
from jaxtrain.run_folder import RunFolder
from jaxtrain.runner.checkpoint import saved_steps


def check_free(run: RunFolder) -> None:
    """Check that a folder can take a new run.

    Args:
      run: The folder.

    Raises:
      UserError: It already holds a run, or it cannot be written.
    """
    if run.config.exists():
        raise UserError(f"{run.path} already holds a run: continue it with --resume, or choose another --out")
    if run.path.exists() and not run.path.is_dir():
        raise UserError(f"{run.path} is a file: choose another --out")
    if saved_steps(run.checkpoints):
        raise UserError(f"{run.path} has checkpoints but no config.json: restore it, or choose another --out")
    if other := next((path for path in run.written if path.exists() and not _is_empty_folder(path)), None):
        raise UserError(f"{other} exists, and a run would write to it: move it, or choose another --out")
    parent = next(p for p in (run.path, *run.path.absolute().parents) if p.exists())
    if not os.access(parent, os.W_OK):
        raise UserError(f"{parent} cannot be written: choose another --out")


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


class RunLock:
    """A lock on a run's folder. The kernel releases it when the process ends, however it ends.

    The lock is on the file `lock` in the folder, which names its last holder. The file is never deleted: a lock on a
    file that another process deletes protects nothing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self._folder: int | None = None

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in (self._file, self._folder):
            if number is not None:
                os.close(number)

    @property
    def held(self) -> bool:
        """Whether this process holds the lock."""
        return self._file is not None

    def take(self) -> None:
        """Lock the folder. Raises `UserError` if another process holds the lock."""
        try:
            file = lock_file(self._path / "lock")
        except OSError as error:
            raise UserError(f"{self._path} cannot be written ({error.strerror}): choose another --out") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._lock_folder()
            os.ftruncate(file, 0)
            os.write(file, f"pid {os.getpid()} on {socket.gethostname()}\n".encode())
        except OSError as error:
            holder = os.read(file, 1000).decode(errors="replace").strip() or "another process"
            os.close(file)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise UserError(
                    f"{self._path} is in use by {holder}: wait for it, stop it, or choose another --out"
                ) from error
            raise UserError(f"{self._path} cannot be locked ({error.strerror}): choose another --out") from error
        self._file = file

    def _lock_folder(self) -> None:
        """Lock the folder too, whose lock stays when the file `lock` is deleted; not every file system can do that."""
        self._folder = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._folder)
            self._folder = None
            if error.errno == errno.EWOULDBLOCK:
                raise
