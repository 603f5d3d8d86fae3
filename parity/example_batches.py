"""Random batches like an example, and the way from a batch by name to the example's structure."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import UserError
from parity.case import Batch


class Example:
    """An example batch, whose structure and values random batches follow.

    Attributes:
      rows: Rows of the example; None if its arrays have no common first axis.
    """

    def __init__(self, example: Any) -> None:
        pairs, self._structure = jax.tree_util.tree_flatten_with_path(example)
        names = (jax.tree_util.keystr(path, simple=True, separator="/") or "input" for path, _ in pairs)
        self._arrays = {name: np.asarray(x) for name, (_, x) in zip(names, pairs, strict=True)}
        for name, x in self._arrays.items():
            if np.iscomplexobj(x):
                raise UserError(f"the example's {name!r} is complex: pass batch, torch_loss and loss_fn to model.case")
        firsts = {x.shape[:1] for x in self._arrays.values()}
        first = firsts.pop() if len(firsts) == 1 else ()
        self.rows: int | None = first[0] if first else None

    def batch(self, seed: int, rows: int) -> Batch:
        """Return a batch by name, with the rows on the first axis; the whole batch is one row if it has none.

        Masks (bool, or the integers 0 and 1) have rows of the example in random order. Other integers are drawn from
        its range, but negative ones, such as labels to ignore, stay in their place. Floats are standard normal if the
        example is constant, uniform over its range if it has no negative value, else normal with its mean and
        deviation.
        """
        rng = np.random.default_rng(seed)
        given = {name: x if self.rows else x[None] for name, x in self._arrays.items()}
        return {name: _drawn(rng, x[np.arange(rows) % len(x)]) for name, x in given.items()}

    def structured(self, batch: Mapping[str, Any], convert: Callable[[Any, np.dtype], Any] = lambda x, _: x) -> Any:
        """Return a batch by name in the structure of the example, each array converted by (array, dtype)."""
        values = (batch[name] if self.rows else batch[name][0] for name in self._arrays)
        dtypes = (x.dtype for x in self._arrays.values())
        return jax.tree.unflatten(self._structure, list(map(convert, values, dtypes)))

    def in_jax(self, batch: Mapping[str, Any]) -> Any:
        """Return a batch of the harness, whose integers are int32, in the structure and the dtypes of the example."""

        def convert(x: Any, dtype: np.dtype) -> Any:
            return x if jnp.issubdtype(dtype, np.floating) else x.astype(jax.dtypes.canonicalize_dtype(dtype))

        return self.structured(batch, convert)


def _drawn(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    """Return random values like those of an array."""
    if jnp.issubdtype(x.dtype, np.floating):
        return _floats(rng, x.astype(np.float32))
    low, high = (0, 0) if not x.size else (int(x.min()), int(x.max()))
    if x.dtype == bool or (low, high) == (0, 1):
        drawn = rng.permutation(x)
    else:
        drawn = np.where(x < 0, x, rng.integers(max(low, 0), max(high, 0) + 1, x.shape))
    # The dtype of integers in PyTorch, which JAX has not by default.
    return drawn.astype(np.int64 if x.dtype in (np.int32, np.uint32) else x.dtype)


def _floats(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    low, high = (float(x.min()), float(x.max())) if x.size else (0.0, 0.0)
    if low == high:
        drawn = rng.standard_normal(x.shape)
    elif low >= 0:
        drawn = rng.uniform(low, high, x.shape)
    else:
        drawn = rng.normal(x.mean(), x.std(), x.shape)
    return drawn.astype(np.float32)
