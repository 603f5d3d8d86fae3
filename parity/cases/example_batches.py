"""Random batches like an example, and the way from a batch by name to the example's structure."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import UserError
from parity.case import Batch

if TYPE_CHECKING:
    import torch


class Example:
    """An example batch, whose structure and values random batches follow.

    Numbers, flags, strings and None in it are constants, which batches by name leave out.

    Attributes:
      rows: Rows of the example; None if its arrays have no common first axis.
    """

    def __init__(self, example: Any) -> None:
        self._example = example
        self._given = dict(_leaves(example, ""))
        self._arrays = {name: _values(x) for name, x in self._given.items()}
        for name, x in self._arrays.items():
            if np.iscomplexobj(x):
                raise UserError(f"the example's {name!r} is complex: pass batch, torch_loss and loss_fn to model.case")
        firsts = {x.shape[:1] for x in self._arrays.values()}
        first = firsts.pop() if len(firsts) == 1 else ()
        self.rows: int | None = first[0] if first else None

    @property
    def names(self) -> frozenset[str]:
        """The names of the arrays."""
        return frozenset(self._arrays)

    def batch(self, seed: int, rows: int, *, same_integers: bool = False) -> Batch:
        """Return a batch by name, with the rows on the first axis; the whole batch is one row if it has none.

        Masks (bool, or the integers 0 and 1) have rows of the example in random order. Other integers are drawn from
        its range, but negative ones, such as labels to ignore, stay in their place. Floats are standard normal if the
        example is constant, uniform over its range if it has no negative value, else normal with its mean and
        deviation.

        Args:
          seed: Seed of the random numbers.
          rows: Number of rows.
          same_integers: Whether masks and integers are those of the example.
        """
        rng = np.random.default_rng(seed)
        given = {name: x if self.rows else x[None] for name, x in self._arrays.items()}
        repeated = {name: x[np.arange(rows) % len(x)] for name, x in given.items()}
        draw = _drawn_floats if same_integers else _drawn
        return {name: draw(rng, x) for name, x in repeated.items()}

    def in_torch(self, batch: Mapping[str, "torch.Tensor"]) -> Any:
        """Return a batch in the structure and the dtypes of the example, as its user calls the module.

        Floats keep the precision of the run, but where the example has float64.
        """
        return self._structured(batch, _in_dtype_of)

    def in_jax(self, batch: Mapping[str, Any]) -> Any:
        """Return a batch of the harness, whose integers are int32, in the structure and the dtypes of the example."""

        def converted(x: Any, given: Any) -> Any:
            dtype = _values(given).dtype
            return x if jnp.issubdtype(dtype, np.floating) else x.astype(jax.dtypes.canonicalize_dtype(dtype))

        return self._structured(batch, converted)

    def _structured(self, batch: Mapping[str, Any], convert: Callable[[Any, Any], Any]) -> Any:
        """Return a batch by name in the structure of the example, each array converted by (array, example's)."""

        def filled(name: str, given: Any) -> Any:
            return convert(batch[name] if self.rows else batch[name][0], given)

        return _filled(self._example, "", filled)


def _parts(value: Any) -> "Mapping[Any, Any] | None":
    """Return the parts of a container by key; None for any other value."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, tuple | list):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def _path(path: str, key: Any) -> str:
    return f"{path}/{key}".removeprefix("/")


def _is_constant(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, complex, str)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    parts = _parts(value)
    if parts is None:
        if not _is_constant(value):
            yield path or "input", value
        return
    for key, part in parts.items():
        yield from _leaves(part, _path(path, key))


def _filled(value: Any, path: str, filled: Callable[[str, Any], Any]) -> Any:
    """Return a structure with other arrays, in containers of the same classes and in the same order."""
    parts = _parts(value)
    if parts is None:
        return value if _is_constant(value) else filled(path or "input", value)
    new = {key: _filled(part, _path(path, key), filled) for key, part in parts.items()}
    if type(value) is dict:
        return new
    if isinstance(value, tuple | list):
        items = list(new.values())
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if not isinstance(value, Mapping):
        return dataclasses.replace(value, **new)
    same = copy.copy(value)
    for key, part in new.items():
        same[key] = part  # type: ignore[index]  # a mapping of a user is mutable, or cannot be filled
    return same


def _values(x: Any) -> np.ndarray:
    """Return the values of a tensor or an array."""
    if not _is_tensor(x):
        return np.asarray(x)
    x = x.detach().cpu()
    # NumPy has no bfloat16.
    found: np.ndarray = (x.float() if x.is_floating_point() and x.itemsize == 2 else x).numpy()
    return found


def _is_tensor(x: Any) -> bool:
    return hasattr(x, "detach")


def _in_dtype_of(x: "torch.Tensor", given: Any) -> "torch.Tensor":
    """Return a tensor of a run in the dtype of the example's, if that is a tensor."""
    import torch

    if not _is_tensor(given) or (given.is_floating_point() and given.dtype != torch.float64):
        return x
    return x if given.is_floating_point() and x.dtype != torch.float32 else x.to(given.dtype)


def _drawn_floats(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    """Return random values like those of an array of floats, and integers as they are."""
    return _drawn(rng, x) if jnp.issubdtype(x.dtype, np.floating) else _in_torchs_width(x)


def _drawn(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    """Return random values like those of an array."""
    if jnp.issubdtype(x.dtype, np.floating):
        return _floats(rng, x.astype(np.float32))
    low, high = (0, 0) if not x.size else (int(x.min()), int(x.max()))
    if x.dtype == bool or (low, high) == (0, 1):
        drawn = rng.permutation(x)
    else:
        drawn = np.where(x < 0, x, rng.integers(max(low, 0), max(high, 0) + 1, x.shape))
    return _in_torchs_width(drawn.astype(x.dtype))


def _in_torchs_width(x: np.ndarray) -> np.ndarray:
    """Return integers in PyTorch's dtype, which JAX has not by default."""
    return x.astype(np.int64 if x.dtype in (np.int32, np.uint32) else x.dtype)


def _floats(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    low, high = (float(x.min()), float(x.max())) if x.size else (0.0, 0.0)
    if low == high:
        drawn = rng.standard_normal(x.shape)
    elif low >= 0:
        drawn = rng.uniform(low, high, x.shape)
    else:
        drawn = rng.normal(x.mean(), x.std(), x.shape)
    return drawn.astype(np.float32)
