"""Language models of transformers in local folders, without their weights."""

import contextlib
import copy
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from jaxtrain.data import tensor_to_numpy
from jaxtrain.errors import UserError
from jaxtrain.interop import StoredTensor
from jaxtrain.torch_import.capture.folders.folder_model import class_in, loading, pretrained
from jaxtrain.torch_import.capture.folders.packed_rows import EXPERTS, plain_call
from jaxtrain.torch_import.capture.replaced import replaced


def empty_causal_lm(folder: Path | str) -> Any:
    """Return the language model in a folder: parameters on the "meta" device, buffers with their initial values.

    Raises:
      UserError: The folder has no language model of transformers, or its weights are quantized.
    """
    kind, config = class_in(folder)
    from transformers.models.auto import modeling_auto

    if kind.__name__ not in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise UserError(f"model {folder} is a {kind.__name__}: use a decoder, such as a GPT-2 or a Llama")
    if getattr(config, "quantization_config", None):
        raise UserError(f"the weights of {folder} are quantized: use the model without quantization_config")
    with loading(folder):
        return _made(kind, config)


def logits_of(module: torch.nn.Module) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function from tokens [B, T] to the logits of a model in evaluation mode."""
    module.eval()

    def logits(tokens: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            found: np.ndarray = plain_call(module, {"tokens": torch.tensor(tokens, dtype=torch.int64)}).numpy()
        return found

    return logits


class TokenEmbeddings(NamedTuple):
    """A table of tokens, whose rows are multiplied by a number."""

    table: str
    scale: float


def token_embeddings(module: Any) -> TokenEmbeddings | None:
    """Return the embeddings of tokens; None for other functions of a token than a row of a table, multiplied."""
    table = module.get_input_embeddings()
    name = next((name for name, param in module.named_parameters() if param is getattr(table, "weight", None)), None)
    if name is None or not isinstance(table, torch.nn.Embedding):
        return None
    ones = {"weight": torch.ones(1).expand(table.weight.shape)}
    rows = torch.func.functional_call(table, ones, torch.tensor([[0, 1]]))
    scale = float(rows.flatten()[0])
    is_multiple = rows.shape == (1, 2, table.embedding_dim) and bool((rows == scale).all())
    return TokenEmbeddings(name, scale) if is_multiple else None


def adaptable_weights(module: Any) -> set[str]:
    """Return the names of the weights for which `peft` has adapters, without the head's."""
    from transformers.pytorch_utils import Conv1D

    head = module.get_output_embeddings()
    parts = {name: part for name, part in module.named_modules() if isinstance(part, torch.nn.Linear | Conv1D)}
    return {f"{name}.weight" for name, part in parts.items() if part is not head}


def model_tensors(folder: Path | str, module: Any, tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Return the tensors of a folder under the names of the model; transformers reads those that it has to convert.

    Args:
      folder: The folder.
      module: The model, whose buffers are read as well.
      tensors: Tensors in the folder.
    """
    from transformers.conversion_mapping import WeightRenaming, get_model_conversion_mapping

    names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    buffers, persistent, prefix = dict(module.named_buffers()), module.state_dict(), f"{module.base_model_prefix}."
    ignored = re.compile("|".join(module._keys_to_ignore_on_load_unexpected or ["(?!)"]))
    renamings = [x for x in get_model_conversion_mapping(module) if isinstance(x, WeightRenaming)]
    found = {}
    for stored, tensor in tensors.items():
        name = functools.reduce(lambda name, renaming: renaming.rename_source_key(name)[0], renamings, stored)
        name = prefix + name if prefix + name in names else name
        if name in buffers:
            if name in persistent and tuple(buffers[name].shape) == tensor.shape:
                buffers[name].copy_(torch.from_numpy(np.asarray(tensor).astype(np.float32)))
        elif name in names or not ignored.search(name):
            found[name] = tensor
    if names == found.keys() | {name for name in names if name in module.all_tied_weights_keys}:
        return found
    return _converted(folder, module, next(iter(tensors.values())).dtype)


def _converted(folder: Path | str, module: Any, dtype: Any) -> dict[str, StoredTensor]:
    """Return the tensors of a model that transformers reads, all of them when the first is needed."""

    @functools.cache
    def loaded() -> dict[str, torch.Tensor]:
        return dict(pretrained(folder, dtype="auto").named_parameters())

    def stored(name: str, param: torch.Tensor) -> StoredTensor:
        return StoredTensor(name, param.shape, dtype, lambda: tensor_to_numpy(loaded()[name]))

    return {name: stored(name, param) for name, param in module.named_parameters()}


def write_causal_lm(module: Any, tensors: Mapping[str, np.ndarray], folder: Path) -> None:
    """Write a model with these weights, in their dtypes, as `save_pretrained` of transformers does.

    Args:
      module: The model without weights.
      tensors: The parameters by name, without those that are tied to others.
      folder: The new folder.
    """
    module = copy.deepcopy(module)
    # NumPy's bfloat16 is none of PyTorch's; float32 holds all its values.
    weights = {
        name: torch.from_numpy(np.array(x, np.float32)).to(getattr(torch, x.dtype.name)) for name, x in tensors.items()
    }
    module.load_state_dict(weights, strict=False, assign=True)
    module.tie_weights()
    module.save_pretrained(folder)


def _made(kind: Any, config: Any) -> Any:
    """Return a model in training mode without weights, whose experts compute on all tokens."""
    with _without_weights():
        model = kind._from_config(config, dtype=torch.float32, **EXPERTS)
    model.config.use_cache = False
    return model.train()


@contextlib.contextmanager
def _without_weights() -> Iterator[None]:
    """Create parameters on the "meta" device while entered, and buffers where they are."""
    register = torch.nn.Module.register_parameter

    def on_meta(self: torch.nn.Module, name: str, param: Any) -> None:
        if param is not None and param.device.type != "meta":
            param = torch.nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    with replaced(torch.nn.Module, "register_parameter", on_meta):
        yield
