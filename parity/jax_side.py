"""The same training run through `jaxtrain.train_step`, recorded under PyTorch's names."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxtrain
from jaxtrain import optim
from jaxtrain.loss_scale import current_scale
from parity.case import AdamW, Case
from parity.record import Record, Snapshot, Tensors


def run(
    case: Case,
    weights: Tensors,
    precision: str,
    *,
    accumulate: int = 1,
    remat: str = "none",
    steps: int = 20,
    seed: int = 0,
) -> Record:
    """Train from PyTorch's `weights` for `steps` windows of `accumulate` micro-batches each.

    Raises `UserError` where a tensor of `weights` or a leaf of the JAX parameters has no counterpart of its shape.
    """
    # Strict promotion would refuse a model's float32 constants in float64.
    with jax.enable_x64(precision == "fp64"), jax.numpy_dtype_promotion("standard"):
        return _run(case, weights, precision, accumulate, remat, steps, seed)


def _run(case: Case, weights: Tensors, precision: str, accumulate: int, remat: str, steps: int, seed: int) -> Record:
    step = jaxtrain.train_step(
        case.loss_fn,
        optax.chain(_record_gradients(), adamw(case.optimizer)),
        precision=precision,
        accumulate=accumulate,
        clip_norm=case.clip_norm,
        remat=remat,
    )
    params, model_state = _split(case, weights)
    state = step.init(params, model_state=arrays(model_state, precision), seed=seed)
    losses, scales = [], [float(current_scale(state.loss_scale))]
    first = None

    for batch in case.batches(seed, steps):
        state, metrics = step(state, arrays(batch, precision))
        losses.append(float(metrics["loss"]))
        scales.append(float(current_scale(state.loss_scale)))
        if first is None and metrics["applied"]:
            first = _observe(case, state)

    last = _observe(case, state)
    grads, after_first = first or last
    return Record(np.array(losses), grads, after_first, last[1], np.array(scales))


def adamw(options: AdamW) -> optax.GradientTransformation:
    """`torch.optim.AdamW(**options)` in JAX."""
    return optim.adamw(options.lr, *options.betas, options.eps, options.weight_decay)


class _Fed(NamedTuple):
    """`grads`: what the optimizer was last fed; NaN before its first update."""

    grads: Any


def _record_gradients() -> optax.GradientTransformation:
    """Passes gradients on, and keeps them: chained before an optimizer it sees exactly what the optimizer is fed."""

    def init(params: Any) -> _Fed:
        return _Fed(jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), params))

    def update(grads: Any, state: _Fed, params: Any = None) -> tuple[Any, _Fed]:
        del state, params
        return grads, _Fed(grads)

    return optax.GradientTransformation(init, update)


def _split(case: Case, weights: Tensors) -> tuple[Any, Any]:
    """PyTorch's state_dict as (params, model_state); None for a model without."""
    if case.buffers is None:
        return case.names.to_jax(weights, like=case.params_like), None
    names = {param.name for param in case.buffers.params.values()}
    buffers = {name: x for name, x in weights.items() if name in names}
    params = {name: x for name, x in weights.items() if name not in names}
    return case.names.to_jax(params, like=case.params_like), case.buffers.to_jax(buffers, like=case.state_like)


def arrays(tree: Any, precision: str) -> Any:
    """`tree` as JAX's arrays: floating ones in float32, or float64 for fp64, others in int32."""
    dtype = np.float64 if precision == "fp64" else np.float32
    return jax.tree.map(lambda x: jnp.asarray(x, dtype if np.issubdtype(x.dtype, np.floating) else np.int32), tree)


def _observe(case: Case, state: jaxtrain.TrainState) -> tuple[Tensors, Snapshot]:
    def tensors(tree: Any) -> Tensors:
        # Copies: the state is donated to the next step, and NumPy would look into its buffers.
        return case.names.to_torch(jax.tree.map(np.array, tree))

    fed, optimizer_state = state.opt_state
    moments = {name: tensors(optax.tree.get(optimizer_state, name)) for name in ("mu", "nu")}
    buffers = {} if case.buffers is None else case.buffers.to_torch(jax.tree.map(np.array, state.model_state))
    return tensors(fed.grads), Snapshot(params=tensors(state.params), **moments, buffers=buffers)
