"""Rematerialization: named policies over `jax.checkpoint`, applied from outside the model.

A model marks its repeated parts with `block`, which costs nothing. `remat(fn, policy)` checkpoints every marked block
of `fn`, also inside scans, or all of `fn` if none is marked. Only memory and time change; a policy that would change
neither is an error.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun

from jaxtrain.errors import UserError
from jaxtrain.passes.fp8.fp8_product import NAME as FP8_PRODUCT
from jaxtrain.passes.fp8.scaled_product import NAME as SCALED_PRODUCT
from jaxtrain.passes.fp8.scales import SCALE
from jaxtrain.passes.numerics.biased_product import NAME as BIASED_PRODUCT
from jaxtrain.passes.numerics.recompute import RECOMPUTED
from jaxtrain.program import equations, rewrite
from jaxtrain.program import operations as op
from jaxtrain.program.platform import is_gpu

BLOCK = "remat_block"
FUSED = "fused_attention"
_WITH_PARAMETERS = (BIASED_PRODUCT, FP8_PRODUCT, SCALED_PRODUCT)
"""Products of a linear layer, beside those that JAX knows."""


def products(primitive: Any, *args: Any, **params: Any) -> bool:
    """Save what JAX's `dots_saveable` saves, convolutions included, and the products that it does not cover.

    Those are `ragged_dot` and fused attention, its output with the statistics of its softmax. Together they are the
    compute-intensive operations of PyTorch's selective checkpointing (`torch/_functorch/partitioners.py`).
    """
    saveable: bool = jax.checkpoint_policies.dots_saveable(primitive, *args, **params)
    listed = primitive.name in (op.RAGGED_DOT_GENERAL, FUSED, *_WITH_PARAMETERS)
    return saveable or listed or names_costly(primitive, params) or _is_inside(products, params)


def names_costly(primitive: Any, params: Mapping[str, Any]) -> bool:
    """Return whether an operation names a result that is costly though the operations that it is computed by are not.

    A result of attention on a ring of devices (`distributed.ring`), or a scale, which needs a pass over all that it
    scales.
    """
    return primitive.name == op.NAME and params["name"] in (FUSED, SCALE)


def products_without_batch(primitive: Any, *args: Any, **params: Any) -> bool:
    """Save what JAX's `dots_with_no_batch_dims_saveable` saves, and products with their biases."""
    saveable: bool = jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *args, **params)
    return saveable or primitive.name in _WITH_PARAMETERS or _is_inside(products_without_batch, params)


def _is_inside(save: Callable[..., bool], params: Mapping[str, Any]) -> bool:
    """Return whether a policy saves what a custom_jvp computes, such as a product with its own derivative."""
    computed = params.get("call_jaxpr") if "jvp_jaxpr_fun" in params else None
    return computed is not None and any(equations.saves(save, eqn) for eqn in equations.of(computed))


POLICIES: dict[str, Callable[..., Any]] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": products,
    "dots_no_batch": products_without_batch,
}
"""What a checkpointed block saves for its backward pass: nothing; its matrix products and convolutions; its matrix
products without batch axes (a linear layer's, but not attention's). "none" disables checkpointing. "names:a,b" saves
the values named a and b by `jax.ad_checkpoint.checkpoint_name`; "offload:a,b" saves them in host memory."""


def block(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a pure function of arrays as a unit of rematerialization.

    Args:
      fn: A pure function of arrays, such as a layer.

    Returns:
      The same function, which `remat`, `unroll` and meshes recognize.
    """

    def remat_block(*args: Any) -> Any:
        return fn(*args)

    return jax.jit(remat_block)


def remat(fn: Callable[..., Any], policy: str, platform: str | None = None) -> Callable[..., Any]:
    """Checkpoint the marked blocks of a function, or all of it if it has none.

    Args:
      fn: A function of arrays.
      policy: "none", "full", "dots", "dots_no_batch", "names:a,b" or "offload:a,b" (`POLICIES`).
      platform: The platform that it is compiled for; None for that of the default backend.

    Returns:
      The same function, whose backward pass recomputes what the policy does not save.

    Raises:
      UserError: The policy is unknown; or, when `fn` is traced, its blocks have none of the values that the policy
        saves, or the values to offload are in host memory already.

    Example:
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
    save, names = _parse(policy)

    def checkpoint_blocks(eqn: JaxprEqn, args: list[Any], run: rewrite.Run, prevent_cse: bool) -> Sequence[Any] | None:
        if not equations.is_call(eqn, BLOCK):
            return None
        body = equations.body(eqn)
        inner = partial(run, body.jaxpr, body.consts)
        return jax.checkpoint(lambda *a: inner(a), policy=save, prevent_cse=prevent_cse)(*args)

    def in_scan(body: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        # The two loops of a scan share no computation that XLA could merge. Without a barrier, a kernel for a GPU reads
        # its slice of the saved arrays, which need not be copied first.
        prevent_cse = not is_gpu(platform)
        return rewrite.interpret(body, consts, args, partial(checkpoint_blocks, prevent_cse=prevent_cse))

    def rule(eqn: JaxprEqn, args: list[Any], run: rewrite.Run) -> Sequence[Any] | None:
        if op.of(eqn) == op.SCAN:
            return rewrite.HIGHER_ORDER[op.SCAN](eqn, args, in_scan)
        return checkpoint_blocks(eqn, args, run, prevent_cse=True)

    def evaluate_checkpointed(closed: ClosedJaxpr, leaves: list[Any]) -> list[Any]:
        blocks = list(_blocks(closed.jaxpr))
        checkpointed = [inner for part in blocks or [closed.jaxpr] for inner in equations.nested(part)]
        if not any(map(_is_opaque, checkpointed)):
            _refuse_absent(policy, names, checkpointed)
            _refuse_idle(policy, save, checkpointed)
        if policy.startswith("offload:"):
            _refuse_offload(policy, names, jax.local_devices()[0])
        if blocks:
            return rewrite.interpret(closed.jaxpr, closed.consts, leaves, rule)
        return list(jax.checkpoint(jaxpr_as_fun(closed), policy=save)(*leaves))

    return rewrite.retrace(fn, evaluate_checkpointed)


def _parse(policy: str) -> tuple[Callable[..., Any], list[str]]:
    """Return JAX's policy, and the names listed in ours."""
    if policy in POLICIES:
        return POLICIES[policy], []
    kind, colon, listed = policy.partition(":")
    if not colon or kind not in ("names", "offload"):
        raise UserError(
            f"remat {policy!r} is unknown: choose one of none, {', '.join(POLICIES)}, names:a,b, offload:a,b"
        )
    names = [name.strip() for name in listed.split(",")]
    if not all(names):
        raise UserError(f"remat {policy!r} has an empty name: list the names of checkpoint_name, as in {kind}:a,b")
    if kind == "names":
        return jax.checkpoint_policies.save_only_these_names(*names), names
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=names,
        offload_src="device",
        offload_dst="pinned_host",
    ), names


def _refuse_absent(policy: str, names: list[str], checkpointed: list[Jaxpr]) -> None:
    """Raise for a name that no value has, which JAX ignores silently."""
    available = {name for part in checkpointed for name in _names(part)}
    if absent := sorted({*names} - available):
        raise UserError(
            f"remat {policy!r}: no checkpointed block uses a value named {', '.join(absent)} (named there: "
            f"{', '.join(sorted(available)) or 'none'}): name it, h = checkpoint_name(h, {absent[0]!r})"
        )


def _names(traced: Jaxpr) -> Iterator[str]:
    used = {*equations.reads(traced)}
    for eqn in equations.of(traced):
        # `checkpoint_name(h, "h")` has no effect if h, and not its result, is used afterwards.
        if op.of(eqn) == op.NAME and eqn.outvars[0] in used:
            yield equations.label(eqn)


def _refuse_idle(policy: str, save: Callable[..., Any], checkpointed: list[Jaxpr]) -> None:
    every = (eqn for part in checkpointed for eqn in equations.of(part))
    if policy != "full" and not any(equations.saves(save, eqn) for eqn in every):
        raise UserError(f"remat {policy!r} saves nothing: no checkpointed block has such a product; use full")


def _refuse_offload(policy: str, names: list[str], device: Any) -> None:
    """Raise where offloading has no effect: on the CPU JAX accepts "pinned_host" and moves nothing."""
    remedy = f"use names:{','.join(names)}"
    if device.platform == "cpu" or device.default_memory().kind == "pinned_host":
        raise UserError(f"remat {policy!r} has no effect: the memory of {device} is host memory already; {remedy}")
    if "pinned_host" not in {memory.kind for memory in device.addressable_memories()}:
        raise UserError(f"remat {policy!r} is not supported: {device} has no pinned_host memory; {remedy}")


def _is_opaque(traced: Jaxpr) -> bool:
    """Return whether differentiation adds equations not visible before: a custom_vjp's forward rule."""
    return any(op.of(eqn) == op.CUSTOM_VJP_CALL and not _is_transparent(eqn) for eqn in equations.of(traced))


def _is_transparent(eqn: JaxprEqn) -> bool:
    """Return whether its forward rule has no other equations than the function: fused attention, or a norm's."""
    is_fused = [op.of(inner) for inner in equations.of(equations.body(eqn))] == [FUSED]
    return is_fused or equations.in_scope(eqn, RECOMPUTED)


def _blocks(traced: Jaxpr) -> Iterator[Jaxpr]:
    """Yield the bodies of the outermost marked blocks."""
    for eqn in equations.of(traced):
        for inner in equations.inner_jaxprs(eqn):
            yield from [inner] if equations.is_call(eqn, BLOCK) else _blocks(inner)
