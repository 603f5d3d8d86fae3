"""Count the magnitudes of the values that a program rounds to a low precision, and of their gradients, by layer.

The rounded values are the results of matrix products and convolutions, and of conversions to the low precision. The
counts are gradients: every such value passes a function that is the identity, and whose gradient by a second argument,
a counter, is the histogram of the value and of its gradient. The layers are the blocks marked by `jaxtrain.block`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jaxtrain.passes.fp8.fp8_product import NAME as FP8_PRODUCT
from jaxtrain.passes.fp8.magnitudes import scaled_kernel, scaled_rows
from jaxtrain.passes.memory.blocks import count, is_block
from jaxtrain.passes.memory.remat import FUSED
from jaxtrain.passes.numerics.biased_product import NAME as BIASED_PRODUCT
from jaxtrain.passes.numerics.exponents import bounds, count_from
from jaxtrain.program import equations, rewrite
from jaxtrain.program import operations as op


class Counter(NamedTuple):
    """Zeros whose gradient is what is counted of a layer.

    Attributes:
      activations: float32[2, 2, bounds], the `count_from` of values and of their gradients.
      weights: The same of what is computed from parameters alone.
    """

    activations: Any
    weights: Any


class Counters(NamedTuple):
    """The probes of a program.

    Attributes:
      before: Of what comes before the first block; of all if there is no block.
      blocks: Of the blocks, with a leading axis, in order.
      after: Of what comes after the first block, outside of blocks.
    """

    before: Counter
    blocks: Counter
    after: Counter


class Formats(NamedTuple):
    """The dtypes whose limits are counted: of values, and of their gradients."""

    values: Any
    gradients: Any


def zero_counters(blocks: int, formats: Formats) -> Counters:
    """Return the counters of a program with a number of blocks."""

    def zeros(*leading: int) -> Counter:
        array = jnp.zeros((*leading, 2, 2, len(bounds(formats.values))), np.float32)
        return Counter(array, array)

    return Counters(zeros(), zeros(blocks), zeros())


def count_rounded(fn: Any, dtype: Any, formats: Formats, counters: Counters, is_trained: Sequence[bool]) -> Any:
    """Make the gradients by `counters` of a function the histograms of the values that it rounds.

    Args:
      fn: A function of (params, …).
      dtype: The dtype of the values that are counted. None counts the operands of products in 8 bits, multiplied by
        their scales, and the gradients of their results.
      formats: The dtypes whose limits are counted.
      counters: What `zero_counters` returned, by which the result is differentiated.
      is_trained: For each leaf of the parameters, whether it has a gradient.

    Returns:
      The same function.
    """

    def evaluate(closed: ClosedJaxpr, leaves: list[Any]) -> list[Any]:
        params = [_Kind(is_weight=True, has_gradient=trained) for trained in is_trained]
        others = [_Kind(is_input=True)] * (len(leaves) - len(params))
        walk = _Walk(dtype, formats, counters)
        return walk.run(closed.jaxpr, closed.consts, leaves, [*params, *others])

    return rewrite.retrace(fn, evaluate)


class _Kind(NamedTuple):
    """What a value is computed from."""

    is_input: bool = False
    is_weight: bool = False
    has_gradient: bool = False
    is_counted: bool = False

    def __or__(self, other: "_Kind") -> "_Kind":
        return _Kind(*(a or b for a, b in zip(self, other, strict=True)))


_CONSTANT = _Kind()


class _Walk:
    """One evaluation of a program, in which the kinds of its variables are known."""

    def __init__(self, dtype: Any, formats: Formats, counters: Counters) -> None:
        self._dtype, self._formats, self._blocks, self._after = dtype, formats, counters.blocks, counters.after
        self._counter, self._next_block, self._in_layers = counters.before, 0, False
        self._kinds: dict[Any, _Kind] = {}

    def run(self, traced: Jaxpr, consts: Sequence[Any], args: Sequence[Any], kinds: Sequence[_Kind]) -> list[Any]:
        self._kinds.update(zip(traced.invars, kinds, strict=True))
        return rewrite.interpret(traced, consts, args, self._rule)

    def _kind(self, var: Any) -> _Kind:
        return _CONSTANT if isinstance(var, Literal) else self._kinds.get(var, _CONSTANT)

    def _rule(self, eqn: JaxprEqn, args: list[Any], run: rewrite.Run) -> Sequence[Any] | None:
        kinds, name = [self._kind(v) for v in eqn.invars], op.of(eqn)
        if name == op.SCAN:
            return self._scan(eqn, args, kinds, run)
        if name in op.FUNCTIONS:
            return self._call(eqn, args, kinds, run)
        if name == FP8_PRODUCT and self._dtype is None:
            return [self._in_8_bits(eqn, args, kinds)]
        if name in (*op.PRODUCTS, BIASED_PRODUCT, FUSED):
            args = [self._operand(v, x, kind) for v, x, kind in zip(eqn.invars, args, kinds, strict=True)]
        outs = rewrite.bind(eqn, args)
        joined = _joined(kinds)
        self._kinds.update(dict.fromkeys(eqn.outvars, joined))
        return [self._result(v, x, joined) for v, x in zip(eqn.outvars, outs, strict=True)] if _rounds(eqn) else outs

    def _in_8_bits(self, eqn: JaxprEqn, args: list[Any], kinds: list[_Kind]) -> Any:
        """Count the operands of a product in 8 bits and the gradient of its result."""
        fp8, formats, joined = equations.own(eqn, "fp8"), self._formats, _joined(kinds)
        x, kernel, *bias = args
        of_rows = partial(_count_scaled, partial(scaled_rows, fp8), formats.values)
        of_kernel = partial(_count_scaled, partial(scaled_kernel, fp8), formats.values)
        of_gradient = partial(_count_scaled, partial(scaled_rows, fp8), formats.gradients)
        x = _counted(x, self._counter.activations, of_rows, None)
        kernel = _counted(kernel, self._counter.weights, of_kernel, None)
        (out,) = rewrite.bind(eqn, [x, kernel, *bias])
        self._kinds[eqn.outvars[0]] = joined
        return _counted(out, self._counter.activations, None, of_gradient if joined.has_gradient else None)

    def _operand(self, var: Any, x: Any, kind: _Kind) -> Any:
        """Count a weight that has the dtype from the start."""
        is_weight = kind.is_weight and not kind.is_input and not kind.is_counted
        return self._result(var, x, kind) if is_weight else x

    def _result(self, var: Any, x: Any, kind: _Kind) -> Any:
        if (
            self._dtype is None
            or getattr(x, "dtype", None) != self._dtype
            or not np.ndim(x)
            or isinstance(var, Literal)
        ):
            return x
        self._kinds[var] = kind._replace(is_counted=True)
        is_weight = kind.is_weight and not kind.is_input
        counter = self._counter.weights if is_weight else self._counter.activations
        of_value, of_gradient = (partial(_count, dtype) for dtype in self._formats)
        return _counted(x, counter, of_value, of_gradient if kind.has_gradient else None)

    def _call(self, eqn: JaxprEqn, args: list[Any], kinds: list[_Kind], run: rewrite.Run) -> Sequence[Any]:
        (body,) = equations.inner_jaxprs(eqn)
        self._kinds.update(zip(body.invars, kinds, strict=True))
        is_layer = is_block(eqn) and not self._in_layers
        if is_layer:
            self._counter = jax.tree.map(lambda x: x[self._next_block], self._blocks)
            self._next_block, self._in_layers = self._next_block + 1, True
        outs = rewrite.HIGHER_ORDER[op.of(eqn)](eqn, args, run)
        if is_layer:
            self._counter, self._in_layers = self._after, False
        self._kinds.update((out, self._kind(v)) for out, v in zip(eqn.outvars, body.outvars, strict=True))
        return outs

    def _scan(self, eqn: JaxprEqn, args: list[Any], kinds: list[_Kind], run: rewrite.Run) -> list[Any]:
        closed, length = equations.body(eqn), equations.trip_count(eqn)
        n_consts, n_carry = equations.scan_sizes(eqn)
        n = n_consts + n_carry
        carried = _joined(kinds)  # what the carry is computed from after the first step
        self._kinds.update(zip(closed.jaxpr.invars, [*kinds[:n_consts], *[carried] * n_carry, *kinds[n:]], strict=True))
        per_step = 0 if self._in_layers else count(closed.jaxpr)
        first, blocks = self._next_block, self._blocks
        own = jax.tree.map(
            lambda x: x[first : first + length * per_step].reshape(length, per_step, *x.shape[1:]), blocks
        )

        def step(body: Jaxpr, consts: Sequence[Any], step_args: Sequence[Any]) -> list[Any]:
            *inputs, own_probes = step_args
            if per_step:
                self._blocks, self._next_block = own_probes, 0
            return run(body, consts, inputs)

        outs = rewrite.HIGHER_ORDER[op.SCAN](eqn, [*args, own], step)
        if per_step:
            self._blocks, self._next_block, self._counter = blocks, first + length * per_step, self._after
        self._kinds.update((out, carried) for out in eqn.outvars)
        return outs


def _joined(kinds: Sequence[_Kind]) -> _Kind:
    joined = _CONSTANT
    for kind in kinds:
        joined = joined | kind
    return joined


def _rounds(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a product or a conversion between floating-point dtypes, or contains one."""
    return any(
        op.of(inner) in (*op.PRODUCTS, BIASED_PRODUCT, FUSED)
        or (op.of(inner) == op.CONVERT_ELEMENT_TYPE and jnp.issubdtype(inner.invars[0].aval.dtype, np.floating))  # type: ignore[attr-defined]
        for inner in equations.within(eqn)
    )


def _count(dtype: Any, x: jax.Array) -> jax.Array:
    return count_from(x, dtype)


def _count_scaled(scaled: Callable[..., jax.Array], dtype: Any, x: jax.Array) -> jax.Array:
    return count_from(scaled(x, dtype), dtype)


_Count = Callable[[jax.Array], jax.Array] | None


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _counted(x: jax.Array, counter: jax.Array, of_value: _Count, of_gradient: _Count) -> jax.Array:
    """Return `x`; the gradient by the counter is what the functions count of `x` and of its gradient."""
    del counter, of_value, of_gradient
    return x


def _counted_forward(x: jax.Array, counter: jax.Array, of_value: _Count, of_gradient: _Count) -> tuple[Any, Any]:
    del of_gradient
    return x, jnp.zeros_like(counter[0]) if of_value is None else of_value(x)


def _counted_backward(of_value: _Count, of_gradient: _Count, counts: jax.Array, gradient: Any) -> tuple[Any, jax.Array]:
    del of_value
    return gradient, jnp.stack([counts, jnp.zeros_like(counts) if of_gradient is None else of_gradient(gradient)])


_counted.defvjp(_counted_forward, _counted_backward)
