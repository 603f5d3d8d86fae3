"""Reading and writing of the keys of a Hugging Face config.json that several families share."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from jaxtrain.errors import UserError


def fields_from_hf(config: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """Return the fields of the dataclass `kind` that a config.json sets under the same names, lists as tuples."""
    found = {field.name: config[field.name] for field in fields(kind) if field.name in config}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def require(config: Mapping[str, Any], **supported: Any) -> None:
    """Raise `UserError` for the first key whose value is not the supported one; keys may be missing.

    Example:
      >>> require({"hidden_act": "gelu"}, hidden_act="gelu", is_decoder=False)
      >>> require({"is_decoder": True}, is_decoder=False)
      Traceback (most recent call last):
          ...
      jaxtrain.errors.UserError: is_decoder True is not supported: only False is
    """
    for key, value in supported.items():
        if config.get(key, value) != value:
            raise UserError(f"{key} {config[key]!r} is not supported: only {value!r} is")


def labels_from_hf(config: Mapping[str, Any]) -> int:
    """Return the number of classes; `transformers` writes only their names, and its default is two."""
    return int(config.get("num_labels") or len(config.get("id2label") or range(2)))


def labels_to_hf(count: int) -> dict[str, Any]:
    """Return the keys of a config.json for `count` classes, with the default names of `transformers`.

    Example:
      >>> labels_from_hf(labels_to_hf(3))
      3
    """
    names = [f"LABEL_{i}" for i in range(count)]
    return {
        "id2label": dict(zip(map(str, range(count)), names, strict=True)),
        "label2id": {n: i for i, n in enumerate(names)},
    }
