"""What makes a loss NaN or inf, as far as its batch tells; a warning if it is the first one.

Under jit a value cannot raise an error. The first call of a step compiles it: waiting for its loss costs little more.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxtrain.errors import warn_user
from jaxtrain.paths import path_name
from jaxtrain.step.checks.mistakes import is_concrete, is_number

IGNORED = -100
"""Label that PyTorch's cross-entropy leaves out of its mean."""


def cause_in_batch(loss: Any, batch: Any, *, ranges: bool = True) -> str | None:
    """Return what a batch holds that makes its loss NaN or inf, with the remedy.

    Args:
      loss: The loss.
      batch: The batch.
      ranges: Whether integers, which may be out of range, are a cause.

    Returns:
      The end of a sentence that begins with the loss; None for a finite loss, or a batch without a likely cause.

    Example:
      >>> cause_in_batch(np.nan, {"x": np.array([1, np.nan]), "y": np.array([0, 7])})
      'and so are values of the batch, in x: leave out their rows, or replace them by jnp.where before the loss'
    """
    if np.isfinite(np.asarray(loss)):
        return None
    arrays = {
        path_name(path) or "batch": np.asarray(leaf)
        for path, leaf in jax.tree.leaves_with_path(batch)
        if is_number(leaf) and getattr(leaf, "is_fully_addressable", True) and np.size(leaf)
    }
    bad = [name for name, x in arrays.items() if jax.numpy.issubdtype(x.dtype, np.inexact) and not np.isfinite(x).all()]
    if bad:
        return (
            f"and so are values of the batch, in {', '.join(bad)}: leave out their rows, or replace them by jnp.where "
            "before the loss"
        )
    held = [f"{name} from {x.min()} to {x.max()}" for name, x in arrays.items() if x.dtype.kind in "iu"]
    if ranges and held and np.isnan(np.asarray(loss)):
        return (
            "as a label outside 0..classes - 1 or an index outside an array makes it: the batch holds "
            f"{', '.join(held)}; check their range"
        )
    return None


def failed_assumption(loss_fn: Any, loss: Any, batch: Any) -> str | None:
    """Return which assumption of a loss_fn a batch does not fulfil, which makes its loss NaN.

    Args:
      loss_fn: The loss_fn. It may have an attribute `failed_assumption`, from a batch to a sentence or None.
      loss: The loss.
      batch: The batch.

    Returns:
      The end of a sentence that begins with the loss; None if the loss is not NaN, or all assumptions hold.

    Example:
      >>> def loss_fn(params, batch, rng): ...
      >>> loss_fn.failed_assumption = lambda batch: "the batch has 2 rows, not 4" if len(batch) != 4 else None
      >>> failed_assumption(loss_fn, np.nan, np.zeros(2))
      'because the batch has 2 rows, not 4'
    """
    check = getattr(loss_fn, "failed_assumption", None)
    if check is None or not np.isnan(np.asarray(loss)):
        return None
    found = check(batch)
    return None if found is None else f"because {found}"


def warn_of_first_loss(metrics: Mapping[str, Any], batch: Any, loss_fn: Any = None) -> None:
    """Warn if the first loss of a training is not finite and the batch holds a likely cause, or counts ignored labels.

    Called after the first call of a step; that of a resumed run is not the first of its training. A skipped update
    changed nothing, and may be that of a loss scale that is still too large, unless an assumption of loss_fn fails.
    """
    loss = metrics["loss"]
    if not is_concrete(loss) or int(metrics["attempted"]) > 1:
        return
    if cause := failed_assumption(loss_fn, loss, batch):
        warn_user(f"the first loss is {loss}, {cause}")
        return
    if metrics["skipped"]:
        return
    if name := _counted_labels(float(metrics["weight"]), batch):
        warn_user(
            f"the weight of the loss counts labels of {IGNORED} at {name}, which are no part of PyTorch's mean: use "
            f"Loss.of(losses, labels != {IGNORED}), or the sum of losses.label_weights(labels) as the weight"
        )
    if cause := cause_in_batch(loss, batch):
        warn_user(f"the first loss is {loss}, {cause}")


def _counted_labels(weight: float, batch: Any) -> str | None:
    """Return the labels of a batch of which some are to be ignored, but all are counted in the weight; None if not.

    Of a language model the first label of each row is not predicted.
    """
    for path, leaf in jax.tree.leaves_with_path(batch):
        if not (is_number(leaf) and getattr(leaf, "is_fully_addressable", True) and np.size(leaf) and np.ndim(leaf)):
            continue
        x = np.asarray(leaf)
        is_label = x.dtype.kind == "i" and x.min() == IGNORED and bool(((x == IGNORED) | (x >= 0)).all())
        predicted = [x, x[..., 1:]] if x.ndim > 1 else [x]
        right = [np.count_nonzero(y != IGNORED) for y in predicted]
        if is_label and weight in [y.size for y in predicted] and weight not in right:
            return path_name(path) or "batch"
    return None
