"""Equal values of a jaxpr, computed once: also where a scan stores them for another scan.

XLA merges equal computations, but not the arrays that a loop writes, nor what another loop computes from them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from jaxtrain.program import equations, rewrite
from jaxtrain.program import operations as op


class Equal:
    """The values of a jaxpr by what they are computed from."""

    def __init__(self) -> None:
        self._values: dict[Any, tuple[Sequence[Any], Sequence[Any]]] = {}  # with the operands, which stay alive

    def merged(self, eqn: JaxprEqn, args: Sequence[Any], compute: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        """Return the results of an equation, those of an equal one if there was any."""
        key = op.of(eqn), str(equations.params(eqn)), tuple(map(_identity, args))
        if key not in self._values:
            self._values[key] = args, compute()
        return self._values[key][1]


def scan_merged(eqn: JaxprEqn, args: list[Any], run: rewrite.Run) -> list[Any]:
    """Evaluate a scan, whose equal operands are one to its body, and whose equal results are one.

    Args:
      eqn: The scan.
      args: Its operands.
      run: Evaluates its body.
    """
    n_consts, n_carry = equations.scan_sizes(eqn)
    is_carry = [n_consts <= i < n_consts + n_carry for i in range(len(args))]
    operands = _first_equal([(i if is_carry[i] else i >= n_consts, id(x)) for i, x in enumerate(args)])
    results: list[int] = []

    def body(traced: Any, consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        outs = run(traced, consts, [values[i] for i in operands])
        results[:] = _first_equal([(i if i < n_carry else -1, id(x)) for i, x in enumerate(outs)])
        return outs

    outs = rewrite.HIGHER_ORDER[op.SCAN](eqn, args, body)
    return [outs[i] for i in results]


def _first_equal(keys: Sequence[Any]) -> list[int]:
    """Return for each key the index of the first one that is equal.

    >>> _first_equal(["a", "b", "a"])
    [0, 1, 0]
    """
    first: dict[Any, int] = {}
    return [first.setdefault(key, i) for i, key in enumerate(keys)]


def _identity(x: Any) -> Any:
    return id(x) if isinstance(x, jax.Array) else repr(x)
