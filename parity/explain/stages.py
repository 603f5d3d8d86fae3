"""Which stage of a training step differs, when each stage gets PyTorch's own inputs.

PyTorch trains. At every step JAX computes the loss, the gradients and the buffers at PyTorch's weights, clips PyTorch's
gradients, and applies its optimizer to PyTorch's clipped gradients and weights. A difference is therefore the fault of
its own stage and never of an earlier one. Everything runs in float64.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.step import Loss, clip_grad_norm, micro_batch_key, optimizer_in_float32, validated
from parity.bars import FIRST_BAR
from parity.case import Case
from parity.compare.verdict import relative
from parity.oracle.compiled import jit
from parity.oracle.in_jax import in_float64
from parity.record import Step, Tensors
from parity.sides import jax_side, torch_side
from parity.sides.randomness import Masks, dropout_masks
from parity.weights import with_tables

STEPS = 5
"""The first steps show what the very first does not: dampening, a schedule, momentum outside the learning rate."""

LARGER = 1e6
"""Factor by which a later stage must differ more than an earlier one to be explained first."""
ROUNDING = 1e-13
"""Relative distance of a loss beyond rounding, which is 1e-15 to 1e-14."""


@dataclass(frozen=True)
class Stage:
    """How far one stage of JAX's training step is from PyTorch's.

    Attributes:
      name: A key of `LOOK_AT`.
      distance: Relative distance of the worst tensor, at the first step that differs or else at the worst step.
      worst: Name of that tensor.
      step: That step, counted from 1.
    """

    name: str
    distance: float
    worst: str
    step: int

    @property
    def holds(self) -> bool:
        """Whether the distance is within the bar of float64."""
        return self.distance <= FIRST_BAR


class Comparison(NamedTuple):
    """One stage of one step: JAX's tensors and PyTorch's, under PyTorch's names."""

    step: int
    stage: str
    ours: Tensors
    theirs: Tensors


@dataclass(frozen=True)
class StageRun:
    """A reference run of a case, compared stage by stage; `parity.explain.diagnose` continues from it.

    Attributes:
      case: The case, with all its tables.
      steps: PyTorch's steps.
      comparisons: Every stage of every step.
      masks: Dropout masks of every micro-batch.
      accumulate: Micro-batches per accumulation window.
      seed: Seed of weights, data and dropout.
    """

    case: Case
    steps: Sequence[Step]
    comparisons: Sequence[Comparison]
    masks: Sequence[Masks]
    accumulate: int
    seed: int

    @property
    def stages(self) -> list[Stage]:
        """The stages in the order of a training step."""
        return _worst(self.comparisons)


def run_stages(case: Case, *, accumulate: int = 1, steps: int = STEPS, seed: int = 0) -> StageRun:
    """Train in PyTorch and compare every stage of every step with JAX's.

    Args:
      case: The case.
      accumulate: Micro-batches per accumulation window.
      steps: Windows.
      seed: Seed of weights, data and dropout.

    Returns:
      The runs; `StageRun.stages` summarizes them.
    """
    case, seen = with_tables(case), list[Step]()
    masks = dropout_masks(case, "fp64", accumulate=accumulate, steps=steps, seed=seed)
    torch_side.run(case, "fp64", accumulate=accumulate, steps=steps, seed=seed, masks=masks, watch=seen.append)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        return StageRun(case, seen, [*_compared(case, seen, seed)], masks, accumulate, seed)


def stages(case: Case, *, accumulate: int = 1, steps: int = STEPS, seed: int = 0) -> list[Stage]:
    """The stages of `run_stages`: loss, gradients, clipped gradients, optimizer state, update, buffers.

    A stage that the case does not have (no clipping, no buffers) is left out.
    """
    return run_stages(case, accumulate=accumulate, steps=steps, seed=seed).stages


def at_fault(found: Sequence[Stage]) -> Stage | None:
    """Return the first stage that differs, or one that differs far more; None where all hold.

    Gradients differ more than the loss where the forward pass is at fault, but not by a factor of `LARGER`.

    >>> at_fault([Stage("loss", 2e-10, "loss", 1), Stage("gradients", 700.0, "w", 1)]).name
    'gradients'
    """
    failing = [stage for stage in found if not stage.holds]
    if not failing:
        return None
    largest = max(failing, key=lambda stage: stage.distance)
    return largest if largest.distance > LARGER * failing[0].distance else failing[0]


def blame(found: Sequence[Stage], located: str | None = None) -> str | None:
    """Describe the stage at fault in one line; None where all hold.

    Args:
      found: The stages.
      located: Stage of the first operation that differs, if known.

    Returns:
      The line.

    >>> held, differs = Stage("gradients", 3e-16, "w", 1), Stage("update", 8e-2, "w", 2)
    >>> blame([held, differs])
    'update: 8e-02 apart (w, step 2), gradients: 3e-16; look at the optimizer'
    >>> blame([Stage("loss", 2e-12, "loss", 1), Stage("gradients", 3e-8, "w", 1)]).partition("; ")[2]
    'look at the forward pass: the loss is within the bar of float64, but differs by more than rounding'
    """
    stage = at_fault(found)
    if stage is None:
        return None
    before = next((before for before, after in pairwise(found) if after is stage), None)
    agree = f", {before.name}: {before.distance:.0e}" if before else ""
    look_at = LOOK_AT[stage.name]
    if stage.name == "gradients" and before is not None and before.holds:
        if before.distance > ROUNDING:
            look_at = "the forward pass: the loss is within the bar of float64, but differs by more than rounding"
        elif located == "forward":
            look_at = "the forward pass: it differs, though the loss does not show it"
    return f"{stage.name}: {stage.distance:.0e} apart ({stage.worst}, step {stage.step}){agree}; look at {look_at}"


LOOK_AT = {
    "loss": "the forward pass and the loss",
    "gradients": "the backward pass: custom rules, stop_gradient, kinks",
    "clipped gradients": "how gradients are clipped",
    "optimizer state": "the optimizer's moments",
    "update": "the optimizer",
    "buffers": "the model's running statistics",
}
"""Where to look for the fault of each stage, the stages before it being PyTorch's own."""


def _compared(case: Case, seen: Sequence[Step], seed: int) -> Iterator[Comparison]:
    """The comparisons of the steps of a float64 reference run."""
    backward, clip, optimizer = jit(_backward(case)), jit(_clip(case)), optimizer_in_float32(case.optimizer.jax)
    init, update = jit(optimizer.init), jit(optimizer.update)
    key, opt_state, micro_step = jax.random.key(seed), None, 0
    for number, step in enumerate(seen, start=1):
        params, model_state = to_jax(case, step.before.params, step.before.buffers)
        parts = []
        for batch in step.micro_batches:
            rng = micro_batch_key(key, micro_step)
            loss, grads, metrics, model_state = backward(params, jax_side.arrays(batch, "fp64"), rng, model_state)
            parts.append((loss, grads, metrics))
            micro_step += 1
        loss, grads, metrics = _mean(parts)
        yield Comparison(number, "loss", {"loss": np.asarray(loss)}, {"loss": np.asarray(step.loss)})
        yield Comparison(number, "gradients", jax_side.to_torch(case, grads), step.grads)
        if case.clip_norm is not None:
            clipped = jax_side.to_torch(case, clip(to_jax(case, step.grads)[0]))
            yield Comparison(number, "clipped gradients", clipped, step.fed)
        opt_state = init(params) if opt_state is None else opt_state
        updates, opt_state = update(to_jax(case, step.fed)[0], opt_state, params, value=loss, metrics=metrics)
        for name, moment in jax_side.moments(case, opt_state).items():
            yield Comparison(number, "optimizer state", _named(name, moment), _named(name, step.after.moments[name]))
        changes = {name: x - step.before.params[name] for name, x in step.after.params.items()}
        yield Comparison(number, "update", jax_side.to_torch(case, updates), changes)
        if step.after.buffers:
            yield Comparison(number, "buffers", jax_side.buffers(case, model_state), step.after.buffers)


def _mean(parts: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *x: sum(x) / len(x), *parts)


def _worst(comparisons: Iterable[Comparison]) -> list[Stage]:
    found: dict[str, Stage] = {}
    for number, name, ours, theirs in comparisons:
        worst, distance = max(relative(ours, theirs).items(), key=lambda item: item[1])
        # The first step over the bar; until there is one, the worst.
        if name not in found or (found[name].holds and distance > found[name].distance):
            found[name] = Stage(name, distance, worst, number)
    return list(found.values())


def _backward(case: Case) -> Callable[..., tuple[Any, Any, Any, Any]]:
    """A function from one micro-batch to (mean loss, its gradient, mean metrics, model state)."""
    compute = in_float64(validated(case.loss_fn))

    def mean(params: Any, batch: Any, rng: Any, model_state: Any) -> tuple[Any, Any]:
        loss, metrics, model_state = compute(params, batch, rng, model_state)
        means = {name: x.total / x.weight if isinstance(x, Loss) else x for name, x in metrics.items()}
        return loss.total / loss.weight, (means, model_state)

    def backward(*args: Any) -> tuple[Any, Any, Any, Any]:
        (loss, (metrics, model_state)), grads = jax.value_and_grad(mean, has_aux=True)(*args)
        return loss, jax.tree.map(jnp.conj, grads), metrics, model_state  # PyTorch's convention

    return backward


def _clip(case: Case) -> Callable[[Any], Any]:
    return lambda grads: clip_grad_norm(grads, case.clip_norm)[0]


def to_jax(case: Case, tensors: Tensors, buffers: Tensors | None = None) -> tuple[Any, Any]:
    """PyTorch's tensors as JAX's (parameters, model state), in float64."""
    table, buffers_table = case.tables
    params = jax_side.arrays(table.to_jax(tensors, like=case.params_like), "fp64")
    if buffers_table is None or not buffers:
        return params, None
    return params, jax_side.arrays(buffers_table.to_jax(buffers, like=case.state_like), "fp64")


def _named(moment: str, tensors: Tensors) -> Tensors:
    return {f"{moment} of {name}": x for name, x in tensors.items()}
