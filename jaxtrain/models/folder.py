"""A folder in Hugging Face layout, as files: JSON, and tensors in one safetensors file or in shards with an index.

What a folder says is not believed: it names no file outside itself, and holds nothing that would be run.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.interop import StoredTensor, read_torch

CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_WEIGHTS = "model*.safetensors"
_LONGEST_JSON = 100 * 10**6  # bytes, as safetensors bounds its headers
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json", "adapter_model.bin")


def folder_of(path: Path | str) -> Path:
    """The folder at `path`; or the one in which `huggingface_hub` keeps what it downloads of a Hub id, "org/name".

    Raises `UserError` for what is neither, and where nothing can be downloaded.
    """
    if Path(path).is_dir():
        return Path(path)
    repository = str(path)
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", repository):
        raise UserError(f"{path} is no folder: give one in Hugging Face layout, or an id of the Hub, org/name")
    try:
        import huggingface_hub as hub
    except ImportError as error:
        raise UserError(
            f"{path} is no folder, and huggingface_hub, to download it, is not installed: pip install huggingface_hub"
        ) from error
    try:
        return Path(hub.snapshot_download(repository, allow_patterns=[CONFIG, _WEIGHTS, _INDEX]))
    except (OSError, ValueError, hub.errors.HfHubHTTPError) as error:
        said = str(error).strip().partition("\n")[0]
        raise UserError(f"{path} is no folder, and no download ({said}): go online, or give a folder") from error


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The object in a file of the folder. Raises `UserError` where there is none."""
    path = _inside(folder, name)
    if not path.is_file():
        raise UserError(f"{folder} has no {name}: give a folder in Hugging Face layout")
    try:
        if path.stat().st_size > _LONGEST_JSON:
            raise ValueError(f"of {path.stat().st_size:,} bytes")
        said = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse, parse_float=_finite)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON ({error}): take it from its source again") from error
    if not isinstance(said, dict):
        raise UserError(f"{path} holds a {type(said).__name__}, not an object: take it from its source again")
    return said


def write_json(folder: Path, name: str, said: Mapping[str, Any]) -> None:
    """Write an object as `transformers` does: keys in order, a newline at the end."""
    (folder / name).write_text(json.dumps(said, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_tensors(folder: Path, name: str = "model.safetensors") -> dict[str, StoredTensor]:
    """The tensors of the file, or of the shards that its index lists, to be read one by one.

    Raises `UserError` where there are none, for an index that names files elsewhere, for links out of the folder, and
    for a name that two shards have.
    """
    index = f"{name}.index.json"
    if _inside(folder, name).is_file():
        files = [name]
    elif _inside(folder, index).is_file():
        files = _shards(folder, index)
    else:
        raise UserError(_without_weights(folder, name))
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        found = read_torch(_inside(folder, file)).model
        if twice := sorted(found.keys() & tensors.keys()):
            raise UserError(f"{', '.join(twice)} is in {file} and in another shard of {folder}: keep one")
        tensors |= found
    return tensors


def write_tensors(folder: Path, shards: Iterable[Mapping[str, np.ndarray]], name: str = "model.safetensors") -> None:
    """Write each shard, before the next is asked for, to a file of its own; with an index, where there are several.

    Raises `UserError` where the folder has such files already, or cannot be written.
    """
    stem = name.removesuffix(".safetensors")
    if folder.is_dir() and (there := sorted(folder.glob(f"{stem}*.safetensors"))):
        raise UserError(f"{folder} holds {there[0].name} already: choose a folder without weights")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = []
        for i, shard in enumerate(shards, start=1):
            path = folder / f"{stem}-{i:05d}.safetensors"
            _write_safetensors(path, shard)
            written.append((path, {name: tensor.nbytes for name, tensor in shard.items()}))
        if len(written) == 1:
            written[0][0].rename(folder / name)
            return
        places: dict[str, str] = {}
        size = 0
        for i, (path, sizes) in enumerate(written, start=1):
            placed = path.rename(folder / f"{stem}-{i:05d}-of-{len(written):05d}.safetensors")
            places |= dict.fromkeys(sizes, placed.name)
            size += sum(sizes.values())
        write_json(folder, f"{name}.index.json", {"metadata": {"total_size": size}, "weight_map": places})
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error}): choose another folder") from error


def _write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    try:
        from safetensors.numpy import save_file
    except ImportError as error:
        raise UserError(f"safetensors, to write {path}, is not installed: pip install safetensors") from error
    # It writes the memory as it lies, whatever the strides; transformers refuses a file without the format.
    save_file({name: np.asarray(x, order="C") for name, x in tensors.items()}, path, metadata={"format": "pt"})


def _refuse(written: str) -> float:
    raise ValueError(f"{written} is no number of JSON's")


def _finite(written: str) -> float:
    number = float(written)
    return number if math.isfinite(number) else _refuse(written)


def _shards(folder: Path, index: str) -> list[str]:
    places = read_json(folder, index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise UserError(f"{folder / index} has no weight_map of file names: take it from its source again")
    files = sorted(set(places.values()))
    for file in files:
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise UserError(f"{folder / index} names {file!r}, no safetensors file beside it: do not load this folder")
    return files


def _inside(folder: Path, name: str) -> Path:
    """The file of that name. Raises `UserError` for a link out of the folder."""
    path, root = folder / name, folder.resolve()
    try:
        target = path.resolve()
    except (OSError, RuntimeError) as error:  # a link to itself
        raise UserError(f"{path} is a link to nowhere ({error}): put the file itself there") from error
    # The Hub's cache keeps the files in blobs/ beside the snapshots, which link to them.
    blobs = root.parent.parent / "blobs"
    if not (target.is_relative_to(root) or (root.parent.name == "snapshots" and target.parent == blobs)):
        raise UserError(f"{path} is a link out of its folder, to {target}: put the file itself there")
    return path


def _without_weights(folder: Path, name: str) -> str:
    for pickled in _PICKLED:
        if (folder / pickled).exists():
            return (
                f"{folder} has only {pickled}, a pickle, which runs code as it is read: convert it, "
                "save_pretrained in transformers writes safetensors"
            )
    return f"{folder} has no {name}: give a folder in Hugging Face layout"
