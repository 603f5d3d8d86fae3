"""The parts of a training step: the program of its loss, its optimizer, its scaler and its options."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from jaxtrain.passes import Groups, Whole
from jaxtrain.step.loss_program import Copies, Gather, LossProgram
from jaxtrain.step.loss_scale import read_by_passes
from jaxtrain.step.objective import Compute
from jaxtrain.step.options import StepOptions
from jaxtrain.step.probes import Probes
from jaxtrain.step.state import TrainState


class StepParts(NamedTuple):
    """The parts of a training step.

    Attributes:
      loss: The loss_fn with the options of its program.
      compute_loss: `loss.compute()`: `compute_loss(params, batch, rng, model_state) -> (Loss, metrics, model_state)`.
      optimizer: The optimizer, in float32 arithmetic.
      scaler: The loss scaler.
      options: The options of `train_step`.
      window: Another way to compute the gradient of a window, of `jaxtrain.step.window`; None for that of `step.py`.
      divides_layers: Whether devices have layers of their own, so that only whole windows are computed.
    """

    loss: LossProgram
    compute_loss: Compute
    optimizer: optax.GradientTransformationExtraArgs
    scaler: optax.GradientTransformation
    options: StepOptions
    window: Callable[..., Any] | None = None
    divides_layers: bool = False

    def constrained(
        self,
        constrain: Callable[[Compute], Compute],
        platform: str,
        window: Callable[..., Any],
        groups: Groups | None = None,
        lookups: Groups | None = None,
        gather: Gather | None = None,
        whole: Whole | None = None,
        divides_layers: bool = False,
    ) -> "StepParts":
        """Return the parts of the same step on a mesh of a platform, whose sharding constraints `constrain` adds.

        `window` computes the gradient of a window. The gradients of `groups` of rows are added once a window, those of
        tables by `lookups` in a window of one micro-batch, and `gather` gathers parameters once a window. `whole`
        returns the sharding of a gathered array.
        """
        program: dict[str, Any] = {"constrain": constrain, "platform": platform, "groups": groups, "gather": gather}
        loss = self.loss._replace(**program, whole=whole, lookups=lookups)
        return self._with_loss(loss)._replace(window=window, divides_layers=divides_layers)

    def for_platform(self, platform: str) -> "StepParts":
        """Return the parts of the same step compiled for a platform."""
        return self._with_loss(self.loss._replace(platform=platform))

    def scales(self, state: TrainState) -> Probes:
        """Return the scales that the passes of a state read; no leaves if they observe nothing."""
        products = None if state.scales is None else state.scales.scale
        return Probes(products=products, scaler=read_by_passes(self.scaler, state.loss_scale))

    def compute(self, copies: Copies, scales: Probes, probes: Probes) -> Compute:
        """Return the loss function after its passes, as `LossProgram.compute`."""
        has_none = all(x is None for x in copies) and not jax.tree.leaves(probes)
        return self.compute_loss if has_none else self.loss.compute(copies, scales, probes)

    def _with_loss(self, loss: LossProgram) -> "StepParts":
        return self._replace(loss=loss, compute_loss=loss.compute())
