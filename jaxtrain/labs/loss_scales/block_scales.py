"""A scale of its own for the gradients inside each marked block.

The gradient that enters the backward pass of a block is multiplied by the block's scale, and what leaves it is divided
by it. Between blocks gradients are at the scale of the loss, in float32, whose range holds those of all layers: the
result of a block in 16 bits is converted to float32, and each use converts it back. Scales are powers of two: wherever
nothing overflows or underflows, every gradient is the same to the bit.

A scale is given, or chosen in the backward pass from the gradient that enters the block (Zhao et al. 2019). The block
in which an overflow originates is the one whose gradients are not finite although all that it was given were.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxtrain.errors import UserError
from jaxtrain.passes.memory import blocks
from jaxtrain.passes.mesh.window_sums import is_partial
from jaxtrain.paths import Frozen, path_name
from jaxtrain.program import equations, rewrite
from jaxtrain.program import operations as op
from jaxtrain.program.follow import Apply, Followed, is_followed, moved_or_used, used

# Gradients are float16, and inside a block they may be larger than those that enter it.
_LARGEST, _HEADROOM = 65504.0, 16.0
# The reciprocal of a scale is a normal float32.
_LOWEST, _HIGHEST = np.float32(2.0**-100), np.float32(2.0**100)


class BlockValues(NamedTuple):
    """What a pass reads and observes of each block.

    Attributes:
      scale: float32[blocks], what the gradients inside are multiplied by, over the scale of the loss. With `target`
        instead a factor of the scale that is chosen. Observed: what they were multiplied by, 0 if none has entered.
      overflow: float32[blocks], observed: positive where an overflow has originated.
      target: float32[blocks], the root mean square to which the gradients that enter a block are scaled. None if
        `scale` is given.
    """

    scale: jax.Array
    overflow: jax.Array
    target: jax.Array | None = None

    def rewrite(self, probes: "BlockValues", frozen: Frozen) -> Callable[..., Any]:
        """Return `scale_blocks` with these scales, as `jaxtrain.step.loss_scale.ScalerValues` asks for it."""
        return partial(scale_blocks, scales=self, probes=probes, frozen=frozen)


def scale_blocks(
    compute: Callable[..., Any], scales: BlockValues, probes: BlockValues, frozen: Frozen
) -> Callable[..., Any]:
    """Let the gradients inside each marked block of a computation have a scale of their own.

    Args:
      compute: A function of (params, …), of which only the parameters are differentiated.
      scales: Its scales, powers of two; `overflow` is not read.
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
        if not any(map(is_followed, args)):
            return blocks.enter(eqn, args, own, run)
        if blocks.is_block(eqn):
            return _evaluate_block(eqn, args, *blocks.of_one(own))
        if own is None:
            return [_differentiated(x) for x in moved_or_used(eqn, args, rewrite.bind)]
        if op.of(eqn) == op.SCAN:
            return _evaluate_scan(eqn, args, own, run)
        if any(equations.shardings(eqn, "in_shardings")):
            args = [_differentiated(used(x)) if is_followed(x) else x for x in args]
        return blocks.enter(eqn, args, own, run)

    def computed(params: Any, *rest: Any) -> Any:
        trained = _trained(params, frozen)

        def evaluate(closed: ClosedJaxpr, leaves: list[Any]) -> list[Any]:
            require_blocks(scales.scale.shape[0], blocks.count(closed.jaxpr))
            values = [_differentiated(x) if i in trained else x for i, x in enumerate(leaves)]
            return [*map(used, blocks.evaluate(closed, values, (scales, probes), visit))]

        return rewrite.retrace(compute, evaluate)(params, *rest)

    return computed


def require_blocks(given: int, found: int) -> None:
    """Raise `UserError` unless a program has as many marked blocks, at least one, as there are scales."""
    if found == 0:
        raise UserError("per_layer_loss_scale: no layer of the program is marked: mark layers with jaxtrain.block")
    if given != found:
        raise UserError(f"per_layer_loss_scale has blocks={given}, but the program has {found}: use blocks={found}")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Differentiated(Followed):
    """A differentiated value, the gradient of which is at the scale of the loss.

    Attributes:
      value: The value, of its own dtype or of a wider one, in which its gradient then is.
      dtype: Its dtype.
    """

    value: jax.Array
    dtype: Any = field(metadata={"static": True})

    def used(self) -> Any:
        """Return the value in its own dtype."""
        return self.value.astype(self.dtype)

    def moved(self, eqn: JaxprEqn, rest: Sequence[Any], apply: Apply) -> "_Differentiated | None":
        """Return a converted value, or one in another layout."""
        if op.of(eqn) == op.CONVERT_ELEMENT_TYPE and _is_floating(eqn.outvars[0].aval):
            dtype = equations.dtype(eqn)
            return _Differentiated(_converted(self.value, dtype), dtype)
        is_layout = op.of(eqn) in op.LAYOUT and not rest
        return _Differentiated(apply(self.value), self.dtype) if is_layout else None


def _differentiated(x: Any) -> Any:
    return _Differentiated(x, jnp.result_type(x)) if not is_followed(x) and _is_floating(x) else x


def _is_floating(x: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), np.floating))


def _wide(dtype: Any) -> Any:
    """Return the dtype of the gradients of such values between blocks."""
    return np.dtype(np.float32) if jnp.dtype(dtype).itemsize < 4 else jnp.dtype(dtype)


def _trained(params: Any, frozen: Frozen) -> set[int]:
    """Return the positions, among the leaves of `params`, of those that are trained."""
    trained, position = set(), 0
    for path, x in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_partial):
        n = len(jax.tree.leaves(x))
        trained |= set() if frozen(path_name(path)) else {*range(position, position + n)}
        position += n
    return trained


def _converted(x: jax.Array, dtype: Any) -> jax.Array:
    """Return a value rounded to a dtype, in one whose gradient does not underflow where the value's does not."""
    if _wide(x.dtype) == x.dtype and _wide(dtype) == dtype:
        return x.astype(dtype)

    @jax.custom_vjp
    def rounded(x: jax.Array) -> jax.Array:
        return x.astype(dtype).astype(_wide(dtype))

    rounded.defvjp(lambda x: (rounded(x), None), lambda _, gradient: (gradient.astype(x.dtype),))
    return rounded(x)


def _evaluate_scan(eqn: JaxprEqn, args: list[Any], own: Any, run: blocks.Run) -> list[Any]:
    """Evaluate a scan over blocks, whose carry is in float32 at least."""
    consts, carry, xs = equations.scan_operands(eqn, args)
    n_carry = len(carry)

    def run_step(body: Jaxpr, consts: Sequence[Any], step_args: Sequence[Any], own: Any) -> list[Any]:
        outs = run(body, consts, step_args, own)
        # Results that are stacked would take twice the memory in float32.
        return [*map(_widened, outs[:n_carry]), *(_differentiated(used(x)) for x in outs[n_carry:])]

    return list(blocks.enter(eqn, [*consts, *map(_widened, carry), *xs], own, run_step))


def _widened(x: Any) -> Any:
    """Return a value whose gradient is in float32 at least, so that the carries of all steps have the same types."""
    x = _differentiated(x)
    return _Differentiated(x.value.astype(_wide(x.value.dtype)), x.dtype) if is_followed(x) else x


def _evaluate_block(eqn: JaxprEqn, args: list[Any], own: BlockValues, probe: BlockValues) -> list[Any]:
    """Evaluate a block between two functions with custom derivatives."""
    given = [i for i, x in enumerate(args) if is_followed(x)]
    operands = [args[i] for i in given]
    enter = _enter([x.dtype for x in operands], [x.value.dtype for x in operands])
    values, link = enter([x.value for x in operands], probe)
    inner = list(args)
    for i, x in zip(given, values, strict=True):
        inner[i] = x
    outs = rewrite.bind(eqn, inner)
    floating = [i for i, x in enumerate(outs) if _is_floating(x)]
    leave = _leave([outs[i].dtype for i in floating])
    for i, x in zip(floating, leave([outs[i] for i in floating], link, own), strict=True):
        outs[i] = _Differentiated(x, outs[i].dtype)
    return outs


class _Link(NamedTuple):
    """Zeros that an entered block hands to its results; their cotangents are what is known of the results' gradients.

    Attributes:
      scale: What they were multiplied by.
      bad: Whether one is not finite.
      overflow: Whether one is not finite although all were before they were multiplied.
    """

    scale: jax.Array
    bad: jax.Array
    overflow: jax.Array


def _enter(dtypes: Sequence[Any], of_gradients: Sequence[Any]) -> Callable[..., tuple[list[jax.Array], _Link]]:
    """Return a function that passes a block its operands in its dtypes; its derivative divides their gradients."""

    @jax.custom_vjp
    def enter(operands: list[jax.Array], probe: BlockValues) -> tuple[list[jax.Array], _Link]:
        del probe
        zero = jnp.zeros([], np.float32)
        return [x.astype(dtype) for x, dtype in zip(operands, dtypes, strict=True)], _Link(zero, zero, zero)

    def forward(operands: list[jax.Array], probe: BlockValues) -> tuple[Any, Any]:
        return enter(operands, probe), probe

    def backward(probe: BlockValues, cotangents: tuple[list[jax.Array], _Link]) -> tuple[Any, ...]:
        gradients, link = cotangents
        overflow = jnp.maximum(link.overflow, (1 - link.bad) * _any_bad(gradients))
        inverse = jnp.where(link.scale > 0, 1 / jnp.where(link.scale > 0, link.scale, 1), 0)
        divided = [_times(g, inverse, dtype) for g, dtype in zip(gradients, of_gradients, strict=True)]
        return divided, jax.tree.map(jnp.zeros_like, probe)._replace(scale=link.scale, overflow=overflow)

    enter.defvjp(forward, backward)
    return enter


def _leave(dtypes: Sequence[Any]) -> Callable[..., list[jax.Array]]:
    """Return a function from a block's results to them in float32 at least; its derivative multiplies by the scale."""

    @jax.custom_vjp
    def leave(results: list[jax.Array], link: _Link, own: BlockValues) -> list[jax.Array]:
        del link, own
        return [x.astype(_wide(x.dtype)) for x in results]

    def forward(results: list[jax.Array], link: _Link, own: BlockValues) -> tuple[Any, Any]:
        return leave(results, link, own), own

    def backward(own: BlockValues, gradients: list[jax.Array]) -> tuple[Any, ...]:
        scale = own.scale if own.target is None else own.scale * _chosen(gradients, own.target)
        multiplied = [_times(g, scale, dtype) for g, dtype in zip(gradients, dtypes, strict=True)]
        bad = _any_bad(multiplied)
        return multiplied, _Link(scale, bad, bad * (1 - _any_bad(gradients))), jax.tree.map(jnp.zeros_like, own)

    leave.defvjp(forward, backward)
    return leave


def _chosen(gradients: Sequence[jax.Array], target: jax.Array) -> jax.Array:
    """Return the smallest power of two that multiplies the root mean square of each gradient to the target at least.

    It leaves a factor of 16 between the largest element and the largest float16. It is 1 where there is no scale for
    such gradients: if they are zero, or not finite.
    """
    largest, inverse = jnp.zeros([], np.float32), jnp.zeros([], np.float32)
    for g in gradients:
        magnitude = jnp.abs(g).max().astype(np.float32)
        # Over the largest, because squares of small gradients underflow.
        unit = jnp.where(magnitude > 0, magnitude, 1)
        rms = unit * jnp.sqrt(jnp.square(g.astype(np.float32) / unit).mean())
        inverse = jnp.maximum(inverse, jnp.where(rms > 0, 1 / jnp.where(rms > 0, rms, 1), 0))
        largest = jnp.maximum(largest, magnitude)
    scaled = jnp.isfinite(largest) & (inverse > 0)
    highest = np.float32(_LARGEST / _HEADROOM) / jnp.where(scaled, largest, 1)
    chosen = jnp.minimum(2 * _power_of_two_below(target * inverse), _power_of_two_below(highest))
    return jnp.where(scaled, jnp.clip(chosen, _LOWEST, _HIGHEST), 1)


def _power_of_two_below(x: jax.Array) -> jax.Array:
    """Return the largest power of two up to a positive, normal float32."""
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, np.int32) & np.int32(0x7F800000), np.float32)


def _times(gradient: jax.Array, factor: jax.Array, dtype: Any) -> jax.Array:
    """Multiply by a power of two that may be out of the range of the gradient's dtype."""
    wide = np.promote_types(_wide(gradient.dtype), _wide(dtype))
    return (gradient.astype(wide) * factor.astype(wide)).astype(dtype)


def _any_bad(gradients: Sequence[jax.Array]) -> jax.Array:
    """Return whether a gradient is not finite, float32[]."""
    return jnp.stack([jnp.zeros([], bool), *(~jnp.isfinite(g).all() for g in gradients)]).any().astype(np.float32)
