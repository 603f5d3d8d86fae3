"""How a language model of transformers takes rows of several examples."""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from jaxtrain.errors import UserError
from jaxtrain.torch_import.capture.in_float64 import in_float64
from jaxtrain.torch_import.refusals import first_line

Call = Callable[[torch.nn.Module, Mapping[str, torch.Tensor]], torch.Tensor]
"""From (module, batch of `tokens` and `positions`) to the logits."""
EXPERTS = {"experts_implementation": "batched_mm"}
"""Experts that compute on all tokens: others depend on values, or have no float64."""
_LENGTHS, _PADDING = (4, 6), 2
"""Numbers of tokens of the examples in a probe, and of the padding after them."""
_WINDOWS = ("sliding_window", "attention_chunk_size", "window_size"), 3
"""Settings of the longest window of attention in a probe, which ends within an example."""
_WIDTHS = ("intermediate_size", "moe_intermediate_size", "ffn_dim"), 64
"""Settings that only the size of a probe depends on."""


def packed_call(module: Any) -> Call | None:
    """Return a call in which every example of a packed row attends to itself alone; None if the model has none.

    Of the ways in which models of transformers may take such rows, each is tried on a copy with few layers and random
    weights in float64, whose logits must be those of the examples by themselves.

    Raises:
      UserError: A token depends on those after it.
    """
    probe, name = _small_copy(module), type(module).__name__
    try:
        expected = [_logits(probe, plain_call, [length]) for length in _LENGTHS]
        as_one = _logits(probe, plain_call, _LENGTHS)
    except Exception as error:  # any: the model takes no tokens alone
        raise UserError(f"a {name} does not compute logits from tokens: {first_line(error)}") from error
    if not _equal(as_one[:, : _LENGTHS[0]], expected[0]):
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


def _row(lengths: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return a row of examples of these lengths, with padding after several of them."""
    positions = [i for length in lengths for i in range(length)]
    tokens = [1 + (i * i + length) % 7 for length in lengths for i in range(length)]
    padding = [0] * (_PADDING if len(lengths) > 1 else 0)
    return {"tokens": torch.tensor([tokens + padding]), "positions": torch.tensor([positions + padding])}


def _logits(module: torch.nn.Module, call: Call, lengths: Sequence[int]) -> torch.Tensor:
    """Return the logits of a row of examples."""
    with torch.no_grad(), in_float64():
        return call(module, _row(lengths))


def _equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).abs().max() <= 1e-9 * expected.abs().max())


def _small_copy(module: Any) -> torch.nn.Module:
    """Return a model like this in evaluation mode, in float64, with layers of every kind."""
    made = functools.partial(type(module)._from_config, dtype=torch.float64, **EXPERTS)
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
