"""Names of jitted functions by which passes find in a program what another package or pass has put there."""

from jax.extend.core import JaxprEqn

from jaxtrain.program import equations
from jaxtrain.program import operations as op

GATHERED_COPY = "gathered_copy"
"""Name of a jitted function of a parameter and its copy that returns the copy."""

DIVIDED_LOOKUP = "divided_lookup"
"""Name of a jitted function of a table and indices that looks up rows, and moves them between devices meanwhile."""


def looks_up(eqn: JaxprEqn, i: int) -> bool:
    """Return whether an equation looks up rows of operand i."""
    return i == 0 and (op.of(eqn) == op.GATHER or equations.is_call(eqn, DIVIDED_LOOKUP))
