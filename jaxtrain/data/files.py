"""Listing of folders."""

import os
from pathlib import Path


def files_under(root: Path, skipped_folders: set[str] | frozenset[str] = frozenset()) -> list[Path]:
    """Return every regular file below `root` that is not hidden, sorted by relative POSIX path."""
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [s for s in subfolders if not s.startswith(".") and s not in skipped_folders]
        files += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted((f for f in files if os.path.isfile(f)), key=lambda f: f.relative_to(root).as_posix())
