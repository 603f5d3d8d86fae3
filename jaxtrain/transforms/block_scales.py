"""A scale of its own for the gradients inside each marked block.

The gradient that enters the backward pass of a block is multiplied by the block's scale over the one that it has, and
what leaves it is brought back: gradients of parameters and of other operands to the scale of the loss, the gradient of
another block's result to the scale of that block, without an intermediate value at the scale of the loss. Scales are
powers of two: wherever nothing overflows or underflows, every gradient is the same to the bit.

Each result of a block carries the scale that its gradient is to have, so that whatever uses it can convert. It also
carries a number whose cotangent says that a gradient was not finite before it was converted. The block in which an
overflow originates is thereby the one whose gradients are not finite although all that it was given were.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxtrain.errors import UserError
from jaxtrain.paths import Frozen, path_name
from jaxtrain.transforms import blocks, jaxpr
from jaxtrain.transforms.groups import LastPartial, Partial

_LAYOUT = frozenset(
    {"convert_element_type", "copy", "expand_dims", "name", "reshape", "sharding_constraint", "squeeze", "transpose"}
)


class BlockValues(NamedTuple):
    """What a pass reads and observes of each block.

    Attributes:
      scale: float32[blocks], what the gradients inside are multiplied by, over the scale of the loss.
      overflow: float32[blocks], observed: positive where an overflow has originated.
      inverse_rms: float32[blocks], observed: the largest reciprocal of the root mean square of a gradient that enters
        or leaves the block, other than a parameter's, at the scale of the loss; 0 if all are zero. None to observe
        neither this nor `largest`.
      largest: float32[blocks], observed: the largest magnitude of these gradients.
    """

    scale: jax.Array
    overflow: jax.Array
    inverse_rms: jax.Array | None = None
    largest: jax.Array | None = None


def scale_blocks(
    compute: Callable[..., Any], scales: BlockValues, probes: BlockValues, frozen: Frozen
) -> Callable[..., Any]:
    """Let the gradients inside each marked block of a computation have a scale of their own.

    Args:
      compute: A function of (params, …), of which only the parameters are differentiated.
      scales: Its scales; only `scale` is read, powers of two.
      probes: Zeros, whose gradient is what is observed.
      frozen: Predicate on the paths of parameters that are not differentiated.

    Returns:
      The same function, with the same gradients by parameters. When traced it raises `UserError` if it has another
      number of blocks than there are scales.

    Example:
      >>> from jaxtrain import block
      >>> def compute(w, x):
      ...     return block(jnp.multiply)(w, x.astype(np.float16)).astype(np.float32)
      >>> w, x = jnp.float16(1), jnp.float32(2.0**-12)
      >>> scales = BlockValues(jnp.array([2.0**12]), jnp.zeros(1))
      >>> def scaled(w, probes):
      ...     return scale_blocks(compute, scales, probes, frozen=lambda path: False)(w, x)
      >>> gradient, observed = jax.grad(scaled, (0, 1))(w, jax.tree.map(jnp.zeros_like, scales))
      >>> float(gradient) == 2.0**-12, observed.overflow
      (True, Array([0.], dtype=float32))
    """

    def visit(eqn: JaxprEqn, args: list[Any], own: Any, run: blocks.Run) -> Sequence[Any]:
        if not any(map(_is_differentiated, args)):
            return blocks.enter(eqn, args, own, run)
        if blocks.is_block(eqn):
            return _evaluate_block(eqn, args, *blocks.of_one(own))
        if own is None:
            return _evaluate_outside(eqn, args)
        if eqn.primitive.name == "scan":
            return _evaluate_scan(eqn, args, own, run)
        if any(isinstance(x, jax.sharding.Sharding) for x in eqn.params.get("in_shardings", ())):
            args = [_Outside(_at_loss_scale(x)) if _is_differentiated(x) else x for x in args]
        return blocks.enter(eqn, args, own, run)

    def computed(params: Any, *rest: Any) -> Any:
        trained = _trained(params, frozen)

        def evaluate(closed: ClosedJaxpr, leaves: list[Any]) -> list[Any]:
            _require_blocks(scales.scale.shape[0], blocks.count(closed.jaxpr))
            values = [_Parameter(x) if i in trained and _is_floating(x) else x for i, x in enumerate(leaves)]
            outs = blocks.evaluate(closed, values, (scales.scale, probes), visit)
            return [_at_loss_scale(x) for x in outs]

        return jaxpr.retrace(compute, evaluate)(params, *rest)

    return computed


def _require_blocks(given: int, found: int) -> None:
    if found == 0:
        raise UserError("per_layer_loss_scale: no layer of the program is marked: mark layers with jaxtrain.block")
    if given != found:
        raise UserError(f"per_layer_loss_scale has blocks={given}, but the program has {found}: use blocks={found}")


class _Parameter(NamedTuple):
    """A parameter, the gradient of which is at the scale of the loss."""

    value: jax.Array


class _Outside(NamedTuple):
    """A value computed outside of all blocks, the gradient of which is at the scale of the loss."""

    value: jax.Array


class _Inside(NamedTuple):
    """A result of a block.

    Attributes:
      value: The result.
      scale: float32[], what its gradient is multiplied by, over the scale of the loss.
      received: float32[], 0; its cotangent counts the gradients that were not finite before they had this scale.
    """

    value: jax.Array
    scale: jax.Array
    received: jax.Array


def _is_differentiated(x: Any) -> bool:
    return isinstance(x, _Parameter | _Outside | _Inside)


def _value(x: Any) -> Any:
    return x.value if _is_differentiated(x) else x


def _is_floating(x: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), np.floating))


def _trained(params: Any, frozen: Frozen) -> set[int]:
    """Return the positions, among the leaves of `params`, of those that are trained."""
    trained, position = set(), 0
    for path, x in jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda x: isinstance(x, Partial | LastPartial)):
        n = len(jax.tree.leaves(x))
        trained |= set() if frozen(path_name(path)) else {*range(position, position + n)}
        position += n
    return trained


def _evaluate_outside(eqn: JaxprEqn, args: list[Any]) -> list[Any]:
    """Evaluate an equation without blocks, some operands of which are differentiated."""
    if eqn.primitive.name in _LAYOUT and _is_floating(eqn.outvars[0].aval):
        return [args[0]._replace(value=jaxpr.bind(eqn, [args[0].value])[0])]
    outs = jaxpr.bind(eqn, [_at_loss_scale(x) for x in args])
    return [_Outside(x) if _is_floating(x) else x for x in outs]


def _evaluate_scan(eqn: JaxprEqn, args: list[Any], own: Any, run: blocks.Run) -> list[Any]:
    """Evaluate a scan over blocks: the carry of a step has the scale of the block that has computed it."""
    n_consts, n_carry = jaxpr.scan_sizes(eqn)
    consts, carry, xs = args[:n_consts], args[n_consts : n_consts + n_carry], args[n_consts + n_carry :]
    xs = [_Outside(_at_loss_scale(x)) if isinstance(x, _Inside) else x for x in xs]

    def run_step(body: Jaxpr, consts: Sequence[Any], step_args: Sequence[Any], own: Any) -> list[Any]:
        outs = run(body, consts, step_args, own)
        ys = [_Outside(_at_loss_scale(x)) if _is_differentiated(x) else x for x in outs[n_carry:]]
        return [*map(_as_inside, outs[:n_carry]), *ys]

    return list(blocks.enter(eqn, [*consts, *map(_as_inside, carry), *xs], own, run_step))


def _as_inside(x: Any) -> Any:
    """Return a value with its scale, so that those of all steps of a scan have the same structure."""
    value = _value(x)
    if isinstance(x, _Inside) or not _is_floating(value):
        return x
    return _Inside(value, jnp.ones([], np.float32), jnp.zeros([], np.float32))


def _evaluate_block(eqn: JaxprEqn, args: list[Any], scale: jax.Array, probe: BlockValues) -> list[Any]:
    """Evaluate a block between two functions with custom derivatives."""
    given = [i for i, x in enumerate(args) if _is_differentiated(x)]
    operands = [_as_inside(args[i]) for i in given]
    is_activation = [not isinstance(args[i], _Parameter) for i in given]
    values, link = _enter(is_activation)(operands, scale, probe)
    inner = [_value(x) for x in args]
    for i, x in zip(given, values, strict=True):
        inner[i] = x
    outs = jaxpr.bind(eqn, inner)
    floating = [i for i, x in enumerate(outs) if _is_floating(x)]
    results, received = _leave([outs[i] for i in floating], link, scale)
    for i, x, token in zip(floating, results, received, strict=True):
        outs[i] = _Inside(x, scale, token)
    return outs


class _Link(NamedTuple):
    """Zeros that an entered block hands to its results; their cotangents are what was found of the results' gradients.

    Attributes:
      bad: Whether one is not finite.
      overflow: Whether one is not finite although none was received as such.
      inverse_rms: As in `BlockValues`.
      largest: As in `BlockValues`.
    """

    bad: jax.Array
    overflow: jax.Array
    inverse_rms: jax.Array | None
    largest: jax.Array | None


def _enter(is_activation: Sequence[bool]) -> Callable[..., tuple[list[jax.Array], _Link]]:
    """Return a function that passes a block its operands; its derivative brings their gradients to their scales."""

    @jax.custom_vjp
    def enter(operands: list[_Inside], scale: jax.Array, probe: BlockValues) -> tuple[list[jax.Array], _Link]:
        del scale
        zero = jnp.zeros([], np.float32)
        spread = zero if probe.largest is not None else None
        return [x.value for x in operands], _Link(zero, zero, spread, spread)

    def forward(operands: list[_Inside], scale: jax.Array, probe: BlockValues) -> tuple[Any, Any]:
        return enter(operands, scale, probe), ([x.scale for x in operands], scale)

    def backward(saved: Any, cotangents: tuple[list[jax.Array], _Link]) -> tuple[Any, ...]:
        (to, scale), (gradients, link) = saved, cotangents
        bad = [_is_bad(g) for g in gradients]
        originates = (1 - link.bad) * jnp.stack(bad).max()
        zero = jnp.zeros([], np.float32)
        observed = BlockValues(
            zero, jnp.maximum(link.overflow, originates), *_spread(gradients, is_activation, scale, link)
        )
        by_operand = [_Inside(_times(g, s / scale), zero, b) for g, s, b in zip(gradients, to, bad, strict=True)]
        return by_operand, zero, observed

    enter.defvjp(forward, backward)
    return enter


@jax.custom_vjp
def _leave(results: list[jax.Array], link: _Link, scale: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return the results of a block, each with its number `received`; the derivative observes their gradients."""
    del link, scale
    return results, [jnp.zeros([], np.float32) for _ in results]


def _leave_forward(results: list[jax.Array], link: _Link, scale: jax.Array) -> tuple[Any, Any]:
    return _leave(results, link, scale), (scale, link)


def _leave_backward(saved: Any, cotangents: tuple[list[jax.Array], list[jax.Array]]) -> tuple[Any, ...]:
    (scale, link), (gradients, received) = saved, cotangents
    zero = jnp.zeros([], np.float32)
    bad = jnp.stack([zero, *map(_is_bad, gradients)]).max()
    was_bad = (jnp.stack([zero, *received]).max() > 0).astype(np.float32)
    none = link._replace(bad=zero, overflow=zero)
    found = _Link(bad, bad * (1 - was_bad), *_spread(gradients, [True] * len(gradients), scale, none))
    return gradients, found, zero


_leave.defvjp(_leave_forward, _leave_backward)


@jax.custom_vjp
def _convert(x: _Inside) -> jax.Array:
    """Return a block's result for use outside of blocks: its gradient gets the scale of the block."""
    return x.value


def _convert_backward(scale: jax.Array, gradient: jax.Array) -> tuple[_Inside]:
    return (_Inside(_times(gradient, scale), jnp.zeros_like(scale), _is_bad(gradient)),)


_convert.defvjp(lambda x: (x.value, x.scale), _convert_backward)


def _at_loss_scale(x: Any) -> Any:
    """Return a value whose gradient is at the scale of the loss."""
    return _convert(x) if isinstance(x, _Inside) else _value(x)


def _times(gradient: jax.Array, factor: jax.Array) -> jax.Array:
    """Multiply by a power of two that may be out of the range of the gradient's dtype."""
    wide = np.promote_types(gradient.dtype, np.float32) if gradient.dtype.itemsize > 2 else np.float32
    return (gradient.astype(wide) * factor.astype(wide)).astype(gradient.dtype)


def _is_bad(gradient: jax.Array) -> jax.Array:
    return (~jnp.isfinite(gradient).all()).astype(np.float32)


def _spread(
    gradients: Sequence[jax.Array], is_activation: Sequence[bool], scale: jax.Array, link: _Link
) -> tuple[jax.Array | None, jax.Array | None]:
    """Return `inverse_rms` and `largest` of gradients at a scale, and of those that `link` has found."""
    if link.inverse_rms is None or link.largest is None:
        return None, None
    inverse, largest = link.inverse_rms, link.largest
    for g in (g for g, counts in zip(gradients, is_activation, strict=True) if counts):
        magnitude = jnp.abs(g).max().astype(np.float32)
        # Over the largest, because squares of small gradients underflow.
        unit = jnp.where(magnitude > 0, magnitude, 1)
        rms = unit * jnp.sqrt(jnp.square(g.astype(np.float32) / unit).mean())
        inverse = jnp.maximum(inverse, jnp.where(rms > 0, scale / jnp.where(rms > 0, rms, 1), 0))
        largest = jnp.maximum(largest, magnitude / scale)
    return inverse, largest
