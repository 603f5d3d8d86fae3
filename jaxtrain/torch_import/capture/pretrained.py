"""Models of transformers in local folders. Code in a folder, which its configuration may name, is never executed."""

from pathlib import Path
from typing import Any

import torch

from jaxtrain.errors import UserError
from jaxtrain.torch_import.refusals import first_line


def pretrained(folder: Path | str) -> torch.nn.Module:
    """Load a model in float32, with weights in safetensors.

    Args:
      folder: A folder with `config.json`, which names the class of transformers.

    Raises:
      UserError: There is no such folder, transformers has no such class or is not installed, or the weights do not fit.
    """
    if not (Path(folder) / "config.json").is_file():
        raise UserError(f"{folder} is no folder with a config.json: pass a torch.nn.Module or such a folder")
    try:
        import transformers
    except ImportError as error:
        raise UserError(f"{folder} needs transformers: pip install transformers") from error
    try:
        config, _ = transformers.PreTrainedConfig.get_config_dict(folder, local_files_only=True)
        names = config.get("architectures") or [None]
        kind: Any = getattr(transformers, str(names[0]), None)
        if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
            raise UserError(
                f"{folder} is of the architecture {names[0]!r}, which transformers does not define: import the module"
            )
        model = kind.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype=torch.float32
        )
    except (OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{folder} cannot be loaded by transformers: {first_line(error)}") from error
    # A cache is no tensor, and training needs none.
    model.config.use_cache = False
    loaded: torch.nn.Module = model
    return loaded
