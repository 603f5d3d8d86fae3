"""The contract of a loss function: its arguments, its result, and the float32 dtype of its sums."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.errors import UserError, warn_user
from jaxtrain.step.checks.means import averaged_elements, is_of_integers
from jaxtrain.step.checks.mistakes import call_note, describe, is_number, location_of, loss_fn_error, same_structure
from jaxtrain.step.checks.pairs import warn_of_pairs

LossFn = Callable[..., Any]
"""`loss_fn(params, batch, rng) -> (Loss, metrics)`, or, for a model with state (BatchNorm),
`loss_fn(params, batch, rng, model_state) -> (Loss, metrics, model_state)`. In evaluation `rng` is None: no dropout.
`metrics` maps names to `Loss`es or to scalar means, which are weighted like the loss."""

Compute = Callable[..., Any]
"""A validated loss_fn with a uniform signature:
`compute(params, batch, rng, model_state) -> (Loss, metrics, model_state)`."""

STEP_METRICS = frozenset(
    {"loss", "weight", "lr", "grad_norm", "loss_scale", "loss_scales", "skipped", "applied", "attempted", "updated"}
    | {"nonfinite_micro_batch", "nonfinite_leaf"}
)


class Loss(NamedTuple):
    """A loss summed over examples or tokens, and the weight to divide it by.

    A sum, never a mean: so accumulated, sharded and padded batches give exactly the gradient of the one big batch.

    Attributes:
      total: float[], sum of the losses.
      weight: Number or float[], the number of examples or tokens.
    """

    total: Any
    weight: Any

    @classmethod
    def of(cls, losses: jax.Array, mask: jax.Array | None = None) -> "Loss":
        """Sum losses per example or per token.

        The sum is taken over the flattened array, in float32 at least.

        Args:
          losses: float[...], at least one axis: a loss per example or per token, not their mean.
          mask: bool or numbers of the same shape; elements where it is 0 are left out. None uses all.

        Returns:
          The sum of the losses, and the number of elements used as its weight; with a mask of other numbers than 0
          and 1, the weighted sum and the sum of the mask.

        Raises:
          UserError: `losses` is a scalar, or the shapes differ.

        Example:
          >>> loss = Loss.of(jnp.array([[1.0, 2.0], [3.0, jnp.nan]]), mask=jnp.array([[1, 1], [1, 0]]))
          >>> float(loss.total), float(loss.weight)
          (6.0, 3.0)
        """
        if not is_number(losses):
            raise UserError(f"Loss.of takes an array of losses, got {describe(losses)}: pass jnp.asarray(losses)")
        if jnp.ndim(losses) == 0:
            raise UserError(
                "Loss.of takes losses per example or per token, got a scalar: pass them before taking the mean, "
                "or use Loss(total, weight) for a sum"
            )
        dtype = jax.dtypes.canonicalize_dtype(np.promote_types(losses.dtype, np.float32))
        flat = losses.reshape(-1).astype(dtype)
        if mask is None:
            return cls(flat.sum(), losses.size)
        if jnp.shape(mask) != losses.shape:
            raise UserError(f"mask must have the shape of losses {list(losses.shape)}, got {list(jnp.shape(mask))}")
        weights = jnp.asarray(mask).reshape(-1).astype(dtype)
        # Selected, not only multiplied: a masked inf or NaN is left out too.
        return cls(jnp.where(weights == 0, 0, flat * weights).sum(), weights.sum())


def validated(loss_fn: LossFn, *, differentiable: bool = False) -> Compute:
    """Give `loss_fn` one signature, with or without model state, and validate what it returns.

    If it is to be `differentiable`, a traced total must be floating-point: the gradient of a count is silently 0.
    """
    warned = asked = False

    def compute(params: Any, batch: Any, rng: Any, model_state: Any) -> tuple[Loss, dict[str, Any], Any]:
        nonlocal warned, asked
        args = (params, batch, rng) if model_state is None else (params, batch, rng, model_state)
        try:
            result = loss_fn(*args)
        except UserError:
            raise
        except Exception as error:
            if message := loss_fn_error(error, loss_fn, args):
                raise UserError(message).with_traceback(error.__traceback__) from error
            error.add_note(call_note(params, batch))
            raise
        loss, metrics, *rest = _parts(result, with_state=model_state is not None)
        if rest and not same_structure(rest[0], model_state):
            raise UserError(f"loss_fn must return model_state {describe(model_state)}, got {describe(rest[0])}")
        _check_loss(loss)
        if differentiable:
            _check_differentiable(loss.total)
        for name, value in metrics.items():
            _check_metric(name, value)
        if not warned and (size := averaged_elements(loss)):
            warned = True
            warn_user(
                f"loss_fn at {location_of(loss_fn)} returns Loss(total, weight={loss.weight}), where total is a mean "
                f"over {size} elements: the step divides by the weight again, so that the loss and its gradient are "
                f"{loss.weight} times too small. Use Loss.of(losses) with the losses before the mean"
            )
        if not asked and isinstance(loss.total, jax.core.Tracer):
            asked = True
            warn_of_pairs(loss_fn, args, loss)
        return loss, dict(metrics), rest[0] if rest else None

    return compute


def _parts(result: Any, with_state: bool) -> Any:
    expected = (
        "(jaxtrain.Loss(total, weight), metrics, model_state)"
        if with_state
        else "(jaxtrain.Loss(total, weight), metrics)"
    )
    match result:
        case (Loss(), Mapping(), *_) if len(result) == (3 if with_state else 2):
            return result
        case Loss():
            remedy = "return a dict of metrics too, as in return loss, {}"
        case (Loss(), Mapping(), *_) if len(result) == 2:
            remedy = "return the new model_state too"
        case (Loss(), Mapping(), *_):
            remedy = "return metrics in one dict; a model_state is first given to step.init(params, model_state=...)"
        case (Loss(), *_):
            remedy = "return the metrics as a dict, which may be empty"
        case _:
            remedy = "return Loss.of(losses), {} with the losses before their mean"
    raise UserError(f"loss_fn must return {expected}, got {describe(result)}: {remedy}")


def _check_loss(loss: Loss) -> None:
    if not (is_number(loss.total) and is_number(loss.weight) and np.shape(loss.total) == np.shape(loss.weight) == ()):
        raise UserError(f"loss_fn must return a scalar total and weight, got {describe(loss)}: use Loss.of(losses)")
    if isinstance(loss.weight, int | float | np.number) and not loss.weight >= 0:
        raise UserError(
            f"the weight of a Loss must not be negative or NaN, got {loss.weight}: use the number of examples or tokens"
        )


def _check_differentiable(total: Any) -> None:
    # A Python number is a constant on purpose, as in a loss_fn that only returns metrics.
    is_real = jnp.issubdtype(jnp.result_type(total), np.floating)
    if not isinstance(total, int) and (not is_real or is_of_integers(total)):
        what = describe(total) if not is_real else "a sum of integers"
        raise UserError(
            f"loss_fn must return a floating-point total, got {what}, which has no real gradient: "
            "sum losses, not counts, and use .real of complex numbers"
        )


def _check_metric(name: Any, value: Any) -> None:
    if not isinstance(name, str):
        raise UserError(f"the names of metrics must be strings, got {name!r}: use {str(name)!r}")
    if name in STEP_METRICS:
        raise UserError(f"metric {name!r} is reserved for the step: use another name")
    numbers = value if isinstance(value, Loss) else (value,)
    if not all(is_number(x) and np.shape(x) == () for x in numbers):
        raise UserError(
            f"metric {name!r} must be a scalar or a jaxtrain.Loss, got {describe(value)}: "
            "return its mean, or leave it out"
        )


def losses_in_float32(compute: Compute) -> Compute:
    """Widen the results of a low-precision computation before they are divided, scaled or summed.

    A float16 loss overflows at a scale of 65536. Metrics become `Loss`es: a bare scalar is a mean, weighted like the
    loss. Model state keeps its dtypes.
    """

    def compute_widened(params: Any, batch: Any, rng: Any, model_state: Any) -> tuple[Loss, dict[str, Loss], Any]:
        loss, metrics, new_state = compute(params, batch, rng, model_state)
        loss = _widen(loss)
        sums = {
            name: _widen(
                value
                if isinstance(value, Loss)
                else Loss(jnp.asarray(value, loss.weight.dtype) * loss.weight, loss.weight)
            )
            for name, value in metrics.items()
        }
        return loss, sums, jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), new_state, model_state)

    return compute_widened


def _widen(loss: Loss) -> Loss:
    """Convert to float32, or float64 if the total is; the weight has no gradient."""
    dtype = np.float64 if jnp.result_type(loss.total) == np.float64 else np.float32
    return Loss(jnp.asarray(loss.total, dtype), lax.stop_gradient(jnp.asarray(loss.weight, dtype)))
