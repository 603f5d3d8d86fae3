"""Let the kernels of a GPU that convert to 8 bits compute what they convert.

An array is read twice to be scaled: for its largest magnitude, and to be converted. XLA writes it in 16 bits first,
also if it follows from arrays in memory by cheap operations: an activation function, its gradient, a norm. It then
moves more than two kernels would that compute it. A factor of one that XLA does not know makes two computations of one,
which it cannot merge. Products of one array share its scale and its conversion, in the backward pass too.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxtrain.passes.fp8.scales import AMAX, CAST, E4M3
from jaxtrain.passes.xla_gpu.added_products import AddedProducts
from jaxtrain.passes.xla_gpu.carried_magnitudes import carry_magnitudes, is_amax_of_all
from jaxtrain.passes.xla_gpu.equal_values import Equal, scan_merged
from jaxtrain.passes.xla_gpu.scanned import is_cheap
from jaxtrain.passes.xla_gpu.shared_scales import SharedScales
from jaxtrain.program import equations, rewrite
from jaxtrain.program import operations as op
from jaxtrain.program.platform import on_gpu

_MOST = 3
"""Times its size that the computation of an array may read: as often it would be written and read otherwise."""
_SMALL = 64
"""Parts of an array that are not counted: statistics of rows, parameters of columns."""
_OF_RESIDUALS = (op.NAME, op.REDUCE_PRECISION)
"""Primitives that `jax.checkpoint` leaves on what it saves by name."""


def fuse_casts(fn: Callable[..., Any], platform: str | None = None) -> Callable[..., Any]:
    """Compute arrays by cheap operations twice, for their scales and for their conversion to 8 bits.

    To be applied after differentiation.

    Args:
      fn: A function of arrays, not to be differentiated any more.
      platform: The platform that it is compiled for; None for that of the default backend.

    Returns:
      On a GPU the same function, whose numbers differ in the rounding of the sums that cuBLASLt adds (`AddedProducts`)
      alone. On any other platform, `fn`.

    Example:
      >>> from jaxtrain.passes.fp8.scales import E4M3, quantize
      >>> def scaled(x):
      ...     return quantize(jnp.sin(x), E4M3, (0, 1))
      >>> x = jnp.ones((2, 2))
      >>> [str(jax.make_jaxpr(fuse_casts(scaled, p))(x)).count("= sin") for p in ("cpu", "gpu")]
      [1, 2]
    """
    return on_gpu(
        fn, rewrite.retrace(_carrying(fn), lambda closed, leaves: _run(closed.jaxpr, closed.consts, leaves)), platform
    )


def _carrying(fn: Callable[..., Any]) -> Callable[..., Any]:
    def rule(eqn: JaxprEqn, args: list[Any], run: rewrite.Run) -> Sequence[Any] | None:
        del run
        return carry_magnitudes(eqn, args, _inlined) if op.of(eqn) == op.SCAN else rewrite.bind(eqn, args)

    return rewrite.transform(fn, rule)


def _run(traced: Jaxpr, consts: Sequence[Any], args: Sequence[Any], shared: SharedScales | None = None) -> list[Any]:
    """Evaluate a jaxpr or the body of a scan."""
    if shared is None:
        shared = SharedScales()
        results = _run(traced, consts, args, shared)
        return _run(traced, consts, args, _Unshared()) if shared.lose(results) else results
    again, equal, products = _Again(), Equal(), AddedProducts(traced)
    activations = set(_activations(traced))
    measured: set[int] = set()  # by id, of values that `equal` keeps alive

    def rule(eqn: JaxprEqn, args: list[Any], run: rewrite.Run) -> Sequence[Any] | None:
        args = shared.operands(eqn, args)
        if not eqn.outvars:  # what differentiation leaves of a function whose results are known
            return []
        if op.of(eqn) == op.SCAN:
            return scan_merged(eqn, args, _run)
        if op.of(eqn) == CAST:
            return _shared(
                eqn, args, shared, lambda: equal.merged(eqn, args, lambda: _cast(eqn, args, again, measured))
            )
        if equations.is_call(eqn, AMAX):
            measured.add(id(args[0]))
            by_columns = eqn.invars[0] not in activations and again.is_norm(args[0])
            return equal.merged(eqn, args, lambda: _largest(eqn, args, by_columns=by_columns))
        if (inner := _inlined(eqn)) is not None:
            products.enter(eqn, args)
            return run(*inner, args)
        if not is_cheap(eqn) and op.of(eqn) not in _OF_RESIDUALS:
            results = rewrite.bind(eqn, args)
            products.note(eqn, args, results)
            return results
        if (added := products.added(eqn, args)) is not None:
            return added
        outs = equal.merged(eqn, args, lambda: rewrite.bind(eqn, args))
        shared.follow(args, outs)
        products.note(eqn, args, outs)
        if is_cheap(eqn):
            again.note(eqn, args, outs)
        return outs

    return rewrite.interpret(traced, consts, args, rule)


def _shared(eqn: JaxprEqn, args: list[Any], shared: SharedScales, cast: Callable[[], Sequence[Any]]) -> Sequence[Any]:
    x, scale = args
    found = shared.converted(x, scale, equations.own(eqn, "dtype"))
    if found is not None:
        return found
    outs = cast()
    shared.note(x, scale, outs)
    return outs


class _Unshared(SharedScales):
    def converted(self, x: Any, scale: Any, dtype: Any) -> None:
        """Convert by every scale."""


def _cast(eqn: JaxprEqn, args: list[Any], again: "_Again", measured: set[int]) -> list[Any]:
    x, scale = args
    second = again.computed(x) if id(x) in measured else x
    outs = rewrite.bind(eqn, [second, scale])
    # XLA would transpose in the kernel of the norm's gradient, which then could not sum over tokens.
    return lax.optimization_barrier(outs) if equations.own(eqn, "dtype") == E4M3 and again.is_norm(x) else outs


def _activations(traced: Jaxpr) -> Iterator[Any]:
    """Yield the variables that are converted to the format of activations."""
    for eqn in equations.visit(traced):
        if op.of(eqn) == CAST and equations.own(eqn, "dtype") == E4M3:
            yield from (v for v in eqn.invars if not isinstance(v, Literal))


def _largest(eqn: JaxprEqn, args: list[Any], *, by_columns: bool) -> list[Any]:
    return (
        [_amax(args[0], by_columns=by_columns)] * len(eqn.outvars) if is_amax_of_all(eqn) else rewrite.bind(eqn, args)
    )


def _amax(x: jax.Array, *, by_columns: bool) -> jax.Array:
    """Return the largest magnitude, found along the axes along which the kernel that computes the array sums.

    The kernel of a norm sums along rows, and that of its gradient along columns, for the gradient by its scale.
    """
    axes = tuple(range(x.ndim - 1)) if by_columns else (-1,)
    parts = lax.optimization_barrier(jnp.max(jnp.abs(x), axis=axes))
    return jnp.max(parts).reshape((1,) * x.ndim)


def _inlined(eqn: JaxprEqn) -> tuple[Jaxpr, Sequence[Any]] | None:
    """Return the jaxpr and constants of a call without a barrier that contains conversions, or what they convert."""
    name = op.of(eqn)
    if name in op.CHECKPOINTS:
        return None if equations.prevents_cse(eqn) else (equations.body(eqn), ())
    is_a_part = name in (op.EVAL_JAXPR, op.CLOSED_CALL)  # of a checkpoint, split off by differentiation
    if is_a_part or (name in op.CALLS and any(map(_has_casts, equations.inner_jaxprs(eqn)))):
        closed = equations.body(eqn)
        return closed.jaxpr, closed.consts
    return None


def _without_barriers(eqn: JaxprEqn, args: list[Any]) -> list[Any]:
    if op.of(eqn) not in op.CHECKPOINTS:
        return rewrite.bind(eqn, args)
    return rewrite.interpret(equations.body(eqn), (), args, lambda eqn, args, run: _without_barriers(eqn, args))


def _has_casts(traced: Jaxpr) -> bool:
    return any(op.of(eqn) in (CAST, op.SCAN) for eqn in equations.visit(traced))


def _sums(eqn: JaxprEqn) -> bool:
    return any(op.of(inner) == op.REDUCE_SUM for inner in equations.within(eqn))


class _Again:
    """Second computations of values by cheap operations."""

    def __init__(self) -> None:
        self._origins: dict[int, tuple[JaxprEqn, list[Any], Sequence[Any]]] = {}  # by id, of values that stay alive
        self._computed: dict[int, Any] = {}
        self._one: Any = None

    def note(self, eqn: JaxprEqn, args: list[Any], outs: Sequence[Any]) -> None:
        """Note what values were computed by."""
        for out in outs:
            self._origins[id(out)] = eqn, args, outs

    def computed(self, x: Any) -> Any:
        """Return a value computed a second time, if that reads little enough."""
        leaves: dict[int, Any] = {}
        self._collect(x, leaves, set())
        read = sum(leaf.nbytes for leaf in leaves.values() if leaf.size > x.size // _SMALL)
        return self._again(x) if id(x) in self._origins and read <= _MOST * x.nbytes else x

    def is_norm(self, x: Any) -> bool:
        """Return whether a value follows from sums by cheap operations."""
        seen: set[int] = set()
        self._collect(x, {}, seen)
        found = (self._origins[i][0] for i in seen if i in self._origins)
        return any(map(_sums, found))

    def _collect(self, x: Any, leaves: dict[int, Any], seen: set[int]) -> None:
        if id(x) in seen:
            return
        seen.add(id(x))
        if id(x) not in self._origins:
            leaves.update({id(x): x} if hasattr(x, "nbytes") else {})
            return
        for operand in self._origins[id(x)][1]:
            self._collect(operand, leaves, seen)

    def _again(self, x: Any) -> Any:
        if not hasattr(x, "dtype") or np.size(x) == 1:
            return x
        if id(x) not in self._computed:
            if id(x) in self._origins:
                eqn, args, outs = self._origins[id(x)]
                second = _without_barriers(eqn, [self._again(operand) for operand in args])
                self._computed |= {id(out): again for out, again in zip(outs, second, strict=True)}
            else:
                self._computed[id(x)] = self._times_one(x)
        return self._computed[id(x)]

    def _times_one(self, x: Any) -> Any:
        """Return a value that XLA does not know to be the same, without a copy of it."""
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        if self._one is None:
            self._one = lax.optimization_barrier(jnp.ones([], jnp.bfloat16))
        return x * self._one.astype(x.dtype)
