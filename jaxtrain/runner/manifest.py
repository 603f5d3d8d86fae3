"""The manifest of a checkpoint: size and SHA-256 of every file, to detect damage before reading."""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtrain.errors import reason
from jaxtrain.fields import from_json
from jaxtrain.folder_files import is_folder, open_file, read_json, regular_files, write_file
from jaxtrain.run_folder import sync

NAME = "manifest.json"
_THREADS = min(8, max(1, (os.cpu_count() or 1) // 2))  # each computes a checksum at 1 to 2 GB/s


class DamagedCheckpoint(Exception):  # noqa: N818
    """A checkpoint that differs from its manifest; the message says how."""


def write_manifest(folder: Path) -> None:
    """Write the manifest of every file under `folder`; all of them are on disk when this returns."""

    def written(path: Path) -> dict[str, int | str]:
        sync(path)
        return {"bytes": path.stat().st_size, "sha256": _sha256(path)}

    paths = list(regular_files(folder))
    with ThreadPoolExecutor(_THREADS) as threads:
        found = zip(paths, threads.map(written, paths), strict=True)
        files = {path.relative_to(folder).as_posix(): file for path, file in found}
    write_file(folder / NAME, json.dumps({"files": files}, indent=1) + "\n", flush=True)
    for path in (*(p for p in folder.rglob("*") if p.is_dir()), folder):
        sync(path)


def verify(folder: Path) -> None:
    """Verify every file of the manifest. Raises `DamagedCheckpoint` if one differs."""

    def check(name: str, written: _File) -> None:
        path = folder / name
        try:
            if path.lstat().st_size != written.bytes:
                raise DamagedCheckpoint(f"{name} has {path.lstat().st_size} bytes of {written.bytes}")
            if _sha256(path) != written.sha256:
                raise DamagedCheckpoint(f"{name} does not match its checksum")
        except OSError as error:
            raise DamagedCheckpoint(f"{name} cannot be read: {reason(error)}") from None

    try:
        is_folder(folder)  # raises for a link
        files = _files(folder)
        present = {path.relative_to(folder).as_posix() for path in regular_files(folder)} - {NAME}
    except OSError as error:
        raise DamagedCheckpoint(f"{error.filename} cannot be read: {error.strerror}") from None
    if not files:
        raise DamagedCheckpoint(f"{NAME} lists no files")
    if missing := sorted(files.keys() - present):
        raise DamagedCheckpoint(f"{missing[0]} is missing")
    # File managers and network file systems add hidden ones.
    if added := sorted(name for name in present - files.keys() if not Path(name).name.startswith(".")):
        raise DamagedCheckpoint(f"{added[0]} is not in {NAME}")
    with ThreadPoolExecutor(_THREADS) as threads:
        for _ in threads.map(check, files, files.values()):  # raises the first error
            pass


@dataclass(frozen=True)
class _Manifest:
    """The types of a manifest."""

    files: dict[str, Any]


@dataclass(frozen=True)
class _File:
    """The types of its entries."""

    bytes: int
    sha256: str


def _files(folder: Path) -> dict[str, _File]:
    try:
        files = from_json(_Manifest, read_json(folder / NAME)).files
        return {name: from_json(_File, file) for name, file in files.items()}
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{NAME} is missing") from None
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{NAME} cannot be read: {reason(error)}") from None


def _sha256(path: Path) -> str:
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
