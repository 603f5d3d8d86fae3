"""Files of a folder in Hugging Face layout that are not trusted: JSON and text, never outside the folder."""

import json
import math
from pathlib import Path
from typing import Any

from jaxtrain.errors import UserError

_MAX_BYTES = 100 * 10**6  # the bound of safetensors for its headers


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Read a JSON object.

    Args:
      folder: Folder.
      name: File name.

    Raises:
      UserError: There is no such file, or it does not contain a JSON object.
    """
    path, text = folder / name, read_text(folder, name)
    try:
        values = json_value(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}): download it again") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} contains a {type(values).__name__}, not an object: download it again")
    return values


def read_text(folder: Path, name: str) -> str:
    """Read a text file, UTF-8.

    Args:
      folder: Folder.
      name: File name.

    Raises:
      UserError: There is no such file, it is too large, or not text.
    """
    path = inside(folder, name)
    if not path.is_file():
        raise UserError(f"{folder} has no {name}: use a folder in Hugging Face layout")
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"{path.stat().st_size:,} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as text ({error}): download it again") from error


def json_value(text: str | bytes) -> Any:
    """Parse strict JSON. Raises `ValueError` for NaN, infinity, numbers beyond float64 and repeated names too.

    Example:
      >>> json_value('{"a": [1, 2.5]}')
      {'a': [1, 2.5]}
    """
    return json.loads(text, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_unique)


def inside(folder: Path, name: str) -> Path:
    """Return the path of a file. Raises `UserError` for a link out of the folder."""
    path, root = folder / name, folder.resolve()
    try:
        target = path.resolve()
    except (OSError, RuntimeError) as error:  # a link to itself, before Python 3.13
        raise UserError(f"{path} is a broken link ({error}): replace it by the file") from error
    # In the cache of the Hub, files of snapshots/ are links to blobs/.
    blobs = root.parent.parent / "blobs"
    if not (target.is_relative_to(root) or (root.parent.name == "snapshots" and target.parent == blobs)):
        raise UserError(f"{path} links out of its folder, to {target}: replace it by the file")
    if path.is_symlink() and not path.exists():
        raise UserError(f"{path} is a broken link (to {path.readlink()}): replace it by the file")
    return path


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; Python would keep the last of two values with one name."""
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
        raise ValueError(f"the name {twice!r} occurs twice in an object")
    return values


def _refuse(literal: str) -> float:
    raise ValueError(f"{literal} is not a JSON number")


def _finite(literal: str) -> float:
    number = float(literal)
    return number if math.isfinite(number) else _refuse(literal)
