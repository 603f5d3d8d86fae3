"""The gradient of a micro-batch or of a window, and what it is by."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtrain.step.nonfinite import Nonfinite
from jaxtrain.step.objective import Loss
from jaxtrain.step.probes import NO_PROBES, Probes


class Gradient(NamedTuple):
    """The gradient of a micro-batch or of a window, and the results of the same forward pass.

    Attributes:
      grads: Gradient of the trained parameters, float32 or float64, multiplied by the loss scale.
      loss: Summed loss and weight.
      metrics: The loss_fn's metrics, summed like the loss.
      model_state: Model state after the forward pass.
      nonfinite: Location of the first inf or NaN; None if it has not been looked for.
      observed: What the passes have observed, the maximum over micro-batches.
    """

    grads: Any
    loss: Loss
    metrics: dict[str, Loss]
    model_state: Any
    nonfinite: Nonfinite | None = None
    observed: Probes = NO_PROBES


class Variables(NamedTuple):
    """What a gradient is by: the trained parameters, or what stands for them.

    Attributes:
      values: Pytree of arrays.
      join: Returns the parameters that such values stand for.
    """

    values: Any
    join: Callable[[Any], Any]
