"""The lines of both files at which a port differs."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.program import equations
from jaxtrain.program import operations as op
from parity.compare.fingerprint import Fingerprint, Trace, apart, fingerprint
from parity.explain.jax_trace import End, Equation, Evaluation
from parity.explain.locate import STEPS, first_difference
from parity.explain.torch_trace import module_lines, torch_trace
from parity.oracle.in_jax import in_float64
from parity.sides.jax_lines import line_of
from parity.source import source_line
from parity.verify.contract import Target
from parity.verify.difference import Difference
from parity.verify.port_program import PortProgram, port_batch
from parity.verify.source_case import SourceCase, state_dict

TRACED = 12
"""Updates up to which both programs are traced: a difference that shows later is not located."""
SMALL = 100_000
"""Number of parameters up to which so many are traced; of a larger model two, since every value is kept."""
LOW = (np.dtype(jnp.bfloat16), np.dtype(np.float16))


def located(found: Difference, case: SourceCase, target: Target, seed: int) -> Difference:
    """Return a difference with the operation and the lines at which the values of both programs first differ.

    Every value of both programs is compared by its numbers, from the first operation of the loss to the last of the
    optimizer (`parity.explain.locate`).
    """
    is_small = sum(x.size for x in case.params_like.values()) <= SMALL
    if found.update is None or found.update > (TRACED if is_small else STEPS):
        return found
    masks: list[list[np.ndarray]] = [[] for _ in range(found.update)]
    theirs, their_ends = torch_trace(case, steps=found.update, seed=seed, masks=masks)
    gradients = [end.gradients for end in their_ends]
    ours, our_ends = _port_trace(case, target, gradients, seed)
    at = first_difference(theirs, ours, their_ends, our_ends)
    if at is None:
        return found
    return replace(
        found,
        source_line=at.torch_source or at.torch_built,
        target_line=at.jax_source,
        operation=f"{at.stage}, {at.torch}",
    )


def with_owner(found: Difference, case: SourceCase) -> Difference:
    """Return a difference without a line of the source with the line that constructs the module of its tensor."""
    if found.source_line or found.tensor not in case.required:
        return found
    lines, path = module_lines(case.torch_model), found.tensor or ""
    while path and path not in lines:
        path = path.rpartition(".")[0]
    return replace(found, source_line=lines.get(path, ""))


def _port_trace(
    case: SourceCase, target: Target, gradients: list[Mapping[str, Fingerprint]], seed: int
) -> tuple[Trace[Equation], list[End]]:
    """Train a port in float64 and return every value, and the end of each update.

    A step says by no name what its gradients are: they count as PyTorch's, and differ as values.
    """
    with jax.enable_x64(True):
        state = PortProgram(target, "fp64").first_state(case, seed)
        batches = [port_batch(batch, "fp64") for batch in case.batches(seed, len(gradients))]
        weights = [fingerprint(x) for x in state_dict(case, seed).values() if np.issubdtype(x.dtype, np.floating)]
        stacked = {x.shape for x in jax.tree.leaves(state) if not _is_one_of(x, weights) and _is_stack(x, weights)}
        evaluation = Evaluation(in_float64(target.step), state, stacked)
        traced = jax.tree.map(
            lambda x: evaluation.weight(x) if x.shape in stacked or _is_one_of(x, weights) else x, state
        )
        ends = []
        for batch, of_update in zip(batches, gradients, strict=True):
            started = len(evaluation.trace.values)
            traced, loss = evaluation(traced, batch)
            total = (i for i in loss.all if evaluation.trace.values[i].trained)
            forward = range(started, max(total, default=started) + 1)
            after = frozenset[int]().union(*(x.all for x in jax.tree.leaves(traced)))
            ends.append(End(loss.all, after, forward, {}, of_update))
        return evaluation.trace, ends


def _is_one_of(x: Any, weights: list[Fingerprint]) -> bool:
    """Whether a leaf has the numbers of a tensor, in any layout."""
    if not jnp.issubdtype(x.dtype, np.floating):
        return False
    own = fingerprint(np.asarray(x))
    return any(not apart(own, weight) for weight in weights)


def _is_stack(x: Any, weights: list[Fingerprint]) -> bool:
    """Whether a leaf stacks tensors, those of the layers of a scan."""
    return len(x.shape) > 1 and all(_is_one_of(layer, weights) for layer in x)


def lossy_line(case: SourceCase, target: Target, seed: int) -> str:
    """Return the first line of a port that converts to bfloat16 or float16; empty if none does."""
    batch = port_batch(next(case.batches(seed, 1)), "fp32")
    closed = jax.make_jaxpr(target.step)(PortProgram(target, "fp32").first_state(case, seed), batch)
    for eqn in equations.visit(closed.jaxpr):
        if op.of(eqn) == op.CONVERT_ELEMENT_TYPE and equations.dtype(eqn) in LOW and (line := line_of(eqn)):
            return source_line(*line)
    return ""
