"""The passes that the program of a training step goes through."""

from typing import NamedTuple

import jax

from jaxtrain.passes.pipeline import AFTER_GRAD, AT_UPDATE, BEFORE_GRAD, CPU, GPU, Pass
from jaxtrain.program.platform import is_gpu
from jaxtrain.step.loss_program import NO_COPIES, Copies
from jaxtrain.step.loss_scale import read_by_passes
from jaxtrain.step.parts import StepParts
from jaxtrain.step.probes import Probes


class Phase(NamedTuple):
    """A part of a program with the passes that change it.

    Attributes:
      program: What the passes change.
      passes: The passes, in the order of their application.
    """

    program: str
    passes: tuple[Pass, ...]


def explained(parts: StepParts) -> tuple[Phase, ...]:
    """Return the passes of a training step on the platform that it is compiled for.

    Args:
      parts: The parts of the step.
    """
    loss = parts.loss
    copies = NO_COPIES if loss.gather is None else Copies(gathered=())
    scaler = jax.eval_shape(lambda: read_by_passes(parts.scaler, parts.scaler.init(None)))
    scales = Probes(scaler=scaler)
    in_loop = callable(parts.options.accumulate) or parts.options.accumulate > 1
    platform = GPU if is_gpu(loss.platform) else CPU
    updates = () if loss.is_on_mesh else ("as_vectors",)
    phases = (
        ("the loss function, from the inside", BEFORE_GRAD, {*loss.rewrites(copies, scales, scales)}),
        ("the gradient of a micro-batch", AFTER_GRAD, {*loss.of_gradient(in_loop=in_loop)}),
        ("the update of the parameters", AT_UPDATE, {*updates}),
    )
    return tuple(
        Phase(program, tuple(x for x in passes if x.name in names and platform in x.platforms))
        for program, passes, names in phases
    )
