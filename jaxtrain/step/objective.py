"""The contract of a loss function: its arguments, its result, and the float32 dtype of its sums."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.errors import UserError

LossFn = Callable[..., Any]
"""`loss_fn(params, batch, rng) -> (Loss, metrics)`, or, for a model with state (BatchNorm),
`loss_fn(params, batch, rng, model_state) -> (Loss, metrics, model_state)`. In evaluation `rng` is None: no dropout.
`metrics` maps names to `Loss`es or to scalar means, which are weighted like the loss."""

Compute = Callable[..., Any]
"""A validated loss_fn with a uniform signature:
`compute(params, batch, rng, model_state) -> (Loss, metrics, model_state)`."""

STEP_METRICS = frozenset(
    {"loss", "weight", "lr", "grad_norm", "loss_scale", "skipped", "applied", "attempted", "updated"}
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
        if jnp.ndim(losses) == 0:
            raise UserError(
                "Loss.of takes losses per example or per token, got a scalar: pass them before taking the mean, "
                "or use Loss(total, weight) for a sum"
            )
        dtype = np.promote_types(losses.dtype, np.float32)
        flat = losses.reshape(-1).astype(dtype)
        if mask is None:
            return cls(flat.sum(), losses.size)
        if jnp.shape(mask) != losses.shape:
            raise UserError(f"mask must have the shape of losses {list(losses.shape)}, got {list(jnp.shape(mask))}")
        weights = jnp.asarray(mask).reshape(-1).astype(dtype)
        # Selected, not only multiplied: a masked inf or NaN is left out too.
        return cls(jnp.where(weights == 0, 0, flat * weights).sum(), weights.sum())


def validated(loss_fn: LossFn) -> Compute:
    """Give `loss_fn` one signature, with or without model state, and validate what it returns."""

    def compute(params: Any, batch: Any, rng: Any, model_state: Any) -> tuple[Loss, dict[str, Any], Any]:
        if model_state is None:
            result = loss_fn(params, batch, rng)
            expected = "(jaxtrain.Loss(total, weight), metrics)"
        else:
            result = loss_fn(params, batch, rng, model_state)
            expected = "(jaxtrain.Loss(total, weight), metrics, model_state)"
        parts = 2 if model_state is None else 3
        match result:
            case (Loss() as loss, Mapping() as metrics, *rest) if len(result) == parts:
                pass
            case _:
                raise UserError(f"loss_fn must return {expected}, got {_describe(result)}")
        if rest and _structure(rest[0]) != _structure(model_state):
            raise UserError(f"loss_fn must return model_state {_describe(model_state)}, got {_describe(rest[0])}")
        if not _is_scalar(loss):
            raise UserError(
                f"loss_fn must return a scalar total and weight, got {_describe(loss)}: use Loss.of(losses)"
            )
        for name, value in metrics.items():
            if name in STEP_METRICS:
                raise UserError(f"metric {name!r} is reserved for the step: use another name")
            if not _is_scalar(value):
                raise UserError(f"metric {name!r} must be a scalar or a jaxtrain.Loss, got {_describe(value)}")
        return loss, dict(metrics), rest[0] if rest else None

    return compute


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


def _is_scalar(value: Any) -> bool:
    return all(jnp.shape(leaf) == () for leaf in jax.tree.leaves(value))


def _structure(tree: Any) -> Any:
    return jax.tree.structure(tree)


def _describe(x: Any) -> str:
    return str(jax.tree.map(lambda leaf: f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}", x)).replace("'", "")
