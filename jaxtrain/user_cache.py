"""The user's cache folder, and how its parts are kept below a size."""

import contextlib
import os
from pathlib import Path

from jaxtrain.errors import UserError


def user_cache(name: str) -> Path:
    """Return the folder of a cache of this name, below XDG_CACHE_HOME or ~/.cache. It may not exist yet.

    Raises `UserError` if there is no home directory, as for some users of containers.
    """
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise UserError(f"no cache folder ({error}): set XDG_CACHE_HOME") from error
    return cache / "jaxtrain" / name


def prune(folder: Path, pattern: str, max_bytes: int, protected: Path | None = None) -> None:
    """Remove the least recently used files until those left take at most `max_bytes`.

    Other processes may use and prune the folder at the same time. Errors of the file system are ignored: a cache that
    cannot be pruned remains usable.

    Args:
      folder: Folder of the cache.
      pattern: Glob pattern of its files.
      max_bytes: Upper bound of their total size in bytes.
      protected: File that is not removed.
    """
    files: list[tuple[float, int, Path]] = []
    with contextlib.suppress(OSError):
        for path in folder.glob(pattern):
            with contextlib.suppress(OSError):
                stat = path.stat()
                # Reading updates st_atime at most once a day on most systems; writers may touch the file on use.
                files.append((max(stat.st_atime, stat.st_mtime), stat.st_size, path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= max_bytes:
            return
        if path != protected:
            with contextlib.suppress(OSError):
                path.unlink()
                total -= size
