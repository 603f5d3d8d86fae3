"""What a run starts from: params and model_state, created by a function or read from files."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax


class Initial(NamedTuple):
    """What a model starts from.

    Attributes:
      params: Trained parameters, a pytree of floating arrays.
      model_state: What the loss updates besides, such as the running statistics of BatchNorm. With a model_state the
        loss takes and returns it.
    """

    params: Any
    model_state: Any = None


def read_initial(create: Callable[[], Initial], load: Callable[[Any], Any], like: Initial) -> Initial:
    """Read parameters from files and create the others, each directly in its shards.

    Args:
      create: Creates all, with any values in the places of those that `load` reads.
      load: Reads parameters; `Task.load`.
      like: Shapes, dtypes and shardings, with None for what is not wanted.

    Returns:
      Arrays as `like`, with None for None.
    """
    params = load(like.params)
    created = Initial(_without(params, like.params), like.model_state)
    if not jax.tree.leaves(created):
        return Initial(_joined(params, created.params))
    shardings = jax.tree.map(lambda x: x.sharding, created)
    is_sharded = len(jax.tree.leaves(shardings)) == len(jax.tree.leaves(created))
    # What is not wanted of the result is not computed.
    rest: Initial = jax.jit(lambda: _as(created, create()), out_shardings=shardings if is_sharded else None)()
    return Initial(_joined(params, rest.params), rest.model_state)


def _is_none(x: Any) -> bool:
    return x is None


def _without(params: Any, like: Any) -> Any:
    """Return the shapes of what `params` has None for, which may stand for a subtree."""
    return jax.tree.map(
        lambda x, like: like if x is None else jax.tree.map(lambda _: None, like), params, like, is_leaf=_is_none
    )


def _as(like: Any, made: Any) -> Any:
    return jax.tree.map(lambda like, x: None if like is None else x.astype(like.dtype), like, made, is_leaf=_is_none)


def _joined(params: Any, rest: Any) -> Any:
    return jax.tree.map(lambda x, rest: rest if x is None else x, params, rest, is_leaf=_is_none)
