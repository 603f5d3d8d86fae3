"""Compare two states bit for bit."""

from typing import Any

import jax
import numpy as np


def on_host(tree: Any) -> dict[str, bytes]:
    """Return the bytes of every leaf by its path, as copies, so that the state can be donated.

    >>> on_host({"w": np.zeros(2, np.float16)})
    {"['w']": b'\\x00\\x00\\x00\\x00'}
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): np.array(_numbers(x)).tobytes() for path, x in leaves}


def unlike(a: dict[str, bytes], b: dict[str, bytes]) -> list[str]:
    """Return the leaves that differ.

    >>> unlike(on_host({"w": np.zeros(1), "b": np.ones(1)}), on_host({"w": -np.zeros(1), "b": np.ones(1)}))
    ["['w']"]
    """
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


def describe_difference(names: list[str], of: dict[str, bytes]) -> str:
    """Describe how many of the leaves differ, and the first of them."""
    return f"{len(names)} of {len(of)} arrays differ, {names[0]} first" if names else f"all {len(of)} arrays bit-equal"


def _numbers(x: Any) -> Any:
    return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
