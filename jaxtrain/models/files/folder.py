"""Files of a folder in Hugging Face layout: JSON, and tensors in one safetensors file or in shards with an index.

Folders are not trusted: names and links out of the folder are refused, and pickles are not read.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxtrain.data import inside
from jaxtrain.data import read_json as read_json
from jaxtrain.errors import UserError
from jaxtrain.interop import StoredTensor, read_torch

CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_WEIGHTS = "model*.safetensors"
_TEXTS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "additional_chat_templates/*.jinja")
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json", "adapter_model.bin")


def resolve_folder(path: Path | str) -> Path:
    """Return the folder at `path`, or the local copy of a Hub id "org/name", downloaded by `huggingface_hub`.

    Raises `UserError` if `path` is neither or the download fails.
    """
    if Path(path).is_dir():
        return Path(path)
    repository = str(path)
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", repository):
        raise UserError(f"{path} is not a folder: use one in Hugging Face layout, or a Hub id, org/name")
    try:
        import huggingface_hub as hub
    except ImportError as error:
        raise UserError(
            f"{path} is not a folder, and huggingface_hub is not installed to download it: pip install huggingface_hub"
        ) from error
    try:
        return Path(hub.snapshot_download(repository, allow_patterns=[CONFIG, _WEIGHTS, _INDEX, *_TEXTS]))
    except (OSError, ValueError, hub.errors.HfHubHTTPError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"{path} is not a folder and cannot be downloaded ({reason}): use a local folder") from error


def write_json(folder: Path, name: str, values: Mapping[str, Any]) -> None:
    """Write a JSON object as `transformers` does: keys sorted, a newline at the end."""
    (folder / name).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_tensors(folder: Path, name: str = "model.safetensors") -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file, or of the shards in its index, each read on demand.

    Raises `UserError` if there are none, if the index or a link leads out of the folder, or if two shards share a name.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in weight_files(folder, name):
        found = read_torch(path).model
        if twice := sorted(found.keys() & tensors.keys()):
            raise UserError(f"{', '.join(twice)} is in {path.name} and in another shard of {folder}: remove one")
        tensors |= found
    return tensors


def weight_files(folder: Path, name: str = "model.safetensors") -> list[Path]:
    """Return the path of a safetensors file, or those of the shards in its index; raises as `read_tensors`."""
    index = f"{name}.index.json"
    if inside(folder, name).is_file():
        return [inside(folder, name)]
    if inside(folder, index).is_file():
        return [inside(folder, file) for file in _shards(folder, index)]
    raise UserError(_without_weights(folder, name))


def stored_dtype(folder: Path) -> np.dtype[Any]:
    """Return the dtype of most of the floating-point numbers in a folder's weights."""
    sizes: dict[Any, int] = {}
    for tensor in read_tensors(folder).values():
        if jnp.issubdtype(tensor.dtype, np.floating):
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + math.prod(tensor.shape)
    return max(sizes, key=sizes.__getitem__, default=np.dtype(np.float32))


def write_tensors(folder: Path, shards: Iterable[Mapping[str, np.ndarray]], name: str = "model.safetensors") -> None:
    """Write tensors to one safetensors file, or to several with an index.

    Args:
      folder: Folder; it is created if it does not exist.
      shards: Tensors of every file; a shard is written before the next one is computed.
      name: File name of a single file, and stem of those of several.

    Raises:
      UserError: The folder contains such files already, or cannot be written.
    """
    stem = name.removesuffix(".safetensors")
    if folder.is_dir() and (there := sorted(folder.glob(f"{stem}*.safetensors"))):
        raise UserError(f"{folder} contains {there[0].name} already: use a folder without weights")
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
        raise UserError(f"{folder} cannot be written ({error}): use another folder") from error


def _write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    try:
        from safetensors.numpy import save_file
    except ImportError as error:
        raise UserError(f"writing {path} needs safetensors: pip install safetensors") from error
    # safetensors ignores strides; transformers refuses a file without the format.
    save_file({name: np.asarray(x, order="C") for name, x in tensors.items()}, path, metadata={"format": "pt"})


def _shards(folder: Path, index: str) -> list[str]:
    places = read_json(folder, index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise UserError(f"{folder / index} has no weight_map of file names: download it again")
    files = sorted(set(places.values()))
    for file in files:
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise UserError(f"{folder / index} names {file!r}, not a safetensors file in its folder: do not load it")
    return files


def _without_weights(folder: Path, name: str) -> str:
    for pickled in _PICKLED:
        if (folder / pickled).exists():
            return (
                f"{folder} has only {pickled}, a pickle, which can run code: convert it to safetensors with "
                "save_pretrained of transformers"
            )
    return f"{folder} has no {name}: use a folder in Hugging Face layout"
