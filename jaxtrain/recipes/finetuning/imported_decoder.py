"""A pretrained decoder of `transformers` without an implementation in `jaxtrain.models`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxtrain as jt
from jaxtrain import losses
from jaxtrain.models import PretrainedModel, Sampling
from jaxtrain.run import Input, Signature
from jaxtrain.torch_import import CausalLM, open_causal_lm

_UNBOUNDED = 2**31 - 1


@dataclass(frozen=True, eq=False)
class ImportedDecoder:
    """A decoder of `transformers`, as `Decoder` describes it.

    Args:
      model: The model in its folder.
    """

    model: CausalLM

    @classmethod
    def open(cls, folder: Path, rows: int, length: int, *, packed: bool) -> "ImportedDecoder":
        """Open a folder. Raises `UserError` unless it has a decoder for rows of a length, packed or not.

        Args:
          folder: The folder.
          rows: Number of rows of a batch in training.
          length: Number of tokens of a row.
          packed: Whether rows hold several examples.
        """
        return cls(open_causal_lm(folder, rows, length, packed=packed))

    @property
    def weights(self) -> PretrainedModel:
        """Names, shapes, sharding rules and weights."""
        return self.model.weights

    @property
    def kind(self) -> str:
        """Name of the class."""
        return type(self.model.module).__name__

    @property
    def context_length(self) -> int:
        """Number of positions."""
        return self.model.context_length or _UNBOUNDED

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return self.model.vocab_size

    @property
    def kernels(self) -> Mapping[str, bool]:
        """Names of weights."""
        return self.model.kernels

    @property
    def embeddings(self) -> tuple[str, float]:
        """Name of the table of tokens, and the factor of its rows."""
        if self.model.embeddings is None:
            raise jt.UserError(f"the embeddings of a {self.kind} are not the rows of a table: omit --neftune")
        return self.model.embeddings

    def log_probs(
        self, params: Any, tokens: jax.Array, targets: jax.Array, rng: Any, positions: Any, segments: Any
    ) -> jax.Array:
        """Return log-probabilities."""
        del segments  # their positions tell them apart
        return -losses.cross_entropy(self.model.logits(params, tokens, rng, positions), targets)

    def logits(self, params: Any, tokens: jax.Array, positions: Any, segments: Any) -> jax.Array:
        """Return logits."""
        del segments
        return self.model.logits(params, tokens, None, positions)

    def generate(
        self, params: Any, prompts: np.ndarray, new_tokens: int, *, mask: np.ndarray, stop: int | None, pad: int
    ) -> jax.Array:
        """Generate continuations."""
        return self.model.generate(params, prompts, mask, new_tokens, stop=stop, pad=pad)

    def stream(
        self, params: Any, prompt: Sequence[int], new_tokens: int, *, sampling: Sampling, stop: int | None, seed: int
    ) -> Iterator[int]:
        """Yield a continuation."""
        return self.model.stream(params, prompt, new_tokens, sampling=sampling, stop=stop, seed=seed)

    def signature(self, length: int, pad: int) -> Signature:
        """Return the signature of the model."""

        def logits(params: Any, tokens: jax.Array) -> jax.Array:
            return self.model.logits(params, tokens, None, jnp.broadcast_to(jnp.arange(length), tokens.shape))

        return Signature(None, {"tokens": Input((length,), np.int32, pad)}, logits, "tokens")

    def save_pretrained(self, folder: Path, params: Any) -> None:
        """Write a folder with other parameters."""
        self.model.write(folder, params)

    def no_decay(self, path: str) -> bool:
        """Return whether a path of the parameters, or of adapters, is that of a bias or a norm's scale."""
        *_, name = path.split("/")
        return name in self.weights.shapes and self.model.model.no_decay(name)
