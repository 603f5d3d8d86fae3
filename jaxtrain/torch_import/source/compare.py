"""Equality of jaxprs, up to the names of variables and the order of independent equations."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

Program = Any
"""A closed jaxpr."""


def fingerprint(program: Program) -> tuple[tuple[int, ...], int]:
    """Return numbers that are equal for equal programs: one for each output, and that of the equations they need.

    Names of variables and functions, source lines and unused equations do not count.
    """
    needed: set[int] = set()
    outputs = _outputs(program.jaxpr, program.consts, [hash(("input", i)) for i, _ in enumerate(program.jaxpr.invars)])
    _collect(program.jaxpr, needed)
    return tuple(outputs), len(needed)


def _outputs(jaxpr: Any, consts: Sequence[Any], inputs: Sequence[int]) -> list[int]:
    values: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))
    values |= {var: _constant(x) for var, x in zip(jaxpr.constvars, consts, strict=True)}

    def read(atom: Any) -> int:
        return values[atom] if atom in values else _constant(atom.val)

    def read_any(atom: Any) -> int:
        return _constant(atom.val) if hasattr(atom, "val") else read(atom)

    for eqn in jaxpr.eqns:
        operands = tuple(read_any(atom) for atom in eqn.invars)
        given = tuple(sorted((name, _parameter(value)) for name, value in eqn.params.items() if name != "name"))
        key = (eqn.primitive.name, operands, given)
        for i, var in enumerate(eqn.outvars):
            values[var] = hash((key, i))
    return [read_any(atom) for atom in jaxpr.outvars]


def _collect(jaxpr: Any, needed: set[int]) -> None:
    """Add the equations that the outputs need."""
    used = {var for var in jaxpr.outvars if not hasattr(var, "val")}
    for i, eqn in reversed([*enumerate(jaxpr.eqns)]):
        if any(var in used for var in eqn.outvars):
            needed.add(i)
            used.update(var for var in eqn.invars if not hasattr(var, "val"))


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
