"""The contract of a loss function: what it is given, what it returns, and the float32 its sums are kept in."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.errors import UserError

LossFn = Callable[..., Any]
"""`loss_fn(params, batch, rng) -> (Loss, metrics)`, or, for a model with state of its own (BatchNorm),
`loss_fn(params, batch, rng, model_state) -> (Loss, metrics, model_state)`. In evaluation `rng` is None: no dropout.
`metrics` maps names to `Loss`es or to scalar means, which are weighted like the loss."""

STEP_METRICS = frozenset(
    {"loss", "weight", "lr", "grad_norm", "loss_scale", "skipped", "applied", "attempted", "updated"}
    | {"nonfinite_micro_batch", "nonfinite_leaf"}
)


class Loss(NamedTuple):
    """A sum over examples (or tokens) and the weight (their number) it is to be divided by; scalars both.

    A sum, never a mean: so accumulated, sharded and padded batches give exactly the gradient of the one big batch.
    """

    total: Any
    weight: Any


def checked(loss_fn: LossFn) -> Callable[..., tuple[Loss, dict[str, Any], Any]]:
    """`loss_fn` with one signature, with or without model state, and its result made sure of."""

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
                raise UserError(f"loss_fn returned {_describe(result)}: make it return {expected}")
        if rest and _structure(rest[0]) != _structure(model_state):
            raise UserError(f"loss_fn returned model_state {_describe(rest[0])}: make it {_describe(model_state)}")
        if not _scalar(loss):
            raise UserError(f"loss_fn returned {_describe(loss)}: sum the total and the weight to scalars")
        for name, value in metrics.items():
            if name in STEP_METRICS:
                raise UserError(f"the metric {name!r} is the step's own: give yours another name")
            if not _scalar(value):
                raise UserError(f"the metric {name!r} is {_describe(value)}: make it a scalar or a jaxtrain.Loss")
        return loss, dict(metrics), rest[0] if rest else None

    return compute


def in_float32(compute: Callable[..., tuple[Loss, dict[str, Any], Any]]) -> Callable[..., Any]:
    """What a low-precision computation returns, widened before it is divided, scaled or summed.

    A float16 loss overflows at a scale of 65536. Metrics become `Loss`es: a bare scalar is a mean, and weighs like
    the loss. Model state keeps its dtypes.
    """

    def computed(params: Any, batch: Any, rng: Any, model_state: Any) -> tuple[Loss, dict[str, Loss], Any]:
        loss, metrics, new_state = compute(params, batch, rng, model_state)
        loss = _wide(loss)
        sums = {
            name: _wide(
                value
                if isinstance(value, Loss)
                else Loss(jnp.asarray(value, loss.weight.dtype) * loss.weight, loss.weight)
            )
            for name, value in metrics.items()
        }
        return loss, sums, jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), new_state, model_state)

    return computed


def _wide(loss: Loss) -> Loss:
    """In float32, or float64 where the total is; nothing is differentiated through the weight."""
    dtype = np.float64 if jnp.result_type(loss.total) == np.float64 else np.float32
    return Loss(jnp.asarray(loss.total, dtype), lax.stop_gradient(jnp.asarray(loss.weight, dtype)))


def _scalar(value: Any) -> bool:
    return all(jnp.shape(leaf) == () for leaf in jax.tree.leaves(value))


def _structure(tree: Any) -> Any:
    return jax.tree.structure(tree)


def _describe(x: Any) -> str:
    return str(jax.tree.map(lambda leaf: f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}", x)).replace("'", "")
