"""What an imported module returns in evaluation, beside the user's own module.

A training run compares what the loss shows, in float64 and on batches like the example. Here every output is compared
by name, with the weights and the statistics at the end of such a run: in float64, where integers must be equal, on the
run's batches, on fewer rows and with other padding, with the gradients of a sum in which every element has a weight of
its own; and in the numbers that users train in, PyTorch's with the module's own dtypes and JAX's in 32 bits, where an
integer that wraps or a float64 that is rounded shows.
"""

import logging
import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jaxtrain.errors import UserError
from jaxtrain.torch_import import set_tensors, tensors_of
from parity.bars import LAST_BAR, SINGLE
from parity.case import Batch, Case, Outputs
from parity.cases.named_outputs import named_outputs
from parity.compare.verdict import relative
from parity.oracle.compiled import jit, jit_as_written
from parity.oracle.in_jax import in_float64
from parity.oracle.in_torch import InFloat64
from parity.record import Snapshot, Tensors
from parity.sides import jax_side
from parity.sides.randomness import Draws
from parity.sides.torch_side import few_threads, in_dtype, seeded_model, tensor, trained_parameters, with_counterpart
from parity.unexercised.conditions import REFUSALS, ragged

BATCHES = 2
"""Number of batches of each kind."""
GROSS = 1e-4
"""Distance of 32-bit outputs from float64, relative to them, that may be a fault: far above rounding."""
NOISE = 100.0
"""The same, in units of PyTorch's own distance and of what one ulp of float32 in weights and inputs causes."""
NUDGES = 2
"""Number of PyTorch's runs from weights and inputs one ulp off."""

logger = logging.getLogger(__name__)


def compare_outputs(case: Case, trained: Snapshot, bar: float = LAST_BAR) -> tuple[list[str], list[str]]:
    """Compare the outputs of a case in evaluation.

    Args:
      case: The case of an imported module.
      trained: Parameters and buffers to evaluate with, by PyTorch's names.
      bar: Largest relative distance in float64.

    Returns:
      A tuple (a line for each difference, a line for each comparison that was not made).
    """
    assert case.outputs is not None
    weights, exact = _own_weights(case, trained), jit(_with_gradients(in_float64(case.outputs.in_jax)))
    faults: list[str] = []
    try:
        for kind, batches in _batches(case.outputs):
            theirs = _in_torch(case, weights, batches, "fp64")
            if theirs is None:  # what PyTorch itself refuses says nothing about the import
                continue
            ours, gradients = zip(*_in_jax(exact, case, weights, batches, "fp64"), strict=True)
            if theirs.draws:
                return ["evaluation: PyTorch's module draws random numbers, which the imported one leaves out"], []
            faults += _apart(kind, ours, theirs.outputs, bar)
            faults += [] if faults else _gradients_apart(kind, gradients, theirs.gradients, bar)
            if kind == USUAL and not faults:
                faults += _in_own_numbers(case, weights, batches, theirs.outputs)
    except UserError as error:
        return faults, [f"outputs in evaluation were not compared: {error}"]
    return faults, []


USUAL = ""


class Evaluated(NamedTuple):
    """PyTorch's outputs of each batch, the gradients of trained parameters, none if it has no derivative, and the
    number of its draws of random numbers that differ between calls."""

    outputs: list[Tensors]
    gradients: list[Tensors]
    draws: int


def _batches(outputs: Outputs) -> Iterator[tuple[str, list[Batch]]]:
    """Yield the batches of each kind."""
    usual: list[Batch] = [outputs.batch(seed, outputs.rows) for seed in range(BATCHES)]
    yield USUAL, usual
    padded: list[Batch] = [{name: ragged(x) for name, x in batch.items()} for batch in usual]
    if any(not np.array_equal(x, padded[0][name]) for name, x in usual[0].items()):
        yield " with other padding", padded
    if outputs.rows > 1 and not outputs.fixed_rows:
        yield " of fewer rows", [outputs.batch(BATCHES, outputs.rows - 1)]


def _own_weights(case: Case, trained: Snapshot) -> Tensors:
    """Return the parameters and buffers of a float64 run as the user's module holds them, in its own dtypes."""
    with seeded_model(case, 0) as model:
        _load(case, model, {**trained.params, **trained.buffers})
        return with_counterpart(case, model, {name: _array(x) for name, x in _tensors(case, model).items()})


def _tensors(case: Case, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers()), **tensors_of(model, case.buffer_names)}


def _load(case: Case, model: torch.nn.Module, tensors: Tensors) -> None:
    own = _tensors(case, model)
    set_tensors(model, {name: torch.from_numpy(np.asarray(x)) for name, x in tensors.items() if name in own})


def _in_torch(
    case: Case, weights: Tensors, batches: Sequence[Batch], precision: str, nudge: int | None = None
) -> Evaluated | None:
    """Evaluate batches in PyTorch; None if it refuses one."""
    assert case.outputs is not None
    rng = None if nudge is None else np.random.default_rng(nudge)
    with seeded_model(case, 0) as model:
        start = {name: _nudged(x, rng) for name, x in weights.items()}
        _load(case, model, start)
        in_dtype(case, model, torch.float64 if precision == "fp64" else torch.float32).eval()
        found, gradients, draws = list[Tensors](), list[Tensors](), Draws()
        for batch in batches:
            # Each from the same state, which a module may change in evaluation as well.
            _load(case, model, {name: start[name] for name in case.buffer_names})
            given = {name: tensor(_nudged(x, rng), precision) for name, x in batch.items()}
            exact = precision == "fp64"
            try:
                with few_threads(model), InFloat64() if exact else nullcontext(), torch.set_grad_enabled(exact), draws:
                    outputs = named_outputs(case.outputs.in_torch(model, given))
                    found.append({name: _array(x) for name, x in outputs.items()})
                    gradients.append(_gradients(case, model, outputs) if exact else {})
            except REFUSALS as error:
                logger.info("%s: refused by PyTorch: %s: %s", case.name, type(error).__name__, error)
                return None
        return Evaluated(found, gradients, draws.drawn)


def _gradients(case: Case, model: torch.nn.Module, outputs: Tensors) -> Tensors:
    trained = {name: p for name, p in trained_parameters(case, model) if p.requires_grad}
    total = torch.zeros(())
    for name, x in outputs.items():
        if isinstance(x, torch.Tensor) and x.requires_grad:
            real = torch.view_as_real(x) if x.is_complex() else x
            total = total + (real * torch.from_numpy(_weights(name, tuple(real.shape)))).sum()
    if not total.requires_grad:
        return {name: np.zeros(p.shape) for name, p in trained.items()}
    try:
        found = torch.autograd.grad(total, [*trained.values()], allow_unused=True)
    except RuntimeError as error:  # an operation without a derivative
        logger.info("no gradient in evaluation: %s", error)
        return {}
    grads = zip(trained.items(), found, strict=True)
    return {name: np.zeros(p.shape) if grad is None else _array(grad) for (name, p), grad in grads}


def _weights(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a weight for every element of an output."""
    first = zlib.crc32(name.encode()) % 1000
    return np.cos(np.arange(first, first + math.prod(shape), dtype=np.float64)).reshape(shape)


def _with_gradients(fn: Any) -> Any:
    """Return a function to the outputs of `fn`, and to the gradients of their weighted sum."""

    def total(params: Any, batch: Any, state: Any) -> Any:
        outputs, found = fn(params, batch, state), jnp.zeros(())
        for name, x in named_outputs(outputs).items():
            if jnp.issubdtype(x.dtype, jnp.inexact):
                real = jnp.stack([x.real, x.imag], -1) if jnp.iscomplexobj(x) else x
                found = found + (real * _weights(name, real.shape)).sum()
        return found, outputs

    def with_gradients(params: Any, batch: Any, state: Any) -> Any:
        gradients, outputs = jax.grad(total, has_aux=True)(params, batch, state)
        return outputs, jax.tree.map(jnp.conj, gradients)  # PyTorch's convention

    return with_gradients


def _nudged(x: np.ndarray, rng: np.random.Generator | None) -> np.ndarray:
    """Return floats that are off by one ulp of float32, up or down at random."""
    if rng is None or not np.issubdtype(x.dtype, np.inexact):
        return x
    return (x * (1 + SINGLE * rng.choice([-1.0, 1.0], x.shape))).astype(x.dtype)


def _named(outputs: Any) -> Tensors:
    return {name: _array(x) for name, x in named_outputs(outputs).items()}


def _array(x: Any) -> np.ndarray:
    if not isinstance(x, torch.Tensor):
        return np.asarray(x)
    x = x.detach().resolve_conj().resolve_neg()
    # NumPy has no bfloat16.
    return (x.float() if x.dtype == torch.bfloat16 else x).numpy().copy()  # the memory may be the module's


def _in_jax(fn: Any, case: Case, weights: Tensors, batches: Sequence[Batch], precision: str) -> list[Any]:
    """Return the outputs of batches, with gradients by PyTorch's names if the compiled function has them."""

    def arrays(found: Any) -> Any:
        if precision != "fp64":
            return _named(found)
        outputs, gradients = found
        return _named(outputs), jax_side.to_torch(case, gradients)

    with jax.enable_x64(precision == "fp64"), jax.numpy_dtype_promotion("standard"):
        params, state = jax_side.arrays(jax_side.from_torch(case, weights), precision)
        return [arrays(fn(params, jax_side.arrays(batch, precision), state)) for batch in batches]


def _apart(kind: str, ours: Sequence[Tensors], theirs: Sequence[Tensors], bar: float) -> Iterator[str]:
    """Yield a line for each output that differs in float64."""
    for our, their in zip(ours, theirs, strict=True):
        where = f"evaluation{kind}"
        if our.keys() != their.keys():
            names = ", ".join(sorted(our.keys() ^ their.keys()))
            yield f"{where}: only one side returns {names or 'a tensor'}"
            return
        for name, x in their.items():
            found = our[name]
            if found.shape != x.shape or _is_exact(found) != _is_exact(x):
                yield f"{where}: {_output(name)} is {_described(found)}, in PyTorch {_described(x)}"
            elif _is_exact(x) and (wrong := np.count_nonzero(found != x)):
                yield f"{where}: {_output(name)} has {wrong} of {x.size} other numbers than PyTorch's"
            elif not _is_exact(x) and (distance := _distance(found, x)) > bar:
                yield f"{where}: {_output(name)} is {distance:.1e} apart, over {bar:.0e}"


def _gradients_apart(kind: str, ours: Sequence[Tensors], theirs: Sequence[Tensors], bar: float) -> Iterator[str]:
    """Yield a line for the gradient that differs most."""
    for our, their in zip(ours, theirs, strict=True):
        distances = {name: _distance(our[name], x) for name, x in their.items()}
        near = relative({name: our[name] for name in their}, their) if their else {}
        distances = {name: min(x, near[name]) for name, x in distances.items()}
        worst = max(distances, key=lambda name: distances[name], default=None)
        if worst is not None and distances[worst] > bar:
            yield f"evaluation{kind}: the gradient of {worst} is {distances[worst]:.1e} apart, over {bar:.0e}"
            return


def _in_own_numbers(case: Case, weights: Tensors, batches: Sequence[Batch], truth: Sequence[Tensors]) -> Iterator[str]:
    """Yield a line for each output that is far from PyTorch's in the dtypes of users, on every batch."""
    assert case.outputs is not None
    runs = [_in_torch(case, weights, batches, "fp32", nudge) for nudge in (None, *range(NUDGES))]
    own = [run.outputs for run in runs if run is not None]
    if runs[0] is None:  # in float64 PyTorch takes it, in its own dtypes it does not
        return
    # Without simplified arithmetic, as if it was called outside of `jax.jit`.
    ours = _in_jax(jit_as_written(case.outputs.in_jax), case, weights, batches, "fp32")
    for name, x in truth[0].items():
        distances = []
        for i, true in enumerate(truth):
            noise = [_far(run[i][name], own[0][i][name] if _is_exact(x) else true[name]) for run in own]
            off = _far(ours[i][name], own[0][i][name] if _is_exact(x) else true[name])
            distances.append(off if off > max(GROSS, NOISE * max(noise)) else 0.0)
        if all(distances):
            yield (
                f"evaluation in the module's own dtypes: {_output(name)} is {max(distances):.1e} apart, far beyond "
                "rounding: a number does not fit into 32 bits"
            )


def _far(x: np.ndarray, true: np.ndarray) -> float:
    """Relative distance of the elements that are finite in `true`; of integers, the part that differs."""
    if _is_exact(true):
        return float(np.mean(x != true)) if x.size else 0.0
    finite = np.isfinite(true)
    return _distance(x[finite], true[finite]) if x.shape == true.shape else np.inf


def _distance(x: np.ndarray, true: np.ndarray) -> float:
    """Relative distance; infinite if only one is finite somewhere."""
    finite = np.isfinite(true)
    if not np.array_equal(finite, np.isfinite(x)) or not np.array_equal(x[~finite], true[~finite], equal_nan=True):
        return np.inf
    size, distance = np.linalg.norm(true[finite]), np.linalg.norm(x[finite] - true[finite])
    return float(distance / size) if size else float(distance)


def _is_exact(x: np.ndarray) -> bool:
    return x.dtype.kind in "iub"


def _output(name: str) -> str:
    return f"output {name!r}" if name else "the output"


def _described(x: np.ndarray) -> str:
    return f"{'integers' if x.dtype.kind in 'iu' else x.dtype.name} {list(x.shape)}"
