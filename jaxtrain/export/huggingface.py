"""A run's model as a folder that `transformers` loads with `from_pretrained`."""

import contextlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxtrain.data import FileTokenizer, Role, Tokenizer
from jaxtrain.errors import UserError
from jaxtrain.export.inference import Inference, weights_of
from jaxtrain.models import CONFIG, from_pretrained, functional_with_state, read_json, save_pretrained, write_json

_ROLES: dict[str, Role] = {"pad_token": "pad", "mask_token": "mask"}


def write_huggingface(
    folder: Path,
    model: Any,
    params: Any,
    model_state: Any = None,
    *,
    class_names: Sequence[str] = (),
    texts: Tokenizer | None = None,
) -> None:
    """Write configuration and weights of `model`, the names of its classes, and the tokenizer where it is of a file.

    Weights keep their dtypes. Raises `UserError` for a model of which `transformers` has none alike.
    """
    config = getattr(model, "config", None)
    if config is None:
        raise UserError(f"transformers has no {type(model).__name__}: export it as onnx, stablehlo or torch")
    save_pretrained(folder, params, config, model_state=model_state)
    said = read_json(folder, CONFIG)
    if "id2label" in said and class_names:
        said["id2label"] = {str(i): name for i, name in enumerate(class_names)}
        said["label2id"] = {name: i for i, name in enumerate(class_names)}
        write_json(folder, CONFIG, said)
    if isinstance(texts, FileTokenizer):
        _write_tokenizer(folder, texts)


def runs(folder: Path, inference: Inference) -> Callable[..., np.ndarray]:
    """The logits of the model in a folder, which is to be `inference`'s, read again by `jaxtrain.from_pretrained`."""
    read = from_pretrained(folder)
    _, params, model_state = functional_with_state(read)
    again = replace(inference, model=nnx.eval_shape(lambda: read), weights=weights_of(params, model_state))
    apply = jax.jit(again)

    def run(*inputs: np.ndarray) -> np.ndarray:
        with jax.default_matmul_precision("highest"):
            return np.asarray(apply(again.weights, *inputs))

    return run


def _write_tokenizer(folder: Path, texts: FileTokenizer) -> None:
    from tokenizers import Tokenizer as Read

    shutil.copyfile(texts.file, folder / "tokenizer.json")
    named = Read.from_file(str(texts.file)).id_to_token
    said: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for theirs, role in _ROLES.items():
        with contextlib.suppress(UserError):  # it has none
            said[theirs] = named(texts.special(role))
    write_json(folder, "tokenizer_config.json", said)
