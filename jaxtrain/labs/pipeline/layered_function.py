"""Split a function at its scan over layers: what comes before it, one stage of its layers, and what comes after it.

A model that scans over its layers has their parameters stacked, [layers, …]. The scan is found in the jaxpr: the one
whose inputs per step are computed from parameters alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

from jaxtrain.errors import UserError
from jaxtrain.program import equations, rewrite
from jaxtrain.program import operations as op


class LayeredFunction:
    """A function `fn(params, inputs)`, split at its scan over layers.

    Args:
      fn: The function of a list of arrays, the parameters, and of a pytree.
      params: Parameters, or their shapes.
      inputs: The other inputs, or their shapes.

    Attributes:
      layers: The number of layers.
      used_before: For each parameter, whether it is used before the scan, other than stacked.
      used_after: For each parameter, whether it is used after the scan.

    Raises:
      UserError: There is no scan over stacked parameters, or there are several.
    """

    def __init__(self, fn: Callable[..., Any], params: Sequence[Any], inputs: Any) -> None:
        traced = rewrite.transform(fn, _inline_calls_with_scans)
        closed, out_shape = rewrite.make_jaxpr(traced, return_shape=True)(list(params), inputs)
        self._jaxpr, self._consts, self._structure = closed.jaxpr, closed.consts, jax.tree.structure(out_shape)
        self._n = len(params)
        depends = _dependence(self._jaxpr, self._n)
        self._scan = _scan_over_layers(self._jaxpr, depends)
        n_consts, n_carry = equations.scan_sizes(self._scan)
        inputs_of_scan = self._scan.invars
        self._xs = inputs_of_scan[n_consts + n_carry :]
        self._is_stacked = [depends.get(v) == _PARAMS for v in self._xs]
        self._before = [*inputs_of_scan[: n_consts + n_carry], *self._of_stacks(self._xs, False)]
        self._sizes = n_consts, n_carry
        self.layers: int = equations.trip_count(self._scan)
        self.used_before = self._used(self._before)
        self.used_after = self._used(self._jaxpr.outvars)

    def stacks(self, params: Sequence[Any]) -> list[Any]:
        """Return the stacked parameters, [layers, …], computed from `params`."""
        return self._evaluate(self._of_stacks(self._xs, True), params, None)

    def pull_back_stacks(self, params: Sequence[Any], gradients: Sequence[jax.Array | None]) -> list[jax.Array]:
        """Return the gradient by `params`, from that by the stacked parameters, in the dtype of the latter.

        None stands for a stack without a gradient.
        """
        stacks = zip(self._of_stacks(self._xs, True), gradients, strict=True)
        given = [(v, g) for v, g in stacks if g is not None]
        dtype = jax.numpy.result_type(*(g for _, g in given))

        def unrounded(*params: Any) -> list[Any]:
            return self._evaluate([v for v, _ in given], params, None, _unrounded)

        floats = [jax.numpy.issubdtype(x.dtype, np.inexact) for x in params]
        _, pull_back = jax.vjp(unrounded, *(x.astype(dtype) if f else x for x, f in zip(params, floats, strict=True)))
        return list(pull_back([g for _, g in given]))

    def before(self, params: Sequence[Any], inputs: Any) -> tuple[list[Any], list[Any], list[Any]]:
        """Return what the scan reads besides its stacked parameters: constants, its first carry, inputs per layer."""
        values = self._evaluate(self._before, params, inputs)
        n_consts, n_carry = self._sizes
        return values[:n_consts], values[n_consts : n_consts + n_carry], values[n_consts + n_carry :]

    def apply(
        self, consts: Sequence[Any], carry: Sequence[Any], stacks: Sequence[Any], others: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Apply some layers to a carry.

        Args:
          consts: The constants of all layers.
          carry: The carry before the first of these layers.
          stacks: Their parameters.
          others: Their other inputs.

        Returns:
          The carry after them, and their outputs, [layers, …].
        """
        body = jaxpr_as_fun(equations.body(self._scan))
        parts = iter(stacks), iter(others)
        xs = [next(parts[0] if is_stacked else parts[1]) for is_stacked in self._is_stacked]

        def layer(carry: Sequence[Any], x: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            outs = body(*consts, *carry, *x)
            return outs[: len(carry)], outs[len(carry) :]

        last, ys = lax.scan(layer, list(carry), xs, unroll=equations.loop_options(self._scan)["unroll"])
        return last, ys

    def outputs(self) -> tuple[list[Any], list[Any]]:
        """Return the shapes of the scan's carry, and of the outputs of all layers, [layers, …]."""
        avals: list[Any] = [v.aval for v in self._scan.outvars]
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
        _, n_carry = self._sizes
        return shapes[:n_carry], shapes[n_carry:]

    def after(self, params: Sequence[Any], inputs: Any, carry: Sequence[Any], ys: Sequence[Any]) -> Any:
        """Return the results of the function, from the last carry and the outputs of all layers."""
        given = dict(zip(self._scan.outvars, [*carry, *ys], strict=True))
        return jax.tree.unflatten(self._structure, self._evaluate(self._jaxpr.outvars, params, inputs, given=given))

    def leaves_of_stacks(self) -> list[list[int]]:
        """Return for every stack the positions of the parameters that it is computed from."""
        return [[i for i, used in enumerate(self._used([v])) if used] for v in self._of_stacks(self._xs, True)]

    def _of_stacks(self, xs: Sequence[Any], stacked: bool) -> list[Any]:
        return [x for x, is_stacked in zip(xs, self._is_stacked, strict=True) if is_stacked == stacked]

    def _used(self, results: Sequence[Any]) -> list[bool]:
        _, read = _needed(self._jaxpr, results, {*self._scan.outvars})
        return [v in read for v in self._jaxpr.invars[: self._n]]

    def _evaluate(
        self,
        results: Sequence[Any],
        params: Sequence[Any],
        inputs: Any,
        rule: Callable[[JaxprEqn, list[Any]], list[Any] | None] | None = None,
        given: dict[Any, Any] | None = None,
    ) -> list[Any]:
        env = dict(zip(self._jaxpr.constvars, self._consts, strict=True))
        env |= zip(self._jaxpr.invars, [*params, *jax.tree.leaves(inputs)], strict=False)
        env |= given or {}
        equations, _ = _needed(self._jaxpr, results, {*env})
        for eqn in equations:
            args = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
            outs = rule(eqn, args) if rule is not None else None
            env |= zip(eqn.outvars, rewrite.bind(eqn, args) if outs is None else outs, strict=True)
        return [v.val if isinstance(v, Literal) else env[v] for v in results]


_PARAMS, _INPUTS = "params", "inputs"


def _inline_calls_with_scans(eqn: JaxprEqn, args: list[Any], run: rewrite.Run) -> list[Any] | None:
    if op.of(eqn) in op.CALLS and _has_scan(equations.body(eqn).jaxpr):
        body = equations.body(eqn)
        return run(body.jaxpr, body.consts, args)
    return rewrite.bind(eqn, args)


def _has_scan(traced: Jaxpr) -> bool:
    return any(
        op.of(eqn) == op.SCAN or (op.of(eqn) in op.CALLS and _has_scan(equations.body(eqn).jaxpr))
        for eqn in equations.of(traced)
    )


def _dependence(traced: Jaxpr, n_params: int) -> dict[Any, str]:
    """Return for every variable whether it depends on inputs, or else on parameters; none for constants."""
    depends = dict.fromkeys(traced.invars[:n_params], _PARAMS) | dict.fromkeys(traced.invars[n_params:], _INPUTS)
    for eqn in equations.of(traced):
        of = {depends.get(v) for v in eqn.invars if not isinstance(v, Literal)}
        found = _INPUTS if _INPUTS in of else _PARAMS if _PARAMS in of else None
        if found:
            depends |= dict.fromkeys(eqn.outvars, found)
    return depends


def _scan_over_layers(traced: Jaxpr, depends: dict[Any, str]) -> JaxprEqn:
    def is_over_layers(eqn: JaxprEqn) -> bool:
        if op.of(eqn) != op.SCAN or equations.is_reversed(eqn):
            return False
        xs = eqn.invars[sum(equations.scan_sizes(eqn)) :]
        return any(not isinstance(v, Literal) and depends.get(v) == _PARAMS for v in xs)

    scans = [eqn for eqn in equations.of(traced) if is_over_layers(eqn)]
    if len(scans) != 1:
        found = "no scan over stacked layers" if not scans else f"{len(scans)} scans over stacked layers"
        raise UserError(
            f"the mesh axis pipeline divides one scan over layers, and this loss_fn has {found}: "
            "put its devices on data or fsdp"
        )
    (scan,) = scans
    return scan


def _needed(traced: Jaxpr, results: Sequence[Any], given: set[Any]) -> tuple[list[JaxprEqn], set[Any]]:
    """Return the equations that compute `results` from `given` variables, and the variables that they read."""
    read = {v for v in results if not isinstance(v, Literal)}
    needed = []
    for eqn in reversed(equations.of(traced)):
        if any(v in read and v not in given for v in eqn.outvars):
            needed.append(eqn)
            read |= {v for v in eqn.invars if not isinstance(v, Literal)}
    return needed[::-1], read


def _unrounded(eqn: JaxprEqn, args: list[Any]) -> list[Any] | None:
    """Leave out conversions: a gradient that passes them keeps its precision."""
    return args if op.of(eqn) == op.CONVERT_ELEMENT_TYPE else None
