"""A language model of transformers in a local folder as a pure function, for fine-tuning."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import canonicalize_dtype

from jaxtrain.errors import UserError
from jaxtrain.interop import OUT_IN
from jaxtrain.models import GREEDY, PretrainedModel, Sampling, nf4, read_tensors
from jaxtrain.torch_import import uncached_generation
from jaxtrain.torch_import.graph_model import Params
from jaxtrain.torch_import.model import ImportedModel, from_torch
from jaxtrain.torch_import.uncached_generation import Options


@dataclass(frozen=True, eq=False)
class CausalLM:
    """A language model of transformers, whose weights are in a folder.

    Attributes:
      module: The module of PyTorch, without weights.
      model: The model, without weights. It takes `tokens`, and `positions` if rows may be packed.
      weights: Its weights, which are read later.
      context_length: Largest number of tokens; None if there is none.
      vocab_size: Number of tokens that it predicts.
      kernels: Weights for which `peft` has adapters, of linear layers but the head: whether they are stored [out, in].
      embeddings: Name of the table of tokens, and what its rows are multiplied by; None if embeddings are computed in
        another way.
    """

    module: Any
    model: ImportedModel
    weights: PretrainedModel
    context_length: int | None
    vocab_size: int
    kernels: Mapping[str, bool]
    embeddings: tuple[str, float] | None

    def logits(self, params: Params, tokens: jax.Array, rng: jax.Array | None, positions: jax.Array) -> jax.Array:
        """Compute the logits of the tokens that follow.

        Args:
          params: Parameters by name.
          tokens: int [B, T].
          rng: Key of dropout in training mode, or None.
          positions: int [B, T], from 0 in every example of a row.

        Returns:
          float [B, T, vocabulary].
        """
        result: jax.Array = self.model(params, {"tokens": tokens, "positions": positions}, rng)[0]
        return result

    def generate(
        self, params: Any, prompts: np.ndarray, mask: np.ndarray, new_tokens: int, *, stop: int | None, pad: int
    ) -> jax.Array:
        """Return the most likely continuations, int32 [B, new_tokens], as `jaxtrain.models.generate`."""
        return uncached_generation.generate(self._next, params, prompts, mask, Options(new_tokens, GREEDY, stop, pad))

    def stream(
        self, params: Any, prompt: Sequence[int], new_tokens: int, *, sampling: Sampling, stop: int | None, seed: int
    ) -> Iterator[int]:
        """Yield the tokens of a continuation, as `jaxtrain.models.stream`."""
        context = self.context_length or len(prompt) + new_tokens
        options = Options(new_tokens, sampling, stop, 0)
        return uncached_generation.stream(self._next, params, prompt, context, options, seed)

    def _next(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Return the logits of a batch of texts, of parameters that may be adapted or quantized."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        logits: jax.Array = nf4.with_quantized(self.logits)(params, tokens, None, positions)
        return logits

    def write(self, folder: Path, params: Params) -> None:
        """Write a folder with other weights, by `save_pretrained` of transformers."""
        from jaxtrain.torch_import.capture import write_causal_lm

        write_causal_lm(self.module, self.model.names.to_torch(params), folder)


def open_causal_lm(folder: Path, rows: int, length: int, *, packed: bool) -> CausalLM:
    """Open a language model in a folder that `transformers` reads, without reading its weights.

    It is captured without weights, and no code in the folder is executed.

    Args:
      folder: The folder, with weights in safetensors.
      rows: Number of rows of a batch in training.
      length: Number of tokens of a row.
      packed: Whether rows hold several examples.

    Returns:
      The model.

    Raises:
      UserError: PyTorch or transformers is not installed, or the folder has no decoder that can be imported, or none
        that keeps the examples of a packed row apart.
    """
    try:
        from jaxtrain.torch_import import capture
    except ImportError as error:
        raise UserError(f"{folder} is imported from PyTorch: pip install torch transformers") from error
    module = capture.empty_causal_lm(folder)
    text = module.config.get_text_config(decoder=True)
    context = getattr(text, "max_position_embeddings", None)
    tensors = capture.model_tensors(folder, module, read_tensors(folder))
    call = capture.packed_call(module)
    if packed and call is None:
        kind = type(module).__name__
        raise UserError(f"{folder}: a {kind} cannot keep the examples of a packed row apart: use --no-packing")
    example = np.zeros((rows, length if context is None else min(length, context)), np.int32)
    inputs = {"tokens": example} if call is None else {"tokens": example, "positions": example}
    model = from_torch(module, inputs, call=call or capture.plain_call)
    stored = model.names.stored(tensors, model.params)
    shapes = {name: jax.ShapeDtypeStruct(x.shape, canonicalize_dtype(x.dtype)) for name, x in stored.items()}
    names, adaptable = model.names, capture.adaptable_weights(module)
    kernels = {
        name: layout is OUT_IN
        for name, layout in model._linear.items()
        if adaptable.issuperset(names.params[name].names(model.params[name].shape[0]))
    }
    return CausalLM(
        module=module,
        model=model,
        weights=PretrainedModel(model, names, model.sharding, shapes, stored),
        context_length=context,
        vocab_size=text.vocab_size,
        kernels=kernels,
        embeddings=capture.token_embeddings(module),
    )


def load_causal_lm(folder: Path) -> Callable[[np.ndarray], np.ndarray]:
    """Load a language model by `transformers`; return a function from tokens int [B, T] to its logits."""
    from jaxtrain.torch_import import capture

    return capture.logits_of(capture.pretrained(folder))
