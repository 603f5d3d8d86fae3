"""Recognize means and counts among traced values.

A `Loss` of a mean and a weight above 1 trains with too small a gradient, one of integers not at all.

JAX records for every traced value the operation that computed it, as `tracer.parent`. This is read, instead of tracing
the loss a second time, and is listed in `program/internals.py`: without it nothing is recognized.
"""

import math
from typing import Any

import numpy as np

from jaxtrain.program import operations as op

SAME_VALUES = frozenset({op.CONVERT_ELEMENT_TYPE, op.NEG, op.COPY, op.RESHAPE, op.SQUEEZE, op.REDUCE_PRECISION})
"""Operations of which a mean is still a mean, up to its sign."""


def averaged_elements(loss: Any) -> int | None:
    """Return the number of elements that a loss's total is a mean over, if its weight counts them too; else None.

    Only what is certain is reported: the total is the sum of n elements over the constant n, or a sum of such means,
    and the weight a constant above 1 that divides n, as the number of rows of [B, T] does.
    """
    weight = _constant(loss.weight)
    if weight is None or weight <= 1:
        return None
    size = _mean_over(loss.total)
    return size if size and size % weight == 0 else None


def is_of_integers(total: Any) -> bool:
    """Return whether a traced total is a sum of integers or booleans, which have no gradient."""
    while True:
        operation, inputs = traced_operation(total)
        if operation not in SAME_VALUES | {op.REDUCE_SUM}:
            return False
        total = inputs[0]
        if getattr(total, "dtype", np.dtype(np.float32)).kind in "biu":
            return True


def _mean_over(x: Any) -> int | None:
    """Return the number of elements that a traced scalar is the mean of; None if it is no mean."""
    operation, inputs = traced_operation(x)
    if operation is None:
        return None
    if operation in SAME_VALUES:
        return _mean_over(inputs[0])
    if operation in (op.ADD, op.SUB):
        sizes = [_mean_over(y) for y in inputs]
        return sizes[0] if sizes[0] == sizes[1] else None
    if operation == op.DIV and (divisor := _constant(inputs[1])):
        return int(divisor) if _summed_elements(inputs[0]) == divisor else None
    return None


def _summed_elements(x: Any) -> int | None:
    operation, inputs = traced_operation(x)
    if operation == op.REDUCE_SUM:
        return math.prod(inputs[0].shape) if x.shape == () else None
    return _summed_elements(inputs[0]) if operation in SAME_VALUES else None


def traced_operation(x: Any) -> tuple[str | None, Any]:
    """Return the name and the inputs of the operation that computed a traced value."""
    # Differentiation wraps the traced value.
    while hasattr(x, "primal"):
        x = x.primal
    equation: Any = getattr(x, "parent", None)
    try:
        return op.of(equation), equation.in_tracers
    except AttributeError:
        return None, ()


def _constant(x: Any) -> float | None:
    """Return the value of a number, or of a traced literal; None for other values."""
    # A literal among the inputs of an operation, a tracer or the literal itself.
    for _ in range(3):
        if isinstance(x, bool | int | float | np.number) or (isinstance(x, np.ndarray) and x.shape == ()):
            return float(x)
        x = getattr(x, "val", None)
    return None
