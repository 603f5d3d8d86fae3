"""Which stage of a training step differs, each fed PyTorch's own inputs, so that a fault is charged to one of them.

The reference trains; at every step JAX computes the loss, the gradients and the buffers at PyTorch's weights, clips
PyTorch's gradients, and feeds PyTorch's clipped gradients to its optimizer at PyTorch's weights. What differs then
differs by itself, not by what went before. In float64.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxtrain.step import checked, clip_grad_norm, in_float32, micro_batch_key
from parity import jax_side, torch_side
from parity.bars import FIRST_BAR
from parity.case import Case
from parity.compare import relative
from parity.oracle.in_jax import in_float64
from parity.randomness import dropout_masks
from parity.record import Step, Tensors
from parity.weights import with_tables

STEPS = 5
"""The first few show what the first does not: dampening, a schedule, momentum outside the learning rate."""


@dataclass(frozen=True)
class Stage:
    """How far a stage is from PyTorch's: `distance`, relative, the worst of its tensors and steps, which is that of
    `worst` at step `step`, counted from 1."""

    name: str
    distance: float
    worst: str
    step: int

    @property
    def holds(self) -> bool:
        """Whether it is within the bar of float64."""
        return self.distance <= FIRST_BAR


def stages(case: Case, *, accumulate: int = 1, steps: int = STEPS, seed: int = 0) -> list[Stage]:
    """The stages of the case's training step in their order: loss, gradients, clipped gradients, optimizer state,
    update, buffers. Those that a case has not (no clipping, no buffers) are left out.

    Of a stage that differs, the first step at which it does.
    """
    case = with_tables(case)
    masks = dropout_masks(case, "fp64", accumulate=accumulate, steps=steps, seed=seed)
    seen: list[Step] = []
    torch_side.run(case, "fp64", accumulate=accumulate, steps=steps, seed=seed, masks=masks, watch=seen.append)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        return _worst(compared(case, seen, seed))


def charge(found: Sequence[Stage]) -> str | None:
    """The first stage that differs, in a line; None where all hold.

    >>> held, differs = Stage("gradients", 3e-16, "w", 1), Stage("update", 8e-2, "w", 2)
    >>> charge([held, differs])
    'update: 8e-02 apart (w, step 2), gradients: 3e-16; look at the optimizer'
    """
    for before, stage in zip([None, *found], found, strict=False):
        if not stage.holds:
            agree = f", {before.name}: {before.distance:.0e}" if before else ""
            where = f"{stage.worst}, step {stage.step}"
            return f"{stage.name}: {stage.distance:.0e} apart ({where}){agree}; look at {LOOK_AT[stage.name]}"
    return None


LOOK_AT = {
    "loss": "the forward pass and the loss",
    "gradients": "the backward pass: custom rules, stop_gradient, kinks",
    "clipped gradients": "how gradients are clipped",
    "optimizer state": "the optimizer's moments",
    "update": "the optimizer",
    "buffers": "the model's running statistics",
}
"""What a fault of a stage is a fault of, all before it being PyTorch's own."""


def compared(case: Case, seen: Sequence[Step], seed: int) -> Iterator[tuple[int, str, Tensors, Tensors]]:
    """(step, stage, ours, theirs), in the order of a run, of the steps of a float64 reference."""
    backward, clip, optimizer = jax.jit(_backward(case)), jax.jit(_clip(case)), in_float32(case.optimizer.jax)
    update = jax.jit(optimizer.update)
    key, opt_state, micro_step = jax.random.key(seed), None, 0
    for number, step in enumerate(seen, start=1):
        params, model_state = _at(case, step.before.params, step.before.buffers)
        parts = []
        for batch in step.micro_batches:
            rng = micro_batch_key(key, micro_step)
            loss, grads, model_state = backward(params, jax_side.arrays(batch, "fp64"), rng, model_state)
            parts.append((loss, grads))
            micro_step += 1
        loss, grads = _mean(parts)
        yield number, "loss", {"loss": np.asarray(loss)}, {"loss": np.asarray(step.loss)}
        yield number, "gradients", jax_side.to_torch(case, grads), step.grads
        if case.clip_norm is not None:
            yield number, "clipped gradients", jax_side.to_torch(case, clip(_at(case, step.grads)[0])), step.fed
        opt_state = optimizer.init(params) if opt_state is None else opt_state
        updates, opt_state = update(_at(case, step.fed)[0], opt_state, params)
        for name, moment in jax_side.moments(case, opt_state).items():
            yield number, "optimizer state", _named(name, moment), _named(name, step.after.moments[name])
        moved = {name: x - step.before.params[name] for name, x in step.after.params.items()}
        yield number, "update", jax_side.to_torch(case, updates), moved
        if step.after.buffers:
            yield number, "buffers", jax_side.buffers(case, model_state), step.after.buffers


def _mean(parts: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *x: sum(x) / len(x), *parts)


def _worst(compared: Iterable[tuple[int, str, Tensors, Tensors]]) -> list[Stage]:
    found: dict[str, Stage] = {}
    for number, name, ours, theirs in compared:
        worst, distance = max(relative(ours, theirs).items(), key=lambda item: item[1])
        # The first step over the bar; until there is one, the worst.
        if name not in found or (found[name].holds and distance > found[name].distance):
            found[name] = Stage(name, distance, worst, number)
    return list(found.values())


def _backward(case: Case) -> Callable[..., tuple[Any, Any, Any]]:
    """(mean loss, its gradient, model state) of one micro-batch."""
    compute = in_float64(checked(case.loss_fn))

    def mean(params: Any, batch: Any, rng: Any, model_state: Any) -> tuple[Any, Any]:
        loss, _, model_state = compute(params, batch, rng, model_state)
        return loss.total / loss.weight, model_state

    def backward(*args: Any) -> tuple[Any, Any, Any]:
        (loss, model_state), grads = jax.value_and_grad(mean, has_aux=True)(*args)
        return loss, grads, model_state

    return backward


def _clip(case: Case) -> Callable[[Any], Any]:
    return lambda grads: clip_grad_norm(grads, case.clip_norm)[0]


def _at(case: Case, tensors: Tensors, buffers: Tensors | None = None) -> tuple[Any, Any]:
    """PyTorch's tensors as JAX's (parameters, model state), in float64."""
    table, buffers_table = case.tables
    params = jax_side.arrays(table.to_jax(tensors, like=case.params_like), "fp64")
    if buffers_table is None or not buffers:
        return params, None
    return params, jax_side.arrays(buffers_table.to_jax(buffers, like=case.state_like), "fp64")


def _named(moment: str, tensors: Tensors) -> Tensors:
    return {f"{moment} of {name}": x for name, x in tensors.items()}
