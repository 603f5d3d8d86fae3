"""A pretrained decoder of `jaxtrain.models`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxtrain as jt
from jaxtrain.models import PretrainedModel, Sampling, functional, generate, log_probs, open_pretrained, stream
from jaxtrain.paths import path_name
from jaxtrain.run import Input, Signature

_EMBEDDINGS = ("wte", "embed_tokens")  # of GPT-2, and of the Llama family


@dataclass(frozen=True, eq=False)
class ZooDecoder:
    """A decoder of `jaxtrain.models`, as `Decoder` describes it.

    Args:
      weights: The model in its folder.
    """

    weights: PretrainedModel
    save_pretrained = None
    no_decay = None

    @classmethod
    def open(cls, folder: Path) -> "ZooDecoder":
        """Open a folder. Raises `UserError` unless it has a decoder."""
        weights = open_pretrained(folder)
        if not hasattr(weights.model, "context_length"):
            kind = type(weights.model).__name__
            raise jt.UserError(f"model {folder} is a {kind}: use a decoder, such as a GPT-2 or a Llama")
        return cls(weights)

    @property
    def kind(self) -> str:
        """Name of the class."""
        return type(self.weights.model).__name__

    @property
    def context_length(self) -> int:
        """Number of positions."""
        length: int = self.weights.model.context_length
        return length

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        size: int = self.weights.model.config.vocab_size
        return size

    @cached_property
    def kernels(self) -> Mapping[str, bool]:
        """Paths of kernels. Those of the blocks are stacked, [layers, in, out]."""
        named = ((path_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(self.weights.shapes))
        return {path: False for path, leaf in named if path.endswith("/kernel") and leaf.ndim == 3}

    @property
    def embeddings(self) -> tuple[str, float]:
        """Path of the table of tokens."""
        return next(name for name in _EMBEDDINGS if name in self.weights.names.params), 1.0

    def log_probs(self, params: Any, *inputs: Any) -> jax.Array:
        """Return log-probabilities, with the logits of some tokens at a time."""
        compute, _ = functional(self.weights.model, log_probs)
        result: jax.Array = compute(params, *inputs)
        return result

    def logits(self, params: Any, tokens: jax.Array, positions: Any, segments: Any) -> jax.Array:
        """Return logits."""
        compute, _ = functional(self.weights.model)
        result: jax.Array = compute(params, tokens, None, positions, segments)
        return result

    def generate(
        self, params: Any, prompts: np.ndarray, new_tokens: int, *, mask: np.ndarray, stop: int | None, pad: int
    ) -> jax.Array:
        """Generate continuations."""
        return generate(self.weights.model, params, prompts, new_tokens, mask=mask, stop=stop, pad=pad)

    def stream(
        self, params: Any, prompt: Sequence[int], new_tokens: int, *, sampling: Sampling, stop: int | None, seed: int
    ) -> Iterator[int]:
        """Yield a continuation."""
        return stream(self.weights.model, params, prompt, new_tokens, sampling=sampling, stop=stop, seed=seed)

    def signature(self, length: int, pad: int) -> Signature:
        """Return the signature of the model."""
        tokens = Input((length,), np.int32, pad)
        return Signature(self.weights.model, {"tokens": tokens}, lambda call, tokens: call(tokens), "tokens")
