"""Watch the selections of a JAX program, also those that NumPy computes while JAX traces it.

The loss is traced with abstract parameters and a concrete batch, without `jit` and with short loops unrolled, so that
whatever depends on no parameter is a value.
"""

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain import losses
from jaxtrain.program.rewrite import make_jaxpr
from parity.case import Batch, Case
from parity.sides import jax_side
from parity.sides.jax_lines import libraries
from parity.unexercised.selections import Selections, caller

UNROLLED = 64
"""Largest number of iterations of a loop that is unrolled: loops over layers are, those over time are not."""
Conditions = Iterator[tuple[str, tuple[Any, ...]]]
"""What each condition is, and its values or the two arrays of which the first is to be smaller."""

logger = logging.getLogger(__name__)


def watch_jax(case: Case, batch: Batch, seed: int, selections: Selections) -> None:
    """Record the selections in tracing the loss of a batch.

    A program that cannot be traced in this way, without `jit`, is left out; the exception is logged at level INFO.
    """

    def loss(params: Any, rng: jax.Array, *state: Any) -> Any:
        return case.loss_fn(params, jax_side.arrays(batch, "fp32"), rng, *state)

    state = () if case.state_like is None else (case.state_like,)
    with contextlib.ExitStack() as stack:
        for context in (jax.disable_jit(), jax.ensure_compile_time_eval(), jax.numpy_dtype_promotion("standard")):
            stack.enter_context(context)
        for name, length in LOOPS.items():
            stack.enter_context(mock.patch.object(lax, name, _unrolled_if_short(getattr(lax, name), length)))
        for (module, name), conditions in SELECTIONS.items():
            watched = _Watched(getattr(module, name), f"of {name}", conditions, selections)
            stack.enter_context(mock.patch.object(module, name, watched))
        try:
            make_jaxpr(loss)(case.params_like, jax.eval_shape(jax.random.key, seed), *state)
        except Exception as error:  # of the user's program, in a mode that it was not written for
            logger.info("%s: not traced without jit: %s: %s", case.name, type(error).__name__, error)


def _unrolled_if_short(loop: Callable[..., Any], length: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        with jax.disable_jit(length(*args, **kwargs) <= UNROLLED):
            return loop(*args, **kwargs)

    return called


def _scan_length(f: Any, init: Any, xs: Any = None, length: int | None = None, **options: Any) -> int:
    return len(jax.tree.leaves(xs)[0]) if length is None else length


def _map_length(f: Any, xs: Any, **options: Any) -> int:
    return len(jax.tree.leaves(xs)[0])


def _fori_length(lower: Any, upper: Any, *args: Any, **options: Any) -> Any:
    is_known = not any(isinstance(bound, jax.core.Tracer) for bound in (lower, upper))
    return upper - lower if is_known else UNROLLED + 1


LOOPS: Mapping[str, Callable[..., Any]] = {"scan": _scan_length, "map": _map_length, "fori_loop": _fori_length}
"""By name in `jax.lax`, from the arguments of a loop to its number of iterations."""


@functools.cache
def _is_watched(file: str) -> bool:
    """Return whether a file's selections are reported: not a library's, nor the losses' (`conditions`)."""
    folders = (*libraries(), *map(Path, np.__path__), *map(Path, losses.__path__))
    return not any(Path(file).is_relative_to(folder) for folder in folders)


class _Watched:
    """A function whose calls in user code are recorded; in everything else the function itself."""

    def __init__(
        self, function: Callable[..., Any], what: str, conditions: Callable[..., Conditions], selections: Selections
    ) -> None:
        self._function, self._what, self._conditions, self._selections = function, what, conditions, selections

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        at = caller(sys._getframe(1), ())
        if at is not None and _is_watched(at[0]):
            for what, values in self._conditions(*args, **kwargs):
                self._add(f"{what} {self._what}", at, values)
        return self._function(*args, **kwargs)

    def _add(self, what: str, at: tuple[str, int], values: tuple[Any, ...]) -> None:
        if any(isinstance(x, jax.core.Tracer) for x in values):
            return
        condition = np.less(*values) if len(values) == 2 else np.asarray(*values)
        if condition.size:
            self._selections.add(what, *at, condition.astype(bool))


def _where(condition: Any, *values: Any, **options: Any) -> Conditions:
    if values:  # without them it returns indices
        yield "condition", (condition,)


def _clip(arr: Any = None, min: Any = None, max: Any = None, **options: Any) -> Conditions:
    min, max = options.get("a_min", min), options.get("a_max", max)
    if min is not None:
        yield "x < min", (arr, min)
    if max is not None:
        yield "x > max", (max, arr)


def _minimum(x: Any, y: Any, *out: Any, **options: Any) -> Conditions:
    yield "x < y", (x, y)


def _maximum(x: Any, y: Any, *out: Any, **options: Any) -> Conditions:
    yield "x > y", (y, x)


SELECTIONS: Mapping[tuple[ModuleType, str], Callable[..., Conditions]] = {
    (lax, "select"): _where,
    **{(module, "where"): _where for module in (np, jnp)},
    **{(module, "clip"): _clip for module in (np, jnp)},
    **{(module, "minimum"): _minimum for module in (np, jnp)},
    **{(module, "maximum"): _maximum for module in (np, jnp)},
}
