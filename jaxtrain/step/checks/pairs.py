"""Recognize a loss of every pair of rows: predictions [B, 1] minus targets [B], or times them, are [B, B], silently.

Written out, as `y[None, :]`, pairs are meant; what is recognized is NumPy's promotion of a rank, which JAX reports if
asked. It is asked, by calling the loss once more, only if the total is a sum over [B, B].
"""

import itertools
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata

from jaxtrain.errors import warn_user
from jaxtrain.step.checks.means import traced_operation
from jaxtrain.step.checks.mistakes import location_of

_MAX_OPERATIONS = 100
_CALLS = itertools.count()
_PAIRED = ("subtract", "divide", "true_divide", "multiply")


def warn_of_pairs(loss_fn: Callable[..., Any], args: tuple[Any, ...], loss: Any) -> None:
    """Warn of a traced loss that takes the difference, the ratio or the product of every pair of rows of the batch.

    Args:
      loss_fn: The loss function.
      args: Its arguments (params, batch, …), traced.
      loss: The `Loss` that it has returned for them.
    """
    rows = next((x.shape[0] for x in jax.tree.leaves(args[1]) if np.ndim(x)), 0)
    if rows < 2 or not _sums_pairs(loss.total, rows):
        return
    # A context of its own, without which JAX would reuse the traces of its functions, and not warn again.
    fresh = set_xla_metadata(pairs_of_rows=str(next(_CALLS)))
    with warnings.catch_warnings(record=True) as caught, jax.numpy_rank_promotion("warn"), fresh:
        warnings.simplefilter("always")
        # In a trace of its own: the operations of this call are no part of the step.
        jax.eval_shape(lambda *args: loss_fn(*args) and (), *args)
    for warning in caught:
        found = re.search(r"rank promotion for (\w+) on shapes (\(.*\))\.", str(warning.message))
        if found and found[1] in _PAIRED and sorted(_shapes(found[2])) == [(rows,), (rows, 1)]:
            warn_user(
                f"{found[1]} of shapes {found[2]} in loss_fn at {location_of(loss_fn)} gives a loss for every pair of "
                "rows: remove an axis, as in x[:, 0], or write y[None, :] if pairs are meant"
            )
            return


def _sums_pairs(total: Any, rows: int) -> bool:
    """Return whether a traced value is computed from one of shape [rows, rows], by the last operations."""
    values, seen = [total], 0
    while values and seen < _MAX_OPERATIONS:
        name, inputs = traced_operation(values.pop(0))
        if name is not None:
            seen += 1
            if any(np.shape(x) == (rows, rows) for x in inputs):
                return True
            values.extend(inputs)
    return False


def _shapes(text: str) -> list[tuple[int, ...]]:
    return [tuple(int(n) for n in re.findall(r"\d+", shape)) for shape in re.findall(r"\([^)]*\)", text)]
