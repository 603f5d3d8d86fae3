"""A pretrained decoder as fine-tuning needs it, of `jaxtrain.models` or of `transformers`."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

import jaxtrain as jt
from jaxtrain.models import PretrainedModel, Sampling
from jaxtrain.run import Signature


class Decoder(Protocol):
    """A decoder in a folder."""

    @property
    def weights(self) -> PretrainedModel:
        """Names, shapes and sharding rules of its parameters, and the parameters."""

    @property
    def kind(self) -> str:
        """Name of its class."""

    @property
    def context_length(self) -> int:
        """Largest number of tokens of a text."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""

    @property
    def kernels(self) -> Mapping[str, bool]:
        """Paths of the kernels of all linear layers but the head, which QLoRA adapts and quantizes: whether they are
        stored [out, in]."""

    @property
    def embeddings(self) -> tuple[str, float]:
        """Path of the table of tokens, and what its rows are multiplied by. Raises `UserError` if there is none."""

    def log_probs(
        self, params: Any, tokens: jax.Array, targets: jax.Array, rng: Any, positions: Any, segments: Any
    ) -> jax.Array:
        """Return the log-probability of every target, float [B, T].

        Args:
          params: Parameters.
          tokens: int [B, T].
          targets: int [B, T].
          rng: Key of dropout in training mode, or None.
          positions: int [B, T].
          segments: int [B, T], the number of the example of each token; tokens attend to their own.
        """

    def logits(self, params: Any, tokens: jax.Array, positions: Any, segments: Any) -> jax.Array:
        """Return the logits of the tokens that follow, float [B, T, vocabulary], in evaluation mode."""

    def generate(
        self, params: Any, prompts: np.ndarray, new_tokens: int, *, mask: np.ndarray, stop: int | None, pad: int
    ) -> jax.Array:
        """Return the most likely continuations, int32 [B, new_tokens], as `jaxtrain.models.generate`."""

    def stream(
        self, params: Any, prompt: Sequence[int], new_tokens: int, *, sampling: Sampling, stop: int | None, seed: int
    ) -> Iterator[int]:
        """Yield a continuation, as `jaxtrain.models.stream`."""

    def signature(self, length: int, pad: int) -> Signature:
        """Return the signature of the exported model, for rows of a length."""

    @property
    def save_pretrained(self) -> Callable[[Path, Any], None] | None:
        """Writes a folder with other parameters that transformers reads; None if `jaxtrain.models` does."""

    @property
    def no_decay(self) -> Callable[[str], bool] | None:
        """Predicate on the paths of parameters that do not decay; None for `jaxtrain.optim.no_decay`."""


def adapter_targets(decoder: Decoder, targets: str | None) -> str:
    """Return the targets of a `LoraConfig`: the linear layers, or those of them whose whole paths `targets` matches.

    Raises:
      UserError: No linear layer matches.
    """
    try:
        chosen = [path for path in decoder.kernels if targets is None or re.fullmatch(targets, path)]
    except re.error as error:
        raise jt.UserError(
            f"targets {targets!r} is not a regular expression ({error}): use one such as .*/kernel"
        ) from None
    if not chosen:
        raise jt.UserError(
            f"targets {targets!r} match no whole path of a linear layer: these are {', '.join(decoder.kernels)}"
        )
    return "|".join(map(re.escape, chosen))


def out_in_targets(decoder: Decoder) -> str:
    """Return the regular expression of the kernels that are stored [out, in]; empty for none."""
    return "|".join(re.escape(path) for path, out_in in decoder.kernels.items() if out_in)


def check_decoder(decoder: Decoder, folder: Path, tokens: int, length: int) -> None:
    """Raise `UserError` unless a decoder fits rows of a length, of a tokenizer with so many tokens."""
    if length > decoder.context_length:
        raise jt.UserError(
            f"seq_len {length} exceeds the {decoder.context_length} positions of {folder}: use --seq-len "
            f"{decoder.context_length} or less"
        )
    if tokens > decoder.vocab_size:
        raise jt.UserError(
            f"the tokenizer of {folder} has {tokens:,} tokens, the model {decoder.vocab_size:,}: resize it with "
            "resize_token_embeddings of transformers"
        )
