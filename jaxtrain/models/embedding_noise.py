"""Noisy embeddings for fine-tuning: NEFTune (Jain et al. 2023)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.models.parameter_forms import Form, evaluate
from jaxtrain.paths import path_name


def neftune(embeddings: jax.Array, alpha: float, rng: jax.Array | None) -> jax.Array:
    """Add uniform noise within ±α/√(tokens · width), as the hook of `transformers`.

    Args:
      embeddings: float [..., tokens, width].
      alpha: Size of the noise; 5 is the paper's.
      rng: Key of the noise; None for none.

    Returns:
      float [..., tokens, width].

    Example:
      >>> import jax.numpy as jnp
      >>> noisy = neftune(jnp.zeros((2, 4, 25)), 5.0, jax.random.key(0))
      >>> 0.4 < float(jnp.abs(noisy).max()) < 0.5
      True
    """
    if rng is None:
        return embeddings
    tokens, width = embeddings.shape[-2:]
    bound = alpha / np.sqrt(tokens * width)
    wide = np.promote_types(embeddings.dtype, np.float32)
    noise = jax.random.uniform(rng, embeddings.shape, wide, -bound, bound)
    return embeddings + noise.astype(embeddings.dtype)


def with_neftune(apply: Callable[..., Any], table: str, alpha: float) -> Callable[..., Any]:
    """Return a function that computes `apply` with noise on the embeddings of its tokens.

    Args:
      apply: Function `apply(params, *inputs)`: a model or a whole loss function.
      table: Path of the embedding table in the parameters, such as "wte". Other uses of it have no noise.
      alpha: As of `neftune`.

    Returns:
      A function of the same arguments and of the key of the noise, `rng=`; without one there is no noise.

    Raises:
      UserError: When called, if the parameters have no such table.

    Example:
      >>> import jax.numpy as jnp
      >>> noisy = with_neftune(lambda params, tokens: params["wte"][tokens], "wte", 5.0)
      >>> noisy({"wte": jnp.zeros((7, 4))}, jnp.ones((2, 3), int), rng=jax.random.key(0)).shape
      (2, 3, 4)
    """

    def apply_noisy(params: Any, *inputs: Any, rng: jax.Array | None = None) -> Any:
        if rng is None:
            return apply(params, *inputs)
        paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        if table not in paths:
            raise UserError(f"no parameter is {table!r}, the table of embeddings: use one of {', '.join(paths)}")
        noisy = jax.tree_util.tree_map_with_path(
            lambda path, x: _NoisyTable(x, rng, alpha) if path_name(path) == table else x, params
        )
        return evaluate(lambda like: apply(like, *inputs), params, noisy)

    return apply_noisy


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _NoisyTable(Form):
    """An embedding table whose rows have noise where they are looked up."""

    table: Any
    key: Any
    alpha: float = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.table.shape)

    @property
    def dtype(self) -> Any:
        return self.table.dtype

    def array(self) -> jax.Array:
        table: jax.Array = self.table
        return table

    def rows(self, found: jax.Array) -> jax.Array:
        return neftune(found, self.alpha, self.key)
