"""The training step: scale, differentiate, accumulate, unscale, check, clip, update, rescale.

One pure function of a state and a batch, jitted once, its state donated. It knows nothing of models, files, hosts or
logging: whatever a run must remember is in `TrainState`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxtrain.cpu.products import cpu_products, loop_convolutions
from jaxtrain.errors import UserError
from jaxtrain.paths import Frozen, merge, nothing, partition
from jaxtrain.step import accumulate as window
from jaxtrain.step.arithmetic import in_float32 as in_float32_arithmetic
from jaxtrain.step.arithmetic import wide
from jaxtrain.step.clip import clip_grad_norm, clip_grad_value
from jaxtrain.step.ema import moved
from jaxtrain.step.learning_rate import used_learning_rate
from jaxtrain.step.loss_scale import current_scale, dynamic_loss_scale, found_inf, no_loss_scale, skipped
from jaxtrain.step.nonfinite import Nonfinite, locate
from jaxtrain.step.objective import Loss, LossFn, checked, in_float32
from jaxtrain.step.retrace import budgeted
from jaxtrain.transforms import Hook, Policy, hooked, policy
from jaxtrain.transforms import remat as rematerialise
from jaxtrain.transforms import unroll as unroll_layers

Step = Callable[..., tuple["TrainState", dict[str, jax.Array]]]
Compute = Callable[..., Any]
"""A loss_fn made sure of: `compute(params, batch, rng, model_state) -> (Loss, metrics, model_state)`."""


class TrainState(NamedTuple):
    """Everything a run is: save it, restore it anywhere, and the run continues bit for bit.

    `step` int32[], windows so far; `micro_step` int32[], micro-batches so far; `params` in the policy's param dtype;
    `model_state`, None without one; `opt_state`, the optimizer's own; `loss_scale`, the scaler's own; `rng`, a key
    from which every micro-batch's key is folded; `window`, of a run that streams its micro-batches, else None; `ema`,
    the moving average of the parameters, or None: `state._replace(params=state.ema)` evaluates it.
    """

    step: jax.Array
    micro_step: jax.Array
    params: Any
    model_state: Any
    opt_state: Any
    loss_scale: Any
    rng: jax.Array
    window: window.Window | None
    ema: Any


class StepFunctions(NamedTuple):
    """A training step as plain functions, to be composed or jitted: of (state, batch) but where it says otherwise.

    `init(params, model_state, seed, streaming)`; `whole`, of a batch [k·B, …]; `window`, of its micro-batches
    [k, B, …], or [B, …] where k is 1; `micro`, of one micro-batch; `flush(state)`.
    """

    init: Callable[..., TrainState]
    whole: Step
    window: Step
    micro: Step
    flush: Step


class TrainStep:
    """A jitted training step, built by `train_step`: a window at a time, or a micro-batch at a time.

    `build(around)` makes its functions of what `around` makes of the loss computation: the identity here, another
    program of the same numbers where the step is to be distributed.
    """

    def __init__(
        self,
        build: Callable[[Callable[[Compute], Compute]], StepFunctions],
        accumulate: int | window.Schedule,
        allow_recompile: int | None,
    ) -> None:
        self.build, self.accumulate, self.allow_recompile = build, accumulate, allow_recompile
        functions = build(lambda compute: compute)
        self._init = functions.init
        self.pure = functions.whole
        """The step as a plain function of (state, batch), to be composed or jitted otherwise."""

        def jitted(step: Step, *names: str) -> Any:
            return jax.jit(budgeted(step, names, allow_recompile), donate_argnums=0)

        self.jitted = jitted(functions.whole, "state", "batch")
        self._micro = jitted(functions.micro, "state", "micro_batch")
        self._flush = jitted(functions.flush, "state")

    def init(self, params: Any, *, model_state: Any = None, seed: int = 0, streaming: bool = False) -> TrainState:
        """A fresh state around a copy of `params`; with `streaming`, one that holds a window, for `micro`.

        `params` and `model_state` may be functions that make them.
        """
        return self._init(made(params), made(model_state), seed, streaming)

    def shapes(self, params: Any, *, model_state: Any = None, seed: int = 0, streaming: bool = False) -> TrainState:
        """The state that `init` would make, as `jax.ShapeDtypeStruct`s: nothing is allocated."""
        return jax.eval_shape(lambda: self._init(made(params), made(model_state), seed, streaming))

    def compile(self, state: TrainState, batch: Any) -> Any:
        """The compiled program of `self(state, batch)`, a `jax.stages.Compiled`; the state may be one of shapes."""
        return self.jitted.lower(state, batch).compile()

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """One optimizer update from one effective batch [k·B, …]. `state` is donated: use the one returned.

        The metrics, scalars: `loss` and the loss_fn's own, averaged by weight over the window; `weight`; `grad_norm`,
        unscaled and before clipping; `loss_scale`, as used here; `lr`, as used here, where the optimizer's state tells
        (`jaxtrain.optim`'s and `optax.inject_hyperparams`'s do); `skipped`, whether an inf or NaN left everything as
        it was; `applied`, updates applied so far, which is what schedules count, of `attempted`;
        `nonfinite_micro_batch` and `nonfinite_leaf` (`jaxtrain.leaf_name` names it), where in the window the first inf
        or NaN of the gradient was, −1 if nowhere.
        """
        return self.jitted(state, batch)

    def micro(self, state: TrainState, micro_batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """One micro-batch [B, …] into the state's window; where that fills it, an update, as `updated` says.

        `loss` and `weight` are of the window so far, the loss_fn's metrics of the micro-batch; `grad_norm` is 0 and
        `skipped` False until the window closes. The update is that of the whole window's batch, to the bit.
        """
        return self._micro(state, micro_batch)

    def flush(self, state: TrainState) -> tuple[TrainState, dict[str, jax.Array]]:
        """An update from what the window holds, however short; none where it is empty."""
        return self._flush(state)


def train_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    *,
    precision: str | Policy = "fp32",
    accumulate: int | window.Schedule = 1,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    frozen: Frozen = nothing,
    ema: float | None = None,
    remat: str = "none",
    unroll: bool = False,
    loss_scale: optax.GradientTransformation | None = None,
    hooks: Mapping[str, Hook] | None = None,
    allow_recompile: int | None = None,
) -> TrainStep:
    """The training step of `loss_fn` under `optimizer`.

    `precision`: a policy of `jaxtrain.transforms`. `accumulate`: micro-batches to a window, or a schedule of them by
    applied update, whose micro-batches are then streamed. `clip_norm`: bound on the global gradient norm, or
    `clip_value`: on its elements, as PyTorch clips them. `frozen`: which parameters, by path, are not trained. `ema`:
    decay of a moving average of the parameters, which applied updates move. `remat`: what blocks keep for the backward
    pass (`transforms.remat`). `unroll`: compile the layers that the model scans over one by one, which takes longer and
    runs faster. `loss_scale`: by default dynamic for fp16 and none otherwise. `hooks`: functions of
    the gradient at a parameter, by path, or at a value, by `checkpoint_name`. `allow_recompile`: how
    often other shapes or dtypes may make it compile again; None for ever so often. Raises `UserError` for values it
    does not know.

    >>> def loss_fn(params, batch, rng):
    ...     error = batch["x"] @ params - batch["y"]
    ...     return Loss((error**2).sum(), weight=len(error)), {}
    >>> step = train_step(loss_fn, optax.sgd(0.1), accumulate=2, clip_norm=1.0)
    >>> state = step.init(jnp.zeros(3), seed=0)
    >>> state, metrics = step(state, {"x": jnp.ones((4, 3)), "y": jnp.ones(4)})
    >>> float(metrics["loss"]), int(metrics["applied"])
    (1.0, 1)
    """
    if not callable(accumulate) and (not isinstance(accumulate, int) or accumulate < 1):
        raise UserError(f"accumulate {accumulate} is not a number of micro-batches: make it 1 or more")
    for name, bound in {"clip_norm": clip_norm, "clip_value": clip_value}.items():
        if bound is not None and not bound > 0:
            raise UserError(f"{name} {bound} bounds nothing: make it positive, or None for no clipping")
    if ema is not None and not 0 <= ema < 1:
        raise UserError(f"ema {ema} is no decay: make it 0 or more, below 1, or None for no average")
    numerics = policy(precision)
    scaler = loss_scale or (dynamic_loss_scale() if numerics.loss_scaling else no_loss_scale())
    optimizer = in_float32_arithmetic(optimizer)
    clip = partial(_clipped, norm=clip_norm, value=clip_value)

    def build(around: Callable[[Compute], Compute]) -> StepFunctions:
        numeric = numerics.apply(hooked(around(checked(loss_fn)), hooks or {}))
        compute = in_float32(rematerialise(cpu_products(unroll_layers(numeric) if unroll else numeric), remat))
        return _functions(compute, optimizer, numerics, scaler, accumulate, clip, frozen, ema)

    return TrainStep(build, accumulate, allow_recompile)


def _functions(
    compute_loss: Compute,
    optimizer: optax.GradientTransformation,
    numerics: Policy,
    scaler: optax.GradientTransformation,
    accumulate: int | window.Schedule,
    clip: Callable[[Any], tuple[Any, jax.Array]],
    frozen: Frozen,
    ema: float | None,
) -> StepFunctions:
    """The step itself, of parts made ready."""

    def scaled_loss(trained: Any, kept: Any, micro_batch: Any, rng: Any, model_state: Any, scale: Any, k: Any) -> Any:
        loss, metrics, model_state = compute_loss(merge(trained, kept), micro_batch, rng, model_state)
        # The mean over k, as PyTorch's loops divide it, so that fp16 over- and underflows at the same scales.
        mean = loss.total / (window.nonzero(loss.weight) * jnp.asarray(k, loss.weight.dtype))
        return mean * jnp.asarray(scale, mean.dtype), (loss, metrics, model_state)

    differentiate = jax.grad(scaled_loss, has_aux=True)
    differentiate_in_loop = loop_convolutions(differentiate)

    def micro_gradient(
        state: TrainState, micro_batch: Any, model_state: Any, i: Any, k: Any, differentiate: Any = differentiate
    ) -> Any:
        rng = micro_batch_key(state.rng, state.micro_step + i)
        trained, kept = partition(state.params, frozen)
        scale = current_scale(state.loss_scale)
        grads, aux = differentiate(trained, kept, micro_batch, rng, model_state, scale, k)
        return wide(grads), *aux

    def empty_window(params: Any) -> window.Window:
        trained, _ = partition(params, frozen)
        return window.open_window(trained)

    def window_gradient(state: TrainState, micro_batches: Any, k: int) -> Any:
        if k == 1:
            grads, *rest = micro_gradient(state, micro_batches, state.model_state, 0, k)
            return grads, *rest, None

        def add_micro_batch(carry: Any, i_and_micro_batch: Any) -> Any:
            opened, model_state = carry
            i, micro_batch = i_and_micro_batch
            grads, loss, metrics, model_state = micro_gradient(
                state, micro_batch, model_state, i, k, differentiate_in_loop
            )
            return (window.add(opened, grads, loss, k), model_state), metrics

        numbered = (jnp.arange(k, dtype=np.int32), micro_batches)
        carry = (empty_window(state.params), state.model_state)
        (closed, model_state), metrics = lax.scan(add_micro_batch, carry, numbered)
        metrics = jax.tree.map(lambda x: x.sum(0), metrics)
        return window.mean_gradient(closed), closed.loss, metrics, model_state, closed.nonfinite

    def update(
        state: TrainState, grads: Any, loss: Loss, nonfinite: Nonfinite | None
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Unscale, check, clip, update, rescale. `nonfinite` is None where one micro-batch is the whole window."""
        unscaled, scaler_state = scaler.update(grads, state.loss_scale)
        skip = found_inf(scaler_state)
        nonfinite = locate(grads, 0, unscaled) if nonfinite is None else nonfinite
        grads, grad_norm = clip(unscaled)
        old, kept = partition(state.params, frozen)
        value = loss.total / window.nonzero(loss.weight)
        updates, opt_state = optimizer.update(grads, state.opt_state, old, value=value)
        lr = used_learning_rate(opt_state)
        params = merge(jax.tree.map(_moved_by, old, updates), kept)
        average = None if ema is None else moved(state.ema, params, ema, first=applied(state) == 0)
        before = state.params, state.opt_state, state.ema
        params, opt_state, average = _keep_if(skip, before, (params, opt_state, average))
        new = state._replace(
            step=state.step + 1, params=params, opt_state=opt_state, loss_scale=scaler_state, ema=average
        )
        return new, _truth(state, new, grad_norm, skip, lr, nonfinite)

    def whole(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        return of_window(state, batch if callable(accumulate) else window.split(batch, accumulate))

    def of_window(state: TrainState, micro_batches: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        if callable(accumulate):
            raise UserError("accumulate is a schedule: give its micro-batches one by one to step.micro")
        if state.window is not None:
            raise UserError("the state streams micro-batches: give them to step.micro, or init without streaming")
        grads, loss, metrics, model_state, nonfinite = window_gradient(state, micro_batches, accumulate)
        new, truth = update(state, grads, loss, nonfinite)
        new = new._replace(micro_step=state.micro_step + accumulate, model_state=model_state)
        return new, {**truth, **_means(loss, metrics)}

    def micro(state: TrainState, micro_batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        opened = _opened(state)
        if accumulate == 1:
            new, truth = of_window(state._replace(window=None), micro_batch)
            return new._replace(window=opened), {**truth, "updated": jnp.array(True)}
        k = accumulate(applied(state)) if callable(accumulate) else accumulate
        grads, loss, metrics, model_state = micro_gradient(state, micro_batch, state.model_state, 0, k)
        opened = window.add(opened, grads, loss, k)
        state = state._replace(micro_step=state.micro_step + 1, model_state=model_state, window=opened)
        new, truth = lax.cond(window.count(opened) >= k, close, leave_open, state)
        return new, {**truth, **_means(opened.loss, metrics)}

    def flush(state: TrainState) -> tuple[TrainState, dict[str, jax.Array]]:
        opened = _opened(state)
        new, truth = lax.cond(window.count(opened) > 0, close, leave_open, state)
        return new, {**truth, **_means(opened.loss, {})}

    def close(state: TrainState) -> tuple[TrainState, dict[str, jax.Array]]:
        closed = _opened(state)
        new, truth = update(state, window.mean_gradient(closed), closed.loss, closed.nonfinite)
        return new._replace(window=empty_window(state.params)), {**truth, "updated": jnp.array(True)}

    def leave_open(state: TrainState) -> tuple[TrainState, dict[str, jax.Array]]:
        opened = _opened(state)
        norm = jnp.zeros([], opened.loss.total.dtype)
        truth = _truth(state, state, norm, False, used_learning_rate(state.opt_state), opened.nonfinite)
        return state, {**truth, "updated": jnp.array(False)}

    def init(params: Any, model_state: Any, seed: int, streaming: bool) -> TrainState:
        params = numerics.cast_params(params)
        trained, _ = partition(params, frozen)
        zero = jnp.zeros([], np.int32)
        return TrainState(
            step=zero,
            micro_step=jnp.copy(zero),
            params=params,
            model_state=numerics.cast_params(model_state),
            # Copies: an optimizer that keeps the first parameters shares their buffers, and both are donated.
            opt_state=jax.tree.map(jnp.copy, optimizer.init(trained)),
            loss_scale=scaler.init(trained),
            rng=jax.random.key(seed),
            window=empty_window(params) if streaming else None,
            ema=None if ema is None else jax.tree.map(jnp.copy, params),
        )

    return StepFunctions(init, whole, of_window, micro, flush)


def makes(tree: Any) -> bool:
    """Whether it is a function that makes a tree: one that is no tree itself, as a callable module is."""
    return callable(tree) and jax.tree_util.all_leaves([tree])


def made(tree: Any) -> Any:
    """`tree`, or what it makes where it is a function.

    >>> made({"w": 1.0}) == made(lambda: {"w": 1.0})
    True
    """
    return tree() if makes(tree) else tree


def micro_batch_key(rng: jax.Array, micro_step: int | jax.Array) -> jax.Array:
    """The key of micro-batch number `micro_step` of a run whose key is `rng`."""
    return jax.random.fold_in(rng, micro_step)


def applied(state: TrainState) -> jax.Array:
    """int32[]: the updates applied so far, which is what schedules count."""
    return state.step - skipped(state.loss_scale)


def eval_step(loss_fn: LossFn, *, precision: str | Policy = "fp32") -> Callable[[TrainState, Any], dict[str, Loss]]:
    """The jitted evaluation of one batch: `loss` and the loss_fn's metrics as `Loss`es, to be summed over batches."""
    compute_loss = in_float32(cpu_products(policy(precision).apply(checked(loss_fn))))

    def evaluate(state: TrainState, batch: Any) -> dict[str, Loss]:
        loss, metrics, _ = compute_loss(state.params, batch, None, state.model_state)
        return {"loss": loss, **metrics}

    return jax.jit(evaluate)


def _clipped(grads: Any, norm: float | None, value: float | None) -> tuple[Any, jax.Array]:
    """The gradients clipped by norm and by value, and the norm they had before."""
    grads, grad_norm = clip_grad_norm(grads, norm)
    return clip_grad_value(grads, value), grad_norm


def _opened(state: TrainState) -> window.Window:
    if state.window is None:
        raise UserError("the state holds no window: step.init(params, streaming=True) makes one that does")
    return state.window


def _truth(
    old: TrainState,
    new: TrainState,
    grad_norm: jax.Array,
    skip: jax.Array | bool,
    lr: jax.Array | None,
    nonfinite: Nonfinite,
) -> dict[str, jax.Array]:
    """What an update really was."""
    return {
        **({} if lr is None else {"lr": lr}),
        "grad_norm": grad_norm,
        "loss_scale": jnp.asarray(current_scale(old.loss_scale), np.float32),
        "skipped": jnp.asarray(skip),
        "applied": applied(new),
        "attempted": new.step,
        "nonfinite_micro_batch": nonfinite.micro_batch,
        "nonfinite_leaf": nonfinite.leaf,
    }


def _means(loss: Loss, metrics: dict[str, Loss]) -> dict[str, jax.Array]:
    """The loss, its weight, and the loss_fn's metrics, from their sums."""
    sums = {"loss": loss, **metrics}
    return {"weight": loss.weight, **{name: s.total / window.nonzero(s.weight) for name, s in sums.items()}}


def _keep_if(skip: jax.Array | bool, old: Any, new: Any) -> Any:
    """`old` where the update is skipped: chosen, not added to zero, so that not even a -0.0 changes."""
    return new if skip is False else jax.tree.map(lambda o, n: jnp.where(skip, o, n), old, new)


def _moved_by(param: jax.Array, update: jax.Array) -> jax.Array:
    """Their sum, rounded once to the parameter's dtype."""
    kind = np.promote_types(param.dtype, update.dtype)
    return (param.astype(kind) + update.astype(kind)).astype(param.dtype)
