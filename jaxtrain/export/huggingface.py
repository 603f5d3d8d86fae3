"""Export of a model to a Hugging Face folder, which `transformers` loads with `from_pretrained`."""

import contextlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxtrain.data import ByteTokenizer, FileTokenizer, Role, Tokenizer
from jaxtrain.data.finetuning import ModelTokenizer
from jaxtrain.errors import UserError
from jaxtrain.export import byte_tokenizer
from jaxtrain.export.inference import Inference, named_weights
from jaxtrain.models import CONFIG, from_pretrained, functional_with_state, read_json, save_pretrained, write_json
from jaxtrain.torch_import import load_causal_lm

_TEXTS = ("tokenizer*.json", "chat_template.jinja", "additional_chat_templates/*.jinja", "generation_config.json")
_ROLES: dict[str, Role] = {"pad_token": "pad", "mask_token": "mask"}


def write_huggingface(
    folder: Path,
    model: Any,
    params: Any,
    model_state: Any = None,
    *,
    class_names: Sequence[str] = (),
    texts: Tokenizer | None = None,
    save: Callable[[Path, Any], None] | None = None,
) -> None:
    """Write the configuration, the weights and the tokenizer of a model as a Hugging Face folder.

    Args:
      folder: The folder to create.
      model: The module; only its `config` is used.
      params: Its parameters, written in their dtypes.
      model_state: Its running statistics, if it has any.
      class_names: Names of the classes, for a classifier.
      texts: The tokenizer; it is written if it was read from a file, with its chat templates if it has any, or if the
        model is a decoder of bytes.
      save: `Task.save_pretrained`, for a model that is not one of `jaxtrain.models`.

    Raises:
      UserError: `transformers` has no such model.
    """
    config = getattr(model, "config", None)
    if save is not None:
        save(folder, params)
    elif config is not None:
        save_pretrained(folder, params, config, model_state=model_state)
    else:
        kind = "such model" if model is None else type(model).__name__
        raise UserError(f"transformers has no {kind}: export it as onnx, stablehlo or torch")
    entries = read_json(folder, CONFIG)
    if "id2label" in entries and class_names:
        entries["id2label"] = {str(i): name for i, name in enumerate(class_names)}
        entries["label2id"] = {name: i for i, name in enumerate(class_names)}
        write_json(folder, CONFIG, entries)
    if isinstance(texts, ModelTokenizer):
        copy_texts(texts, folder)
    elif isinstance(texts, FileTokenizer):
        _write_tokenizer(folder, texts)
    elif isinstance(texts, ByteTokenizer) and entries.get("vocab_size") == byte_tokenizer.SIZE:
        byte_tokenizer.write_byte_tokenizer(folder)


def load_huggingface(folder: Path, inference: Inference) -> Callable[..., np.ndarray]:
    """Load the exported model with `jaxtrain.from_pretrained`; return a function from its inputs to logits.

    A model that is not one of `jaxtrain.models` is loaded by `transformers`.

    Args:
      folder: The folder.
      inference: The model that was exported, whose signature is used.
    """
    if inference.model is None:
        return load_causal_lm(folder)
    model = from_pretrained(folder)
    _, params, model_state = functional_with_state(model)
    loaded = replace(inference, model=nnx.eval_shape(lambda: model), weights=named_weights(params, model_state))
    apply = jax.jit(loaded)

    def run(*inputs: np.ndarray) -> np.ndarray:
        with jax.default_matmul_precision("highest"):
            return np.asarray(apply(loaded.weights, *inputs))

    return run


def copy_texts(texts: ModelTokenizer, folder: Path) -> None:
    """Copy the tokenizer and the chat templates of the model that was fine-tuned, and where its generation ends."""
    for pattern in _TEXTS:
        for file in texts.folder.glob(pattern):
            target = folder / file.relative_to(texts.folder)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)
    if texts.template is not None:
        shutil.rmtree(folder / "additional_chat_templates", ignore_errors=True)
        shutil.copyfile(texts.template, folder / "chat_template.jinja")


def _write_tokenizer(folder: Path, texts: FileTokenizer) -> None:
    from tokenizers import Tokenizer as HuggingFaceTokenizer

    shutil.copyfile(texts.file, folder / "tokenizer.json")
    id_to_token = HuggingFaceTokenizer.from_file(str(texts.file)).id_to_token
    entries: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, role in _ROLES.items():
        with contextlib.suppress(UserError):  # the tokenizer has no such token
            entries[name] = id_to_token(texts.special(role))
    write_json(folder, "tokenizer_config.json", entries)
