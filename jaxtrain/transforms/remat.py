"""Rematerialisation: named policies over `jax.checkpoint`, applied from outside the model.

A model marks its repeated parts with `block`; marking costs nothing. `remat(fn, policy)` then checkpoints every
marked block of `fn`, inside scans too, or the whole of `fn` where none is marked. Only memory and time change; a
policy that would not even change these is refused.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun

from jaxtrain.errors import UserError
from jaxtrain.transforms import jaxpr

BLOCK = "remat_block"


def products(primitive: Any, *args: Any, **params: Any) -> bool:
    """JAX's `dots_saveable`, which holds convolutions too, and `ragged_dot`, which it passes over.

    The compute-intensive operations of PyTorch's selective checkpointing (`torch/_functorch/partitioners.py`).
    """
    saveable: bool = jax.checkpoint_policies.dots_saveable(primitive, *args, **params)
    return saveable or primitive.name == "ragged_dot_general"


POLICIES: dict[str, Callable[..., Any]] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": products,
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
"""What a checkpointed block keeps for its backward pass: nothing; its matrix products and convolutions; its matrix
products without batch axes (so a linear layer's, but not attention's). "none" checkpoints nothing. "names:a,b" keeps
what the model called a and b with `jax.ad_checkpoint.checkpoint_name`; "offload:a,b" keeps it in the host's memory."""


def block(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a pure function of arrays as a unit of rematerialisation."""
    return jaxpr.named_jit(BLOCK, fn)


def remat(fn: Callable[..., Any], policy: str) -> Callable[..., Any]:
    """`fn` with its marked blocks checkpointed under `policy`; as a whole where it has none.

    Raises `UserError` for a policy that is unknown; and, once `fn` is traced, for one under which its blocks, taken
    together, would keep nothing of what it says, or keep it where it is.

    >>> import jax.numpy as jnp
    >>> def two_layers(x):
    ...     return block(jnp.sin)(block(jnp.sin)(x))
    >>> text = str(jax.make_jaxpr(remat(two_layers, "full"))(1.0))
    >>> text.count("policy=")
    2
    >>> from jax.ad_checkpoint import checkpoint_name
    >>> def with_a_name(x):
    ...     return jnp.sin(checkpoint_name(jnp.sin(x), "inner"))
    >>> [str(jax.make_jaxpr(jax.grad(remat(with_a_name, p)))(1.0)).count("sin ") for p in ("full", "names:inner")]
    [3, 2]
    """
    if policy == "none":
        return fn
    save, names = _parsed(policy)

    def rule(eqn: JaxprEqn, args: list[Any], run: jaxpr.Run) -> Sequence[Any] | None:
        if not jaxpr.is_call(eqn, BLOCK):
            return None
        body = eqn.params["jaxpr"]
        return jax.checkpoint(lambda *a: run(body.jaxpr, body.consts, a), policy=save)(*args)

    def rematerialised(closed: ClosedJaxpr, leaves: list[Any]) -> list[Any]:
        blocks = list(_blocks(closed.jaxpr))
        checkpointed = [inner for part in blocks or [closed.jaxpr] for inner in _nested(part)]
        if not any(map(_is_opaque, checkpointed)):
            _refuse_absent(policy, names, checkpointed)
            _refuse_idle(policy, save, checkpointed)
        if policy.startswith("offload:"):
            _refuse_unmoved(policy, names, jax.local_devices()[0])
        if blocks:
            return jaxpr.interpret(closed.jaxpr, closed.consts, leaves, rule)
        return list(jax.checkpoint(jaxpr_as_fun(closed), policy=save)(*leaves))

    return jaxpr.retrace(fn, rematerialised)


def _parsed(policy: str) -> tuple[Callable[..., Any], list[str]]:
    """JAX's policy, and the names listed in ours."""
    if policy in POLICIES:
        return POLICIES[policy], []
    kind, colon, listed = policy.partition(":")
    if not colon or kind not in ("names", "offload"):
        raise UserError(
            f"remat {policy!r} is unknown: choose one of none, {', '.join(POLICIES)}, names:a,b, offload:a,b"
        )
    names = [name.strip() for name in listed.split(",")]
    if not all(names):
        raise UserError(f"remat {policy!r} has an empty name: list what checkpoint_name gave, as in {kind}:a,b")
    if kind == "names":
        return jax.checkpoint_policies.save_only_these_names(*names), names
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=names,
        offload_src="device",
        offload_dst="pinned_host",
    ), names


def _refuse_absent(policy: str, names: list[str], checkpointed: list[Jaxpr]) -> None:
    """JAX passes over a name that nothing carries without a word."""
    carried = {name for part in checkpointed for name in _names(part)}
    if absent := sorted({*names} - carried):
        raise UserError(
            f"remat {policy!r}: no checkpointed block uses a value named {', '.join(absent)} (named there: "
            f"{', '.join(sorted(carried)) or 'none'}): name it, h = checkpoint_name(h, {absent[0]!r})"
        )


def _names(traced: Jaxpr) -> Iterator[str]:
    used = {id(v) for v in [*traced.outvars, *(v for eqn in traced.eqns for v in eqn.invars)]}
    for eqn in traced.eqns:
        # `checkpoint_name(h, "h")` with h used afterwards, and not what that returned, names nothing.
        if eqn.primitive.name == "name" and id(eqn.outvars[0]) in used:
            yield eqn.params["name"]


def _refuse_idle(policy: str, save: Callable[..., Any], checkpointed: list[Jaxpr]) -> None:
    equations = (eqn for part in checkpointed for eqn in part.eqns)
    saved = (save(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params) for eqn in equations)
    if policy != "full" and not any(saved):
        raise UserError(f"remat {policy!r} saves nothing: no checkpointed block has such a product; use full")


def _refuse_unmoved(policy: str, names: list[str], device: Any) -> None:
    """On the CPU JAX offers a "pinned_host" memory, compiles the move, and moves nothing."""
    remedy = f"use names:{','.join(names)}"
    if device.platform == "cpu" or device.default_memory().kind == "pinned_host":
        raise UserError(f"remat {policy!r} moves nothing: the memory of {device} is the host's already; {remedy}")
    if "pinned_host" not in {memory.kind for memory in device.addressable_memories()}:
        raise UserError(f"remat {policy!r} has nowhere to move to: {device} has no pinned_host memory; {remedy}")


def _is_opaque(traced: Jaxpr) -> bool:
    """Whether differentiating brings out equations that nobody sees before: a custom_vjp's forward rule."""
    return any(eqn.primitive.name == "custom_vjp_call" for eqn in traced.eqns)


def _blocks(traced: Jaxpr) -> Iterator[Jaxpr]:
    """The bodies of the outermost marked blocks."""
    for eqn in traced.eqns:
        for inner in jaxpr.inner_jaxprs(eqn):
            yield from [inner] if jaxpr.is_call(eqn, BLOCK) else _blocks(inner)


def _nested(traced: Jaxpr) -> Iterator[Jaxpr]:
    """`traced` and every jaxpr inside it."""
    yield traced
    for eqn in traced.eqns:
        for inner in jaxpr.inner_jaxprs(eqn):
            yield from _nested(inner)
