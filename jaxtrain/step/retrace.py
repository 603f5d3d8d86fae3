"""A budget of recompilations: a jitted function that is traced again says which argument changed."""

from collections.abc import Callable
from typing import Any

import jax

from jaxtrain.errors import UserError
from jaxtrain.paths import path_name


def budgeted(fn: Callable[..., Any], names: tuple[str, ...], allowed: int | None) -> Callable[..., Any]:
    """`fn`, to be jitted, which raises `UserError` when it is traced for more than 1 + `allowed` kinds of arguments.

    `names` are its arguments'. None allows any number.

    >>> import jax.numpy as jnp
    >>> double = jax.jit(budgeted(lambda batch: 2 * batch, ("batch",), allowed=0))
    >>> double(jnp.ones(3)).shape, double(jnp.zeros(3)).shape
    ((3,), (3,))
    >>> try:
    ...     double(jnp.ones(4))
    ... except UserError as error:
    ...     print(error)
    compiling again: batch is float32[4], was float32[3]; give it one shape and dtype, or allow_recompile 1
    """
    if allowed is None:
        return fn
    seen: list[dict[str, str]] = []

    def traced(*args: Any) -> Any:
        kinds = _kinds(names, args)
        if kinds not in seen:
            if len(seen) > allowed:
                raise UserError(
                    f"compiling again: {_change(seen[-1], kinds)}; give it one shape and dtype, "
                    f"or allow_recompile {len(seen)}"
                )
            seen.append(kinds)
        return fn(*args)

    return traced


def _kinds(names: tuple[str, ...], args: tuple[Any, ...]) -> dict[str, str]:
    """Shape and dtype of every leaf, by where it is."""
    return {
        "/".join(filter(None, (name, path_name(path)))): str(jax.typeof(leaf))
        for name, arg in zip(names, args, strict=True)
        for path, leaf in jax.tree_util.tree_leaves_with_path(arg)
    }


def _change(before: dict[str, str], now: dict[str, str]) -> str:
    for name, kind in now.items():
        if kind != before.get(name):
            return f"{name} is {kind}, was {before.get(name, 'not there')}"
    gone = next(name for name in before if name not in now)
    return f"{gone} is gone, was {before[gone]}"
