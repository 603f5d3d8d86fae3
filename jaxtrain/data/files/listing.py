"""Listing of folders."""

import os
from pathlib import Path

from jaxtrain.errors import UserError

_LFS = b"version https://git-lfs.github.com/spec/"


def files_under(root: Path, skipped_folders: set[str] | frozenset[str] = frozenset()) -> list[Path]:
    """Return every regular file below `root` that is not hidden, sorted by relative POSIX path."""
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [s for s in subfolders if not s.startswith(".") and s not in skipped_folders]
        files += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted((f for f in files if os.path.isfile(f)), key=lambda f: f.relative_to(root).as_posix())


def check_content(file: Path) -> None:
    """Raise `UserError` for a file that is empty, or that Git left in place of a large one."""
    with file.open("rb") as stream:
        start = stream.read(len(_LFS))
    if not start:
        raise UserError(f"{file} is empty: download or write it again")
    if start == _LFS:
        raise UserError(f"{file} is a pointer of Git LFS to a file that was not downloaded: run git lfs pull")
