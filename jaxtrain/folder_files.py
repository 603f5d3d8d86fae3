"""Files of a folder that somebody else may have written, such as a run that was downloaded.

Archives and repositories carry symbolic links. A link would lead a reader to a file outside the folder, and a writer to
replace one; a FIFO or a device would block a reader or never end. Every file of a run is read and written here.
"""

import contextlib
import errno
import io
import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from jaxtrain.errors import UserError

MOST_BYTES = 100 * 10**6
"""Largest file that is read whole: the bound of safetensors for its headers."""
_DEPTH = 100
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # opening a FIFO would wait for a writer
_LINK = "it is a symbolic link, which is not followed"


class UnsafeFile(OSError, UserError):  # noqa: N818
    """A file that is not a regular one of its folder, or too large; `strerror` says which."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(errno.EPERM, why, str(path))

    def __str__(self) -> str:
        return f"{self.filename} cannot be used ({self.strerror}): replace or remove it"


def open_file(path: Path, inside: Path | None = None) -> io.BufferedReader:
    """Open a regular file for reading.

    Args:
      path: The file.
      inside: The folder that contains it, at any depth; the folder of the file by default. That folder itself may be a
        link.

    Raises:
      UnsafeFile: The file, or a folder between it and `inside`, is a link, or it is not a regular file.
      OSError: It cannot be opened.
    """
    return os.fdopen(_opened(path, os.O_RDONLY, inside), "rb")


def read_file(path: Path, inside: Path | None = None, *, most: int = MOST_BYTES) -> bytes:
    """Read a regular file of at most `most` bytes. Raises as `open_file`, and `UnsafeFile` for a larger one."""
    with open_file(path, inside) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise UnsafeFile(path, f"it has {size:,} bytes, more than {most:,}")
        content = file.read(most + 1)  # it may grow
    if len(content) > most:
        raise UnsafeFile(path, f"it has more than {most:,} bytes")
    return content


def read_json(path: Path, inside: Path | None = None, *, most: int = MOST_BYTES) -> Any:
    """Read a JSON file as `read_file` does. Raises `ValueError` if it is not valid, or nested too deeply."""
    return parse_json(read_file(path, inside, most=most))


def parse_json(text: bytes | str, *, constant: Callable[[str], Any] | None = None) -> Any:
    """Parse JSON.

    Args:
      text: The text.
      constant: Returns the value of NaN, Infinity and -Infinity; by default they are floats.

    Raises:
      ValueError: It is not valid, or nested too deeply for what is to be done with it.
    """
    try:
        value = json.loads(text, parse_constant=constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level, depth = [value], 0
    while level := [
        entry for container in level if isinstance(container, dict | list) for entry in _entries(container)
    ]:
        depth += 1
        if depth > _DEPTH:
            raise ValueError("it is nested too deeply")
    return value


def _entries(container: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


@contextlib.contextmanager
def new_file(path: Path, inside: Path | None = None, *, flush: bool = False) -> Iterator[IO[bytes]]:
    """Open a temporary file that takes the place of `path` when the block ends; it is removed on an error.

    A link at `path` is replaced, not followed. The temporary name is new, whatever the folder contains; errors name
    `path`.

    Args:
      path: The file.
      inside: As in `open_file`.
      flush: Whether the content is on disk before it takes that place, for what must survive a failure of power.

    Raises:
      OSError: The operating system refuses.
    """
    _check_folders(path.parent, path.parent if inside is None else inside)
    partial = path.with_name(f"{path.name[:200]}.{secrets.token_hex(4)}.partial")
    try:
        number = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        with os.fdopen(number, "wb") as file:
            yield file
            file.flush()
            if flush:
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError) and error.filename in (partial, str(partial)):
            error.filename, error.filename2 = str(path), None
        raise


def write_file(path: Path, content: bytes | str, inside: Path | None = None, *, flush: bool = False) -> None:
    """Write a file as `new_file` does; a text as UTF-8, with the characters that have no encoding escaped."""
    with new_file(path, inside, flush=flush) as file:
        file.write(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)


def append_file(path: Path, inside: Path | None = None) -> IO[bytes]:
    """Open a regular file for appending, unbuffered; created if there is none. Raises as `open_file`."""
    return os.fdopen(_opened(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, inside), "ab", buffering=0)


def lock_file(path: Path) -> int:
    """Open a regular file to be locked; created if there is none. Return its number; raises as `open_file`."""
    return _opened(path, os.O_RDWR | os.O_CREAT, None)


def make_folder(path: Path, inside: Path | None = None) -> None:
    """Create a folder unless there is one. Raises `UnsafeFile` if it is a link, and `OSError`."""
    _check_folders(path.parent, path.parent if inside is None else inside)
    path.mkdir(exist_ok=True)
    _check_folder(path)


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder, and not a link to one.

    Raises:
      UnsafeFile: It is a link.
    """
    if path.is_symlink():
        raise UnsafeFile(path, _LINK)
    return path.is_dir()


def regular_files(folder: Path) -> Iterator[Path]:
    """Yield the files under a folder. Raises `UnsafeFile` for anything that is neither a file nor a folder."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        path = folder / entry.name
        if entry.is_dir(follow_symlinks=False):
            yield from regular_files(path)
        elif entry.is_file(follow_symlinks=False):
            yield path
        else:
            raise UnsafeFile(path, _LINK if entry.is_symlink() else "it is not a regular file")


def remove_folder(path: Path) -> None:
    """Remove a folder and what it contains, or a link, without following links; errors are ignored."""
    if path.is_symlink() or not path.is_dir():
        with contextlib.suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _opened(path: Path, flags: int, inside: Path | None) -> int:
    _check_folders(path.parent, path.parent if inside is None else inside)
    try:
        number = os.open(path, flags | _OPEN, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK) and path.is_symlink():
            raise UnsafeFile(path, _LINK) from None
        if error.errno == errno.ENXIO:  # a FIFO without a reader, or a socket
            raise UnsafeFile(path, "it is not a regular file") from None
        raise
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise UnsafeFile(path, "it is not a regular file")
    return number


def _check_folders(folder: Path, inside: Path) -> None:
    """Check that no folder below `inside`, down to `folder`, is a link."""
    for name in folder.relative_to(inside).parts:
        inside = inside / name
        _check_folder(inside)


def _check_folder(path: Path) -> None:
    mode = path.lstat().st_mode
    if not stat.S_ISDIR(mode):
        raise UnsafeFile(path, _LINK if stat.S_ISLNK(mode) else "it is not a folder")
