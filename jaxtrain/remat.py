"""Rematerialisation: named policies over `jax.checkpoint`, applied from outside the model.

A model marks its repeated parts with `block`; marking costs nothing. `remat(fn, policy)` then checkpoints every
marked block of `fn`, inside scans too, or the whole of `fn` where none is marked. Only memory and time change.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun

from jaxtrain import jaxpr
from jaxtrain.errors import UserError

BLOCK = "remat_block"

POLICIES: dict[str, Callable[..., Any] | None] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
"""What a checkpointed block keeps for its backward pass: nothing; its matrix products; those without batch axes
(so a linear layer's, but not attention's). "none" checkpoints nothing."""


def block(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a pure function of arrays as a unit of rematerialisation."""

    def remat_block(*args: Any) -> Any:
        return fn(*args)

    return jax.jit(remat_block)


def remat(fn: Callable[..., Any], policy: str) -> Callable[..., Any]:
    """`fn` with its marked blocks checkpointed under `policy`; as a whole where it has none.

    >>> import jax.numpy as jnp
    >>> def two_layers(x):
    ...     return block(jnp.sin)(block(jnp.sin)(x))
    >>> text = str(jax.make_jaxpr(remat(two_layers, "full"))(1.0))
    >>> text.count("policy=")
    2
    """
    if policy == "none":
        return fn
    if policy not in POLICIES:
        raise UserError(f"remat {policy!r} is unknown: choose one of none, {', '.join(POLICIES)}")
    save = POLICIES[policy]

    def rule(eqn: JaxprEqn, args: list[Any], run: jaxpr.Run) -> Sequence[Any] | None:
        if not _is_block(eqn):
            return None
        body = eqn.params["jaxpr"]
        return jax.checkpoint(lambda *a: run(body.jaxpr, body.consts, a), policy=save)(*args)

    def rematerialised(closed: ClosedJaxpr, leaves: list[Any]) -> list[Any]:
        if _has_block(closed.jaxpr):
            return jaxpr.interpret(closed.jaxpr, closed.consts, leaves, rule)
        return list(jax.checkpoint(jaxpr_as_fun(closed), policy=save)(*leaves))

    return jaxpr.retraced(fn, rematerialised)


def _is_block(eqn: JaxprEqn) -> bool:
    return eqn.params.get("name") == BLOCK


def _has_block(traced: Jaxpr) -> bool:
    return any(_is_block(eqn) or any(map(_has_block, jaxpr.inner_jaxprs(eqn))) for eqn in traced.eqns)
