"""Equality of jaxprs, up to names and the order of independent equations and of what calls and loops take."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from jaxtrain.passes import BLOCK, RECOMPUTED
from jaxtrain.program import equations
from jaxtrain.program import operations as op
from jaxtrain.program.equations import scan_sizes

Program = Any
"""A closed jaxpr."""


def fingerprint(program: Program) -> tuple[tuple[int, ...], int]:
    """Return numbers that are equal for equal programs: one for each output, and that of the equations they need.

    Names of variables and functions, source lines, unused equations, and the order of the operands of calls and of what
    loops carry do not count. Names that mark blocks for rematerialization and formulas to compute again do.
    """
    jaxpr, _ = dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars), instantiate=True)
    inputs = [hash(("input", i)) for i, _ in enumerate(jaxpr.invars)]
    return tuple(_outputs(jaxpr, program.consts, inputs)), _count(jaxpr)


def _outputs(jaxpr: Any, consts: Sequence[Any], inputs: Sequence[int]) -> list[int]:
    """Return the numbers of a jaxpr's outputs, given those of its inputs."""
    values: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))
    values |= {var: _constant(x) for var, x in zip(jaxpr.constvars, consts, strict=True)}

    def read(atom: Any) -> int:
        return _constant(atom.val) if hasattr(atom, "val") else values[atom]

    for eqn in equations.of(jaxpr):
        results = _results(eqn, [read(atom) for atom in eqn.invars])
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _results(eqn: Any, operands: list[int]) -> list[int]:
    """Return the numbers of an equation's results."""
    name = op.of(eqn)
    if name == op.IOTA:
        return [_constant(_positions(equations.params(eqn)))]
    if name == op.SCAN:
        return _scanned(eqn, operands)
    if name in op.APPLICATIONS:
        body, consts = _closed(equations.body(eqn))
        mark = _mark(equations.label(eqn)) if name == op.JIT else ""
        return [hash((name, mark, x)) for x in _outputs(body, consts, operands)]
    given = tuple(sorted((key, _parameter(value)) for key, value in equations.params(eqn).items() if key != "name"))
    return [hash((name, tuple(operands), given, i)) for i, _ in enumerate(eqn.outvars)]


def _positions(params: Any) -> np.ndarray:
    """Return the array of an `iota`, which is the same as a constant."""
    axis, shape = params["dimension"], params["shape"]
    along = np.arange(shape[axis], dtype=params["dtype"]).reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return np.broadcast_to(along, shape)


def _mark(name: str) -> str:
    """Return what the name of a jitted function says about it."""
    return next((mark for mark in (BLOCK, RECOMPUTED) if name.startswith(mark)), "")


def _scanned(eqn: Any, operands: Sequence[int]) -> list[int]:
    """Return the numbers of a scan's results.

    A carried value has the number of its initial value and of what replaces it, which depends on the others': two of
    them are the same if no number of steps tells them apart.
    """
    params = equations.params(eqn)
    (body, consts), (first, count) = _closed(params["jaxpr"]), scan_sizes(eqn)
    closed, start, slices = operands[:first], operands[first : first + count], operands[first + count :]
    whole = (params["length"], params["reverse"], params["unroll"])
    carried = [hash(("carry", x)) for x in start]
    for _ in range(count + 1):
        results = _outputs(body, consts, [*closed, *carried, *(hash((op.SLICE, x)) for x in slices)])
        carried = [hash(pair) for pair in zip(carried, results, strict=False)]
    return [hash((op.SCAN, whole, x)) for x in (*carried, *results[count:])]


def _closed(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    return (jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, "consts") else (jaxpr, [])


def _count(jaxpr: Any) -> int:
    """Return the number of equations in a jaxpr and those inside it, without calls and constants."""
    return sum(op.of(eqn) not in (*op.APPLICATIONS, op.IOTA) for eqn in equations.visit(jaxpr))


def _constant(value: Any) -> int:
    array = np.asarray(value)
    return hash(("constant", array.shape, str(array.dtype), array.tobytes()))


def _parameter(value: Any) -> int:
    """Return a number for a parameter of an equation. Functions are compared by the jaxprs beside them."""
    if hasattr(value, "jaxpr") and hasattr(value, "consts"):
        return hash(fingerprint(value))
    if hasattr(value, "eqns"):
        return hash(tuple(_outputs(value, [], [hash(("input", i)) for i, _ in enumerate(value.invars)])))
    if isinstance(value, tuple | list):
        return hash(tuple(map(_parameter, value)))
    if isinstance(value, dict):
        return hash(tuple(sorted((key, _parameter(item)) for key, item in value.items())))
    if isinstance(value, np.ndarray | jax.Array):
        return _constant(value)
    if callable(value) and not isinstance(value, type):
        return hash("function")
    return hash(repr(value))
