"""The training step: scale, differentiate, accumulate, unscale, check, clip, update, rescale.

One pure function of a state and a batch, jitted once, its state donated. It knows nothing of models, files, hosts or
logging: whatever a run must remember is in `TrainState`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxtrain import accumulate as window
from jaxtrain.clip import clip_grad_norm
from jaxtrain.errors import UserError
from jaxtrain.loss_scale import current_scale, dynamic_loss_scale, found_inf, no_loss_scale, skipped
from jaxtrain.objective import Loss, LossFn, checked, in_float32
from jaxtrain.precision import Policy, policy
from jaxtrain.remat import remat as rematerialise


class TrainState(NamedTuple):
    """Everything a run is: save it, restore it anywhere, and the run continues bit for bit.

    `step` int32[], windows so far; `micro_step` int32[], micro-batches so far; `params` in the policy's param dtype;
    `model_state`, None without one; `opt_state`, the optimizer's own; `loss_scale`, the scaler's own; `rng`, a key
    from which every micro-batch's key is folded.
    """

    step: jax.Array
    micro_step: jax.Array
    params: Any
    model_state: Any
    opt_state: Any
    loss_scale: Any
    rng: jax.Array


class TrainStep:
    """A jitted training step: `state, metrics = step(state, batch)`. Built by `train_step`."""

    def __init__(self, init: Callable[..., TrainState], pure: Callable[..., Any]) -> None:
        self._init = init
        self.pure = pure
        """The step as a plain function of (state, batch), to be composed or jitted otherwise."""
        self.jitted = jax.jit(pure, donate_argnums=0)

    def init(self, params: Any, *, model_state: Any = None, seed: int = 0) -> TrainState:
        """A fresh state around a copy of `params`."""
        return self._init(params, model_state, seed)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """One optimizer update from one effective batch [k·B, …]. `state` is donated: use the one returned.

        The metrics, scalars: `loss` and the loss_fn's own, averaged by weight over the window; `weight`; `grad_norm`,
        unscaled and before clipping; `loss_scale`, as used here; `skipped`, whether an inf or NaN left everything as
        it was; `applied`, updates applied so far, which is what schedules count.
        """
        return self.jitted(state, batch)


def train_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    *,
    precision: str | Policy = "fp32",
    accumulate: int = 1,
    clip_norm: float | None = None,
    remat: str = "none",
    loss_scale: optax.GradientTransformation | None = None,
) -> TrainStep:
    """The training step of `loss_fn` under `optimizer`.

    `precision`: a policy of `jaxtrain.precision`. `accumulate`: micro-batches to a window. `clip_norm`: bound on the
    global gradient norm, as PyTorch clips it. `remat`: what blocks keep for the backward pass (`jaxtrain.remat`).
    `loss_scale`: by default dynamic for fp16 and none otherwise. Raises `UserError` for values it does not know.

    >>> def loss_fn(params, batch, rng):
    ...     error = batch["x"] @ params - batch["y"]
    ...     return Loss((error**2).sum(), weight=len(error)), {}
    >>> step = train_step(loss_fn, optax.sgd(0.1), accumulate=2, clip_norm=1.0)
    >>> state = step.init(jnp.zeros(3), seed=0)
    >>> state, metrics = step(state, {"x": jnp.ones((4, 3)), "y": jnp.ones(4)})
    >>> float(metrics["loss"]), int(metrics["applied"])
    (1.0, 1)
    """
    if not isinstance(accumulate, int) or accumulate < 1:
        raise UserError(f"accumulate {accumulate} is not a number of micro-batches: make it 1 or more")
    if clip_norm is not None and not clip_norm > 0:
        raise UserError(f"clip_norm {clip_norm} bounds nothing: make it positive, or None for no clipping")
    numerics = policy(precision)
    scaler = loss_scale or (dynamic_loss_scale() if numerics.loss_scaling else no_loss_scale())
    optimizer = optax.with_extra_args_support(optimizer)
    compute_loss = in_float32(rematerialise(numerics.apply(checked(loss_fn)), remat))

    def scaled_loss(params: Any, micro_batch: Any, rng: Any, model_state: Any, scale: Any) -> Any:
        loss, metrics, model_state = compute_loss(params, micro_batch, rng, model_state)
        # The mean over k, as PyTorch's loops divide it, so that fp16 over- and underflows at the same scales.
        mean = loss.total / (window.nonzero(loss.weight) * accumulate)
        return mean * jnp.asarray(scale, mean.dtype), (loss, metrics, model_state)

    differentiate = jax.grad(scaled_loss, has_aux=True)

    def micro_gradient(state: TrainState, micro_batch: Any, model_state: Any, i: Any) -> Any:
        rng = jax.random.fold_in(state.rng, state.micro_step + i)
        grads, aux = differentiate(state.params, micro_batch, rng, model_state, current_scale(state.loss_scale))
        return grads, *aux

    def window_gradient(state: TrainState, batch: Any) -> Any:
        if accumulate == 1:
            grads, loss, metrics, model_state = micro_gradient(state, batch, state.model_state, 0)
            return grads, *jax.tree.map(lambda x: x[None], (loss, metrics)), model_state

        def add_micro_batch(carry: Any, i_and_micro_batch: Any) -> Any:
            opened, model_state = carry
            i, micro_batch = i_and_micro_batch
            grads, loss, metrics, model_state = micro_gradient(state, micro_batch, model_state, i)
            return (window.add(opened, grads, loss.weight, accumulate), model_state), (loss, metrics)

        micro_batches = (jnp.arange(accumulate, dtype=np.int32), window.split(batch, accumulate))
        carry = (window.open_window(state.params), state.model_state)
        (closed, model_state), (losses, metrics) = lax.scan(add_micro_batch, carry, micro_batches)
        return window.mean_gradient(closed), losses, metrics, model_state

    def step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        grads, losses, metrics, model_state = window_gradient(state, batch)
        grads, scaler_state = scaler.update(grads, state.loss_scale)
        skip = found_inf(scaler_state)
        grads, grad_norm = clip_grad_norm(grads, clip_norm)
        updates, opt_state = _permissive(optimizer.update)(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        params, opt_state = _keep_if(skip, (state.params, state.opt_state), (params, opt_state))
        new = TrainState(
            step=state.step + 1,
            micro_step=state.micro_step + accumulate,
            params=params,
            model_state=model_state,
            opt_state=opt_state,
            loss_scale=scaler_state,
            rng=state.rng,
        )
        truth = {
            "loss": _mean(losses),
            "weight": losses.weight.sum(),
            "grad_norm": grad_norm,
            "loss_scale": jnp.asarray(current_scale(state.loss_scale), np.float32),
            "skipped": jnp.asarray(skip),
            "applied": new.step - skipped(scaler_state),
        }
        return new, {**truth, **{name: _mean(sums) for name, sums in metrics.items()}}

    def init(params: Any, model_state: Any, seed: int) -> TrainState:
        params = numerics.cast_params(params)
        zero = jnp.zeros([], np.int32)
        return TrainState(
            step=zero,
            micro_step=jnp.copy(zero),
            params=params,
            model_state=jax.tree.map(jnp.copy, model_state),
            # Copies: an optimizer that keeps the first parameters shares their buffers, and both are donated.
            opt_state=jax.tree.map(jnp.copy, _permissive(optimizer.init)(params)),
            loss_scale=scaler.init(params),
            rng=jax.random.key(seed),
        )

    return TrainStep(init, step)


def eval_step(loss_fn: LossFn, *, precision: str | Policy = "fp32") -> Callable[[TrainState, Any], dict[str, Loss]]:
    """The jitted evaluation of one batch: `loss` and the loss_fn's metrics as `Loss`es, to be summed over batches."""
    compute_loss = in_float32(policy(precision).apply(checked(loss_fn)))

    def evaluate(state: TrainState, batch: Any) -> dict[str, Loss]:
        loss, metrics, _ = compute_loss(state.params, batch, None, state.model_state)
        return {"loss": loss, **metrics}

    return jax.jit(evaluate)


def _mean(sums: Loss) -> jax.Array:
    """The mean over a window of sums stacked by micro-batch."""
    total, weight = sums.total.sum(), sums.weight.sum()
    return total / window.nonzero(weight)


def _keep_if(skip: jax.Array | bool, old: Any, new: Any) -> Any:
    """`old` where the update is skipped: chosen, not added to zero, so that not even a -0.0 changes."""
    return new if skip is False else jax.tree.map(lambda o, n: jnp.where(skip, o, n), old, new)


def _permissive(fn: Callable[..., Any]) -> Callable[..., Any]:
    """An optimizer's function under JAX's ordinary promotion: optax relies on it, whatever the caller's mode."""

    def called(*args: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return fn(*args)

    return called
