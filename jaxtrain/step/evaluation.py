"""The evaluation step."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxtrain.errors import user_facing
from jaxtrain.passes import Policy, policy
from jaxtrain.program.internals import readable_equations
from jaxtrain.step.checks.batch import require_32_bits
from jaxtrain.step.checks.diagnosis import diagnosed, takes_one_batch
from jaxtrain.step.checks.mistakes import check_loss_fn
from jaxtrain.step.compiler_options import compiler_options
from jaxtrain.step.loss_program import LossProgram
from jaxtrain.step.objective import Loss, LossFn
from jaxtrain.step.state import TrainState, require_present, require_state


@user_facing
def eval_step(
    loss_fn: LossFn, *, precision: str | Policy = "fp32", deterministic: bool = False
) -> Callable[[TrainState, Any], dict[str, Loss]]:
    """Build the jitted evaluation of one batch.

    Args:
      loss_fn: As for `train_step`; called with `rng=None`, so without dropout.
      precision: Name of a precision policy, or a `Policy`.
      deterministic: As for `train_step`.

    Returns:
      A function (state, batch) → dict of `Loss`es, `loss` and the loss_fn's metrics: add them over the batches, then
      divide each total by its weight.
    """
    check_loss_fn(loss_fn)
    compute_loss = LossProgram(loss_fn, policy(precision)).compute()

    @readable_equations()
    def evaluate(state: TrainState, batch: Any) -> dict[str, Loss]:
        require_state(state, batch)
        loss, metrics, _ = compute_loss(state.params, batch, None, state.model_state)
        return {"loss": loss, **metrics}

    jitted = jax.jit(evaluate, compiler_options=compiler_options(deterministic=deterministic))

    @takes_one_batch
    @functools.wraps(evaluate)
    def call(state: TrainState, batch: Any) -> dict[str, Loss]:
        require_present(state)
        require_32_bits(batch)
        try:
            sums: dict[str, Loss] = jitted(state, batch)
        except Exception as error:
            raise diagnosed(error, state, batch)  # noqa: B904
        return sums

    return call
