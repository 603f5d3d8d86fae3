"""Language models of transformers without their weights, from local folders, and how they take packed rows."""

import contextlib
import copy
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from jaxtrain.data import tensor_to_numpy
from jaxtrain.errors import UserError
from jaxtrain.interop import StoredTensor
from jaxtrain.torch_import.capture.in_float64 import in_float64
from jaxtrain.torch_import.capture.pretrained import class_in, loading, pretrained
from jaxtrain.torch_import.capture.tracing import replaced
from jaxtrain.torch_import.refusals import first_line

Call = Callable[[torch.nn.Module, Mapping[str, torch.Tensor]], torch.Tensor]
"""From (module, batch of `tokens`, `positions` and `segments`) to the logits."""


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


def packed_call(module: Any) -> Call | None:
    """Return a call in which every example of a packed row attends to itself alone; None if the model has none.

    Of the ways in which models of transformers may take such rows, each is tried on a copy with few layers and random
    weights in float64, whose logits must be those of the examples by themselves.

    Raises:
      UserError: A token depends on those after it.
    """
    probe, name = _small_copy(module), type(module).__name__
    try:
        *expected, longer = (_logits(probe, plain_call, [length]) for length in (*_LENGTHS, sum(_LENGTHS)))
    except Exception as error:  # any: the model takes no tokens alone
        raise UserError(f"a {name} does not compute logits from tokens: {first_line(error)}") from error
    if not _equal(longer[:, : _LENGTHS[0]], expected[0]):
        raise UserError(f"the tokens of a {name} depend on later ones: use a decoder")
    for call in (_with_positions, _with_masks):
        try:
            found = _logits(probe, call, _LENGTHS)
        except Exception:  # any: the model takes no such inputs
            continue
        if all(map(_equal, found.split([*_LENGTHS, _PADDING], dim=1), expected)):
            return call
    return None


def plain_call(module: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the logits of rows with an example each, which padding may follow."""
    return _output(module, input_ids=batch["tokens"])


def _with_positions(module: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Call a model that starts a new sequence where the positions do (`find_packed_sequence_indices`)."""
    return _output(module, input_ids=batch["tokens"], position_ids=batch["positions"])


def _with_masks(module: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Call a model that takes the masks of its layers."""
    from transformers.masking_utils import create_masks_for_generate

    positions, dtype = batch["positions"], next(module.parameters()).dtype
    like = torch.empty(*positions.shape, 1, dtype=dtype)
    masks = create_masks_for_generate(module.config, like, None, None, position_ids=positions)
    return _output(module, input_ids=batch["tokens"], position_ids=positions, attention_mask=masks)


def _output(module: torch.nn.Module, **inputs: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = module(**inputs, use_cache=False).logits
    return logits


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
    buffers, prefix = dict(module.named_buffers()), f"{module.base_model_prefix}."
    ignored = re.compile("|".join(module._keys_to_ignore_on_load_unexpected or ["(?!)"]))
    renamings = [x for x in get_model_conversion_mapping(module) if isinstance(x, WeightRenaming)]
    found = {}
    for stored, tensor in tensors.items():
        name = functools.reduce(lambda name, renaming: renaming.rename_source_key(name)[0], renamings, stored)
        name = prefix + name if prefix + name in names else name
        if name in buffers:
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
    """Write a model with these weights as `save_pretrained` of transformers does.

    Args:
      module: The model without weights.
      tensors: The parameters by name, without those that are tied to others.
      folder: The new folder.
    """
    module = copy.deepcopy(module)
    weights = {name: torch.from_numpy(np.array(x, np.float32)) for name, x in tensors.items()}
    module.load_state_dict(weights, strict=False, assign=True)
    module.tie_weights()
    module.save_pretrained(folder)


_EXPERTS = {"experts_implementation": "batched_mm"}
"""Experts that compute on all tokens: others depend on values, or have no float64."""
_LENGTHS, _PADDING = (4, 6), 2
_WINDOWS = ("sliding_window", "attention_chunk_size", "window_size"), 3
"""Settings of the longest window of attention in a probe, which ends within an example."""
_WIDTHS = ("intermediate_size", "moe_intermediate_size", "ffn_dim"), 64


def _row(lengths: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return a row of examples, the same tokens in each, with padding after several of them."""
    segments = [i for i, length in enumerate(lengths, start=1) for _ in range(length)]
    positions = [i for length in lengths for i in range(length)]
    tokens = [1 + i * i % 7 for i in positions]
    padding = [0] * (_PADDING if len(lengths) > 1 else 0)
    row = {"tokens": tokens + padding, "positions": positions + padding, "segments": segments + padding}
    return {name: torch.tensor([x]) for name, x in row.items()}


def _logits(module: torch.nn.Module, call: Call, lengths: Sequence[int]) -> torch.Tensor:
    """Return the logits of a row of examples."""
    with torch.no_grad(), in_float64():
        return call(module, _row(lengths))


def _equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).abs().max() <= 1e-9 * expected.abs().max())


def _small_copy(module: Any) -> torch.nn.Module:
    """Return a model like this in evaluation mode, in float64, with layers of every kind."""
    made = functools.partial(type(module)._from_config, dtype=torch.float64, **_EXPERTS)
    try:
        small = made(_small(module.config))
    except Exception:  # any: this configuration must be as it is
        small = made(copy.deepcopy(module.config))
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        for param in small.parameters():
            # A new model's norms and biases would hide some errors.
            param.add_(0.1 * torch.randn(param.shape, dtype=torch.float64))
    return small.eval()


def _small(config: Any) -> Any:
    """Return a configuration with few layers, tokens, and short windows."""
    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None)
    depth = min(2, text.num_hidden_layers)
    if kinds:
        depth = max(depth, *(kinds.index(kind) + 1 for kind in set(kinds)))
        text.layer_types = kinds[:depth]
    text.num_hidden_layers = depth
    text.vocab_size = min(text.vocab_size, 16)
    text.pad_token_id = None
    for names, most in (_WINDOWS, _WIDTHS):
        for name in names:
            if isinstance(size := getattr(text, name, None), int):
                setattr(text, name, min(size, most))
    return config


def _made(kind: Any, config: Any) -> Any:
    """Return a model in training mode without weights, whose experts compute on all tokens."""
    with _without_weights():
        model = kind._from_config(config, dtype=torch.float32, **_EXPERTS)
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
