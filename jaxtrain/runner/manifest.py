"""The manifest of a checkpoint: size and SHA-256 of every file, to detect damage before reading."""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxtrain.errors import reason
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

    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    with ThreadPoolExecutor(_THREADS) as threads:
        found = zip(paths, threads.map(written, paths), strict=True)
        files = {path.relative_to(folder).as_posix(): file for path, file in found}
    (folder / NAME).write_text(json.dumps({"files": files}, indent=1) + "\n")
    sync(folder / NAME)
    for path in (*(p for p in folder.rglob("*") if p.is_dir()), folder):
        sync(path)


def verify(folder: Path) -> None:
    """Verify every file of the manifest. Raises `DamagedCheckpoint` if one differs."""

    def check(name: str, written: dict[str, int | str]) -> None:
        path = folder / name
        try:
            if path.stat().st_size != written["bytes"]:
                raise DamagedCheckpoint(f"{name} has {path.stat().st_size} bytes of {written['bytes']}")
            if _sha256(path) != written["sha256"]:
                raise DamagedCheckpoint(f"{name} does not match its checksum")
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{name} is missing") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedCheckpoint(f"{name} cannot be read: {reason(error)}") from None

    files = _files(folder)
    with ThreadPoolExecutor(_THREADS) as threads:
        for _ in threads.map(check, files, files.values()):  # raises the first error
            pass


def _files(folder: Path) -> dict[str, dict[str, int | str]]:
    try:
        return dict(json.loads((folder / NAME).read_bytes())["files"])
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{NAME} is missing") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"{NAME} cannot be read: {reason(error)}") from None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
