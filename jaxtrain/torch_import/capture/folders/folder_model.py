"""Models of transformers in local folders. Code in a folder, which its configuration may name, is never executed."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from jaxtrain.errors import UserError
from jaxtrain.torch_import.refusals import first_line

_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def pretrained(folder: Path | str, dtype: Any = torch.float32) -> torch.nn.Module:
    """Load a model, with weights in safetensors.

    Args:
      folder: A folder with `config.json`, which names the class of transformers.
      dtype: Dtype of the weights; "auto" for that of the folder.

    Raises:
      UserError: There is no such folder, transformers has no such class or is not installed, or the weights do not fit.
    """
    kind, _ = class_in(folder)
    with loading(folder):
        model, info = kind.from_pretrained(
            folder, **_LOCAL, use_safetensors=True, dtype=dtype, output_loading_info=True
        )
    if info["missing_keys"]:
        raise UserError(f"{folder} has no {', '.join(sorted(info['missing_keys']))}: use a folder with all weights")
    # A cache is no tensor, and training needs none.
    model.config.use_cache = False
    loaded: torch.nn.Module = model
    return loaded


def class_in(folder: Path | str) -> tuple[Any, Any]:
    """Return the class of the model in a folder, and its configuration.

    Raises:
      UserError: There is no such folder, or transformers has no such class or is not installed.
    """
    if not (Path(folder) / "config.json").is_file():
        raise UserError(f"{folder} is no folder with a config.json: pass a torch.nn.Module or such a folder")
    try:
        import transformers
    except ImportError as error:
        raise UserError(f"{folder} needs transformers: pip install transformers") from error
    with loading(folder):
        values, _ = transformers.PreTrainedConfig.get_config_dict(folder, local_files_only=True)
        names = values.get("architectures") or [None]
        kind: Any = getattr(transformers, str(names[0]), None)
        if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
            raise UserError(
                f"{folder} is of the architecture {names[0]!r}, which transformers does not define: import the module"
            )
        config: Any = kind.config_class
        return kind, config.from_pretrained(folder, **_LOCAL)


@contextlib.contextmanager
def loading(folder: Path | str) -> Iterator[None]:
    """Raise errors of transformers as `UserError`."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{folder} cannot be loaded by transformers: {first_line(error)}") from error
