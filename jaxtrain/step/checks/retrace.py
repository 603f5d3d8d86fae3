"""A limit on recompilation: a jitted function that is traced again reports which argument changed."""

import re
from collections.abc import Callable
from typing import Any

import jax

from jaxtrain.errors import UserError, warn_user
from jaxtrain.paths import path_name


def limit_recompilation(fn: Callable[..., Any], names: tuple[str, ...], allowed: int | None) -> Callable[..., Any]:
    """Limit how many kinds of arguments a function may be traced for. To be jitted.

    Args:
      fn: The function.
      names: Names of its arguments.
      allowed: Number of kinds allowed after the first; None allows any number, and warns of a shorter batch.

    Returns:
      `fn`, which raises `UserError` when it is traced for one kind of shapes and dtypes too many.

    Example:
      >>> import jax.numpy as jnp
      >>> double = jax.jit(limit_recompilation(lambda batch: 2 * batch, ("batch",), allowed=0))
      >>> double(jnp.ones(3)).shape, double(jnp.zeros(3)).shape
      ((3,), (3,))
      >>> try:
      ...     double(jnp.ones(4))
      ... except UserError as error:
      ...     print(error)
      recompilation: batch is float32[4], was float32[3]; use one shape and dtype, or allow_recompile 1
    """
    history: list[dict[str, str]] = []
    warned = False

    def limited(*args: Any) -> Any:
        nonlocal warned
        kinds = _kinds(names, args)
        if kinds not in history:
            if allowed is None:
                if history and not warned and (shorter := _shorter(history[0], kinds)):
                    warned = True
                    warn_user(
                        f"the step is compiled again for a shorter batch: {shorter}. Drop the last batch of an epoch "
                        "or pad it with rows of weight 0; allow_recompile=1 allows it without this warning"
                    )
            elif len(history) > allowed:
                raise UserError(
                    f"recompilation: {_change(history[-1], kinds)}; use one shape and dtype, "
                    f"or allow_recompile {len(history)}"
                )
            history.append(kinds)
        return fn(*args)

    return limited


def _kinds(names: tuple[str, ...], args: tuple[Any, ...]) -> dict[str, str]:
    """Return the shape and dtype of every leaf by its path."""
    return {
        "/".join(filter(None, (name, path_name(path)))): str(jax.typeof(leaf))
        for name, arg in zip(names, args, strict=True)
        for path, leaf in jax.tree_util.tree_leaves_with_path(arg)
    }


def _shorter(before: dict[str, str], now: dict[str, str]) -> str | None:
    """Return the change from `before` to `now` if it is only that arrays have fewer rows, in the same proportion."""
    changed = [name for name in now if now[name] != before.get(name)]
    rows = set()
    for name in changed:
        old, new = (re.fullmatch(r"(\w+\[)(\d+)(.*)", kinds.get(name, "")) for kinds in (before, now))
        if old is None or new is None or (old[1], old[3]) != (new[1], new[3]):
            return None
        rows.add((int(old[2]), int(new[2])))
    is_shorter = len(rows) == 1 and before.keys() == now.keys() and all(new < old for old, new in rows)
    return _change(before, now) if is_shorter else None


def _change(before: dict[str, str], now: dict[str, str]) -> str:
    for name, kind in now.items():
        if kind != before.get(name):
            return f"{name} is {kind}, was {before.get(name, 'absent')}"
    removed = next(name for name in before if name not in now)
    return f"{removed} is absent, was {before[removed]}"
