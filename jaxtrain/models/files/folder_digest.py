"""Digests of a model's files: whether a folder still holds the model that it held."""

import hashlib
from pathlib import Path

from jaxtrain.models.files.folder import CONFIG, weight_files

_BLOCKS, _BLOCK = 64, 4096  # of a file of weights, besides its header


def folder_digest(folder: Path) -> dict[str, str]:
    """Return a digest of each file that a model in a folder is read from, by path.

    The digest of a file of weights is that of its size, its header, and 64 blocks of 4 KiB at even distances, so that
    a model of any size takes a fraction of a second.

    Args:
      folder: Folder in Hugging Face layout.

    Raises:
      UserError: The folder has no weights.
    """
    weights = {str(path): _sampled(path) for path in weight_files(folder)}
    return {str(folder / CONFIG): hashlib.sha256((folder / CONFIG).read_bytes()).hexdigest(), **weights}


def _sampled(path: Path) -> str:
    size, found = path.stat().st_size, hashlib.sha256()
    found.update(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        if size <= _BLOCKS * _BLOCK:
            found.update(file.read())
            return found.hexdigest()
        length = file.read(8)
        found.update(length + file.read(min(int.from_bytes(length, "little"), size)))
        for i in range(_BLOCKS):
            file.seek(i * (size - _BLOCK) // (_BLOCKS - 1))
            found.update(file.read(_BLOCK))
    return found.hexdigest()
