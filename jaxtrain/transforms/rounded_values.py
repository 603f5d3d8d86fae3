"""Count the magnitudes of the values that a program rounds to a low precision, and of their gradients, by layer.

The rounded values are the results of matrix products and convolutions, and of conversions to the low precision. The
counts are gradients: every such value passes a function that is the identity, and whose gradient by a second argument,
a probe, is the histogram of the value and of its gradient. The layers are the blocks marked by `jaxtrain.block`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jaxtrain.transforms import jaxpr
from jaxtrain.transforms.autocast_lists import LISTS, Dtype
from jaxtrain.transforms.biased_product import NAME as BIASED_PRODUCT
from jaxtrain.transforms.exponents import bounds, count_from
from jaxtrain.transforms.remat import BLOCK, FUSED

_PRODUCTS = {*(name for name, dtype in LISTS["cuda"].items() if dtype is Dtype.LOW), BIASED_PRODUCT, FUSED}
_CALLS = ("jit", "pjit", "checkpoint", "remat2")


class Probe(NamedTuple):
    """Zeros whose gradient is what is counted of a layer.

    Attributes:
      activations: float32[2, 2, bounds], the `count_from` of values and of their gradients.
      weights: The same of what is computed from parameters alone.
    """

    activations: Any
    weights: Any


class Probes(NamedTuple):
    """The probes of a program.

    Attributes:
      before: Of what comes before the first block; of all if there is no block.
      blocks: Of the blocks, with a leading axis, in order.
      after: Of what comes after the first block, outside of blocks.
    """

    before: Probe
    blocks: Probe
    after: Probe


def zero_probes(blocks: int, limits: Any) -> Probes:
    """Return the probes of a program with a number of blocks, for the limits of a dtype."""

    def zeros(*leading: int) -> Probe:
        array = jnp.zeros((*leading, 2, 2, len(bounds(limits))), np.float32)
        return Probe(array, array)

    return Probes(zeros(), zeros(blocks), zeros())


def blocks_of(traced: Jaxpr) -> int:
    """Return the number of marked blocks that a program runs; a scan of 12 layers runs 12."""
    return sum(map(_blocks_of_equation, traced.eqns))


def _blocks_of_equation(eqn: JaxprEqn) -> int:
    if jaxpr.is_call(eqn, BLOCK):
        return 1
    if eqn.primitive.name not in (*_CALLS, "scan"):
        return 0
    return eqn.params.get("length", 1) * sum(map(blocks_of, jaxpr.inner_jaxprs(eqn)))


def count_rounded(fn: Any, dtype: Any, limits: Any, probes: Probes, is_trained: Sequence[bool]) -> Any:
    """Make the gradients by `probes` of a function the histograms of its values in a dtype.

    Args:
      fn: A function of (params, …).
      dtype: The dtype of the values that are counted.
      limits: The dtype whose limits are counted.
      probes: Arrays of `zero_probes`, by which the result is differentiated.
      is_trained: For each leaf of the parameters, whether it has a gradient.

    Returns:
      The same function.
    """

    def evaluate(closed: ClosedJaxpr, leaves: list[Any]) -> list[Any]:
        params = [_Kind(is_weight=True, has_gradient=trained) for trained in is_trained]
        others = [_Kind(is_input=True)] * (len(leaves) - len(params))
        walk = _Walk(np.dtype(dtype), limits, probes)
        return walk.run(closed.jaxpr, closed.consts, leaves, [*params, *others])

    return jaxpr.retrace(fn, evaluate)


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

    def __init__(self, dtype: Any, limits: Any, probes: Probes) -> None:
        self._dtype, self._limits, self._blocks, self._after = dtype, limits, probes.blocks, probes.after
        self._probe, self._next_block, self._in_layers = probes.before, 0, False
        self._kinds: dict[Any, _Kind] = {}

    def run(self, traced: Jaxpr, consts: Sequence[Any], args: Sequence[Any], kinds: Sequence[_Kind]) -> list[Any]:
        self._kinds.update(zip(traced.invars, kinds, strict=True))
        return jaxpr.interpret(traced, consts, args, self._rule)

    def _kind(self, var: Any) -> _Kind:
        return _CONSTANT if isinstance(var, Literal) else self._kinds.get(var, _CONSTANT)

    def _rule(self, eqn: JaxprEqn, args: list[Any], run: jaxpr.Run) -> Sequence[Any] | None:
        kinds, name = [self._kind(v) for v in eqn.invars], eqn.primitive.name
        if name == "scan":
            return self._scan(eqn, args, kinds)
        if name in _CALLS:
            return self._call(eqn, args, kinds, run)
        if name in _PRODUCTS:
            args = [self._operand(v, x, kind) for v, x, kind in zip(eqn.invars, args, kinds, strict=True)]
        outs = jaxpr.bind(eqn, args)
        joined = _joined(kinds)
        self._kinds.update(dict.fromkeys(eqn.outvars, joined))
        return [self._result(v, x, joined) for v, x in zip(eqn.outvars, outs, strict=True)] if _rounds(eqn) else outs

    def _operand(self, var: Any, x: Any, kind: _Kind) -> Any:
        """Count a weight that has the dtype from the start."""
        is_weight = kind.is_weight and not kind.is_input and not kind.is_counted
        return self._result(var, x, kind) if is_weight else x

    def _result(self, var: Any, x: Any, kind: _Kind) -> Any:
        if getattr(x, "dtype", None) != self._dtype or not np.ndim(x) or isinstance(var, Literal):
            return x
        self._kinds[var] = kind._replace(is_counted=True)
        is_weight = kind.is_weight and not kind.is_input
        probe = self._probe.weights if is_weight else self._probe.activations
        return _counted(x, probe, self._limits, kind.has_gradient)

    def _call(self, eqn: JaxprEqn, args: list[Any], kinds: list[_Kind], run: jaxpr.Run) -> Sequence[Any]:
        (body,) = jaxpr.inner_jaxprs(eqn)
        self._kinds.update(zip(body.invars, kinds, strict=True))
        is_layer = jaxpr.is_call(eqn, BLOCK) and not self._in_layers
        if is_layer:
            self._probe = jax.tree.map(lambda x: x[self._next_block], self._blocks)
            self._next_block, self._in_layers = self._next_block + 1, True
        outs = jaxpr.HIGHER_ORDER[eqn.primitive.name](eqn, args, run)
        if is_layer:
            self._probe, self._in_layers = self._after, False
        self._kinds.update((out, self._kind(v)) for out, v in zip(eqn.outvars, body.outvars, strict=True))
        return outs

    def _scan(self, eqn: JaxprEqn, args: list[Any], kinds: list[_Kind]) -> list[Any]:
        closed, length = eqn.params["jaxpr"], eqn.params["length"]
        n_consts, n_carry = jaxpr.scan_sizes(eqn)
        body, n = closed.jaxpr, n_consts + n_carry
        carried = _joined(kinds)  # what the carry is computed from after the first step
        self._kinds.update(zip(body.invars, [*kinds[:n_consts], *[carried] * n_carry, *kinds[n:]], strict=True))
        per_step = 0 if self._in_layers else blocks_of(body)
        first, blocks = self._next_block, self._blocks
        own = jax.tree.map(
            lambda x: x[first : first + length * per_step].reshape(length, per_step, *x.shape[1:]), blocks
        )
        avals = closed.in_avals[n_consts:n]

        def step(carry: list[Any], slices: tuple[list[Any], Probe]) -> tuple[list[Any], list[Any]]:
            x, own_probes = slices
            if per_step:
                self._blocks, self._next_block = own_probes, 0
            inputs = [*args[:n_consts], *carry, *x]
            outs = jaxpr.interpret(body, closed.consts, inputs, self._rule)
            return jaxpr.cast_like(avals, outs[:n_carry]), outs[n_carry:]

        options = {key: eqn.params[key] for key in ("length", "reverse", "unroll")}
        carry, ys = lax.scan(step, jaxpr.cast_like(avals, args[n_consts:n]), (args[n:], own), **options)
        if per_step:
            self._blocks, self._next_block, self._probe = blocks, first + length * per_step, self._after
        self._kinds.update((out, carried) for out in eqn.outvars)
        return [*carry, *ys]


def _joined(kinds: Sequence[_Kind]) -> _Kind:
    joined = _CONSTANT
    for kind in kinds:
        joined = joined | kind
    return joined


def _rounds(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a product or a conversion between floating-point dtypes, or contains one."""
    if eqn.primitive.name in _PRODUCTS:
        return True
    if eqn.primitive.name == "convert_element_type":
        (operand,) = eqn.invars
        return jnp.issubdtype(operand.aval.dtype, np.floating)  # type: ignore[attr-defined]
    return any(_rounds(inner) for body in jaxpr.inner_jaxprs(eqn) for inner in body.eqns)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _counted(x: jax.Array, probe: jax.Array, limits: Any, has_gradient: bool) -> jax.Array:
    del probe, limits, has_gradient
    return x


def _counted_forward(x: jax.Array, probe: jax.Array, limits: Any, has_gradient: bool) -> tuple[jax.Array, jax.Array]:
    del probe, has_gradient
    return x, count_from(x, limits)


def _counted_backward(limits: Any, has_gradient: bool, counts: jax.Array, gradient: Any) -> tuple[Any, jax.Array]:
    of_gradient = count_from(gradient, limits) if has_gradient else jnp.zeros_like(counts)
    return gradient, jnp.stack([counts, of_gradient])


_counted.defvjp(_counted_forward, _counted_backward)
