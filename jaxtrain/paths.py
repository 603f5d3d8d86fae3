"""Paths of parameters, and parameters that are not trained.

No gradient is computed for a frozen parameter and no optimizer stores state for it. PyTorch has `requires_grad=False`;
here a predicate on paths splits the parameters into two trees of the same structure, each with None in the other's
places.
"""

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import UserError

Frozen = Callable[[str], bool]
"""Predicate on a parameter's path ("blocks/qkv/kernel"): whether it is not trained."""


def none_frozen(path: str) -> bool:
    """Return False: every parameter is trained."""
    del path
    return False


@dataclass(frozen=True)
class Matching:
    """Predicate on paths: whether one of several shell patterns matches; `*` also matches "/".

    Attributes:
      patterns: The patterns, such as "blocks/*/bias".

    Example:
      >>> frozen = Matching.of("wte*, blocks/*/bias")
      >>> [frozen(path) for path in ("wte/embedding", "blocks/qkv/bias", "blocks/qkv/kernel")]
      [True, True, False]
    """

    patterns: tuple[str, ...]

    @classmethod
    def of(cls, patterns: str) -> "Matching":
        """Return the predicate of patterns separated by commas."""
        return cls(tuple(pattern.strip() for pattern in patterns.split(",")))

    def __call__(self, path: str) -> bool:
        """Return whether a pattern matches the path."""
        return any(fnmatchcase(path, pattern) for pattern in self.patterns)


def path_name(path: Any) -> str:
    """Format a leaf's path in a pytree, as "blocks/qkv/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def require_distinct_names(tree: Any, what: str, *, in_files: bool = False) -> None:
    """Raise `UserError` for two leaves with one name, such as {"a/b": x, "a": {"b": y}}.

    Args:
      tree: A pytree.
      what: What it is, for the message.
      in_files: Whether the names are those in files, which join the parts of a path by "." and may normalize Unicode.

    >>> require_distinct_names({"a.b": 1.0, "a": {"b": 2.0}}, "the state")
    >>> require_distinct_names({"a.b": 1.0, "a": {"b": 2.0}}, "the state", in_files=True)
    Traceback (most recent call last):
    jaxtrain.errors.UserError: the state has two arrays of one name, ['a']['b'] and ['a.b']: rename a key of one of them
    """
    found: dict[str, Any] = {}
    for path, _ in jax.tree_util.tree_leaves_with_path(tree):
        name = path_name(path)
        if in_files:
            name = unicodedata.normalize("NFC", name).replace("/", ".")
        if found.setdefault(name, path) != path:
            pair = " and ".join(map(jax.tree_util.keystr, (found[name], path)))
            raise UserError(f"{what} has two arrays of one name, {pair}: rename a key of one of them")


def partition(params: Any, frozen: Frozen) -> tuple[Any, Any]:
    """Split parameters into (trained, frozen) leaves.

    Leaves that are not floating-point are frozen in any case: they have no gradient.

    >>> partition({"head": 1.0, "body": 2.0}, lambda path: path == "body")
    ({'body': None, 'head': 1.0}, {'body': 2.0, 'head': None})
    """

    def is_frozen(path: Any, leaf: Any) -> bool:
        trainable = jnp.issubdtype(jnp.result_type(leaf), np.inexact)
        return not trainable or frozen(path_name(path))

    mask = jax.tree_util.tree_map_with_path(is_frozen, params)
    trained = jax.tree.map(lambda frozen, leaf: None if frozen else leaf, mask, params)
    return trained, jax.tree.map(lambda frozen, leaf: leaf if frozen else None, mask, params)


def merge(trained: Any, frozen: Any) -> Any:
    """Join the two trees of `partition`."""
    return jax.tree.map(lambda a, b: b if a is None else a, trained, frozen, is_leaf=lambda x: x is None)
