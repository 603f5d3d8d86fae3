"""The insertion order of dicts, which PyTorch's modules see and JAX's trees do not keep.

`jax.tree` sorts the keys of a dict, so that a batch inside `jax.jit` has lost their order: the one of the example batch
holds for all batches.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.tree_util import DictKey, SequenceKey, keystr, tree_leaves_with_path, tree_map_with_path

from jaxtrain.errors import UserError

Path = tuple[Any, ...]
Order = dict[Path, tuple[Any, ...]]
"""The keys of each dict in their order, by its path."""


def order_of(tree: Any, at: Path = ()) -> Order:
    """Return the order of the keys of all dicts in a tree.

    Items that a list has in another batch alone are ordered as its last.

    Raises:
      UserError: The keys of a dict are of types that JAX cannot sort.
    """
    found: Order = {}
    for path, value in _dicts_and_leaves(tree):
        path = (*at, *path)
        if isinstance(value, dict):
            check_keys(value, f"the example{keystr(path)}")
            found[path] = found[_of_any_item(path)] = tuple(value)
            for key, item in value.items():
                found |= order_of(item, (*path, DictKey(key)))
    return found


def in_order(tree: Any, order: Order, at: Path = ()) -> Any:
    """Return a tree whose dicts have their keys in an order.

    Raises:
      UserError: A dict has a key whose place is unknown.
    """

    def arranged(path: Path, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        path = (*at, *path)
        keys = tuple(value)
        if not isinstance(value, OrderedDict) and len(keys) > 1:
            known = order.get(path, order.get(_of_any_item(path), ()))
            if new := [key for key in keys if key not in known]:
                raise UserError(
                    f"the batch{keystr(path)} has the key {new[0]!r}, which the example batch has not: JAX sorts the "
                    "keys of dicts, so that its place is unknown; import the module with an example that has it"
                )
            keys = tuple(key for key in known if key in value)
        # An OrderedDict or a defaultdict stays one.
        result = value.copy()
        result.clear()
        result.update({key: in_order(value[key], order, (*path, DictKey(key))) for key in keys})
        return result

    return tree_map_with_path(arranged, tree, is_leaf=lambda x: isinstance(x, dict))


def check_keys(tree: Mapping[Any, Any], name: str) -> None:
    """Raise `UserError` for a dict whose keys JAX cannot sort."""
    try:
        sorted(tree)
    except TypeError:
        types = " and ".join(sorted({type(key).__name__ for key in tree}))
        raise UserError(
            f"{name} has keys of the types {types}, which JAX's trees cannot sort: use keys of one type"
        ) from None


def check_leaves(example: Any) -> None:
    """Raise `UserError` for a part of an example that is neither an array nor a container of JAX's trees."""
    for path, value in tree_leaves_with_path(example):
        if isinstance(value, bool | int | float | complex | np.generic) or hasattr(value, "dtype"):
            continue
        name, kind = f"the example{keystr(path)}", type(value).__name__
        if isinstance(value, str):
            raise UserError(f"{name} is the string {value!r}, not an array: pass it to the module with call=")
        if isinstance(value, Mapping):
            raise UserError(f"{name} is a {kind}, which JAX's trees take for an array: convert it by dict(…)")
        raise UserError(
            f"{name} is a {kind}, which is no container of JAX's trees: give a dict of its fields, and make it with "
            f"call=lambda module, batch: module({kind}(**batch))"
        )


def _dicts_and_leaves(tree: Any) -> list[tuple[Path, Any]]:
    """Return the outermost dicts of a tree, and its leaves outside of them, with their paths."""
    return tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, dict))


def _of_any_item(path: Path) -> Path:
    """Return a path with one place for all items of a list."""
    return tuple("item" if isinstance(key, SequenceKey) else key for key in path)
