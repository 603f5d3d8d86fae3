"""The gradient of a window whose micro-batches pass through the stages of a pipeline."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.labs.pipeline.pipeline_stages import Stages
from jaxtrain.labs.pipeline.pipelined_window import Divided, pipelined_window
from jaxtrain.passes import Groups
from jaxtrain.paths import merge, partition
from jaxtrain.step.complex_parameters import refuse_complex
from jaxtrain.step.gradient import Gradient
from jaxtrain.step.loss_scale import current_scale
from jaxtrain.step.objective import Compute, Loss
from jaxtrain.step.parts import StepParts
from jaxtrain.step.state import TrainState, micro_batch_key
from jaxtrain.step.window.partial_sums import divides_rows, with_sums, zero_sums


class RowDivision(NamedTuple):
    """How the stages divide the rows of what follows the layers.

    Attributes:
      constrain: Adds the sharding constraints.
      groups: The groups of rows whose gradients are summed once a window.
    """

    constrain: Callable[[Compute], Compute]
    groups: Groups


def pipelined_gradient(
    parts: StepParts, state: TrainState, micro_batches: Any, k: int, *, stages: Stages, of_head: RowDivision | None
) -> Gradient:
    """Accumulate the gradients of a window's micro-batches in a pipeline.

    Args:
      parts: The parts of the step.
      state: The state.
      micro_batches: The micro-batches.
      k: Their number.
      stages: What they pass through.
      of_head: How the stages divide what follows the layers; None if each computes all of it.
    """
    if state.model_state is not None:
        raise UserError("the mesh axis pipeline does not support model state, such as BatchNorm's: use data or fsdp")
    trained, frozen = partition(state.params, parts.options.frozen)
    refuse_complex(trained, "the mesh axis pipeline", "use data or fsdp")
    groups, of_head = (parts.loss.groups, of_head) if k > 1 else (None, None)

    def computed(compute_loss: Compute, groups: Groups | None) -> Callable[..., Any]:
        def compute(variables: Any, fixed: Any, micro_batch: Any, rng: jax.Array) -> tuple[Loss, dict[str, Loss]]:
            params = merge(variables, fixed) if groups is None else with_sums(fixed, variables, groups)
            loss, metrics, _ = compute_loss(params, micro_batch, rng, None)
            return loss, metrics

        return compute

    variables, fixed = (trained, frozen) if groups is None else (zero_sums(trained, groups), state.params)
    divided = None
    if of_head is not None and divides_rows(micro_batches, of_head.groups.size):
        compute_loss = parts.loss._replace(constrain=of_head.constrain, groups=of_head.groups).compute()
        divided = Divided(computed(compute_loss, of_head.groups), zero_sums(trained, of_head.groups), state.params)
    window = jax.tree.map(lambda x: x[None], micro_batches) if k == 1 else micro_batches
    keys = jax.vmap(partial(micro_batch_key, state.rng))(state.micro_step + jnp.arange(k, dtype=np.int32))
    compute, scale = computed(parts.compute_loss, groups), current_scale(state.loss_scale)
    found = pipelined_window(compute, variables, fixed, window, keys, scale, stages, divided)
    grads = found.grads if groups is None else groups.add(found.grads)
    return Gradient(grads, found.loss, found.metrics, None, found.nonfinite)
