"""Parameters that are not trained: no gradient is computed for them and no optimizer keeps anything about them.

PyTorch says it with `requires_grad=False`. Here a predicate on paths splits the parameters into two trees of one
shape, each with None in the other's places.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Frozen = Callable[[str], bool]
"""Whether the parameter of that path ("blocks/qkv/kernel") stays as it is."""


def nothing(path: str) -> bool:
    """Everything is trained."""
    del path
    return False


def path_name(path: Any) -> str:
    """A leaf's path in a tree as "blocks/qkv/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def partition(params: Any, frozen: Frozen) -> tuple[Any, Any]:
    """(trained, frozen) leaves. Leaves that are not floating are frozen in any case: they have no gradient.

    >>> partition({"head": 1.0, "body": 2.0}, lambda path: path == "body")
    ({'body': None, 'head': 1.0}, {'body': 2.0, 'head': None})
    """

    def keep(path: Any, leaf: Any) -> bool:
        trainable = jnp.issubdtype(jnp.result_type(leaf), np.inexact)
        return not trainable or frozen(path_name(path))

    kept = jax.tree_util.tree_map_with_path(keep, params)
    trained = jax.tree.map(lambda keep, leaf: None if keep else leaf, kept, params)
    return trained, jax.tree.map(lambda keep, leaf: leaf if keep else None, kept, params)


def merge(trained: Any, frozen: Any) -> Any:
    """The parameters that `partition` split."""
    return jax.tree.map(lambda a, b: b if a is None else a, trained, frozen, is_leaf=lambda x: x is None)
