"""Build the jitted training step of a loss_fn and an optimizer."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.errors import user_facing
from jaxtrain.passes import Hook, Policy, policy
from jaxtrain.paths import Frozen, none_frozen
from jaxtrain.step.accumulate import WindowSchedule
from jaxtrain.step.checks.batch import require_32_bits
from jaxtrain.step.checks.diagnosis import diagnosed, takes_one_batch
from jaxtrain.step.checks.first_loss import warn_of_first_loss
from jaxtrain.step.checks.mistakes import check_loss_fn, check_optimizer, location_of
from jaxtrain.step.checks.rebuilding import Uses, warn_of_rebuilding
from jaxtrain.step.checks.retrace import limit_recompilation
from jaxtrain.step.compiler_options import CompilerOptions, compiler_options
from jaxtrain.step.initial_state import init_state
from jaxtrain.step.loss_program import LossProgram
from jaxtrain.step.loss_scale import dynamic_loss_scale, no_loss_scale
from jaxtrain.step.objective import LossFn
from jaxtrain.step.options import StepOptions
from jaxtrain.step.parts import StepParts
from jaxtrain.step.state import TrainState, materialize, require_present
from jaxtrain.step.step import Step, batch_step
from jaxtrain.step.update.float32_arithmetic import optimizer_in_float32
from jaxtrain.step.update.update_metrics import Metrics
from jaxtrain.step.window.streaming import flush, micro_step


class TrainStep:
    """A jitted training step, built by `train_step`: one window per call, or one micro-batch.

    Attributes:
      parts: The parts of the step.
      pure: The step as a plain function (state, batch) → (state, metrics), to be composed or jitted otherwise.
      jitted: `pure` under `jax.jit`, its state donated.
      warns: Whether the first call warns of a loss that its batch makes NaN or inf, for which it waits.
    """

    def __init__(self, parts: StepParts) -> None:
        self.parts = parts
        self.warns = True
        self._uses = Uses(location_of(parts.loss.loss_fn))
        self.pure: Step = partial(batch_step, parts)
        self.jitted = self._jit(self.pure, "state", "batch")
        self._micro = self._jit(partial(micro_step, parts), "state", "micro_batch")
        self._flush = self._jit(partial(flush, parts), "state")

    def _jit(self, step: Step, *names: str) -> Any:
        limited = limit_recompilation(step, names, self.parts.options.allow_recompile)
        return jax.jit(limited, donate_argnums=0, compiler_options=self.compiler_options)

    @property
    def compiler_options(self) -> CompilerOptions | None:
        """XLA's options that `jitted` is compiled with; None for its defaults."""
        loss = self.parts.loss
        fp8 = loss.policy.fp8 is not None
        return compiler_options(deterministic=self.parts.options.deterministic, platform=loss.platform, fp8=fp8)

    def for_platform(self, platform: str) -> "TrainStep":
        """Return the same step compiled for a platform, such as "gpu", that is not the default backend's."""
        return TrainStep(self.parts.for_platform(platform))

    @user_facing
    def init(
        self, params: Any, *, model_state: Any = None, seed: int = 0, streaming: bool = False, donate: bool = False
    ) -> TrainState:
        """Create the state before the first update, around a copy of `params`.

        Args:
          params: Pytree of arrays, or a function that creates it.
          model_state: Pytree of model state, or a function that creates it; None for a model without any.
          seed: Seed of the key that every micro-batch's key is derived from.
          streaming: Whether to add a window to the state, for `micro`.
          donate: Whether the state may take over the arrays of `params` and `model_state`, which are copied otherwise.

        Returns:
          A `TrainState`, its trained parameters in the policy's param dtype. Frozen ones in bfloat16 or float16 keep
          their dtype where the policy has float32 parameters: they need no masters, and are converted where they are
          used.

        Raises:
          UserError: No parameter is trained, `frozen` matches none, or one is a Python int.
        """
        return init_state(self.parts, materialize(params), materialize(model_state), seed, streaming, donate=donate)

    @user_facing
    def shapes(self, params: Any, *, model_state: Any = None, seed: int = 0, streaming: bool = False) -> TrainState:
        """Return the state that `init` would create, as `jax.ShapeDtypeStruct`s: nothing is allocated.

        `params` and `model_state` may be shapes as well.
        """

        def init() -> TrainState:
            arrays, state = _with_arrays(materialize(params)), _with_arrays(materialize(model_state))
            return init_state(self.parts, arrays, state, seed, streaming)

        return jax.eval_shape(init)

    @user_facing
    def compile(self, state: TrainState, batch: Any) -> Any:
        """Compile `self(state, batch)`.

        Args:
          state: A state, or its shapes.
          batch: A batch, or its shapes.

        Returns:
          A `jax.stages.Compiled`.
        """
        return self.jitted.lower(state, batch).compile()

    @takes_one_batch
    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Apply one optimizer update computed from one effective batch.

        Args:
          state: The state, which is donated: use the one returned.
          batch: Pytree of arrays [k·B, …].

        Returns:
          A tuple (state, metrics). The metrics are scalars:

          - `loss` and the loss_fn's own metrics, averaged by weight over the window; `weight`.
          - `grad_norm`, unscaled and before clipping.
          - `loss_scale` and `lr` used by this update; `lr` only if the optimizer's state holds it, as that of
            `jaxtrain.optim` and of `optax.inject_hyperparams` does.
          - `skipped`: whether an inf or NaN left everything unchanged.
          - `applied`: updates applied so far, which is what schedules count; `attempted`: those and the skipped ones.
          - `nonfinite_micro_batch`, `nonfinite_leaf`: location in the window of the gradient's first inf or NaN, −1
            if there is none; `jaxtrain.leaf_name` names the leaf.

        Raises:
          UserError: The state or the batch does not fit the step, or shapes changed more than `allow_recompile` times.
        """
        require_32_bits(batch)
        return self._call(self.jitted, state, batch)

    def place(self, batch: Any) -> Any:
        """Transfer a batch to the device for `placed`, without waiting for the transfer.

        Raises:
          UserError: An integer of the batch is beyond 32 bits.
        """
        require_32_bits(batch)
        return jax.device_put(batch)

    def placed(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """As `__call__`, with a batch that `place` has returned."""
        return self._call(self.jitted, state, batch)

    @takes_one_batch
    def micro(self, state: TrainState, micro_batch: Any) -> tuple[TrainState, Metrics]:
        """Add one micro-batch to the state's window, and apply the update if that completes it.

        The update is computed by the operations of the whole window's batch, in the same order.

        Args:
          state: A state of `init(…, streaming=True)`, which is donated.
          micro_batch: Pytree of arrays [B, …].

        Returns:
          A tuple (state, metrics). `updated` is whether the update was applied; `loss` and `weight` are of the window
          so far, the loss_fn's metrics of the micro-batch. Until the window is complete `grad_norm` is 0 and `skipped`
          is False.
        """
        require_32_bits(micro_batch)
        return self._call(self._micro, state, micro_batch)

    def flush(self, state: TrainState) -> tuple[TrainState, Metrics]:
        """Apply the update of an incomplete window; leave the state as it is if the window is empty."""
        return self._call(self._flush, state)

    def _call(self, step: Callable[..., Any], state: TrainState, *batch: Any) -> tuple[TrainState, Metrics]:
        require_present(state)
        self._uses.calls += 1
        is_first = self._uses.calls == 1
        if is_first:
            warn_of_rebuilding(self._uses, state)
        try:
            new: tuple[TrainState, Metrics] = step(state, *batch)
        except Exception as error:
            raise diagnosed(error, state, batch[0] if batch else {}, self.parts)  # noqa: B904
        if is_first and self.warns:
            warn_of_first_loss(new[1], batch[0] if batch else {}, self.parts.loss.loss_fn)
        return new


@user_facing
def train_step(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    *,
    precision: str | Policy = "fp32",
    accumulate: int | WindowSchedule = 1,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    frozen: Frozen = none_frozen,
    ema: float | None = None,
    remat: str = "none",
    unroll: bool = False,
    loss_scale: optax.GradientTransformation | None = None,
    hooks: Mapping[str, Hook] | None = None,
    allow_recompile: int | None = None,
    deterministic: bool = False,
    gradient_sums: str = "whole",
    reshard_after: str = "forward",
    pipeline_chunks: int = 1,
) -> TrainStep:
    """Build the jitted training step of a loss function under an optimizer.

    Args:
      loss_fn: `loss_fn(params, batch, rng) -> (Loss, metrics)`; with model state
        `loss_fn(params, batch, rng, model_state) -> (Loss, metrics, model_state)`.
      optimizer: An optax transformation, of `jaxtrain.optim` or of optax.
      precision: "fp64", "fp32", "tf32", "bf16", "fp16", "bf16_compute", "bf16_params",
        "bf16_params_stochastic", "bf16_params_kahan", "fp8", "fp8_delayed", "fp8_row", "fp8_block", or a `Policy`.
      accumulate: Micro-batches per window, or a schedule of them: a function of the number of applied updates. With a
        schedule the micro-batches are passed to `TrainStep.micro`.
      clip_norm: Upper bound of the gradient's global norm, as `torch.nn.utils.clip_grad_norm_`. None for no clipping.
      clip_value: Upper bound of the gradient's elements, as `torch.nn.utils.clip_grad_value_`; after `clip_norm`. None
        for no clipping.
      frozen: Predicate on a parameter's path ("blocks/qkv/kernel"): whether it is not trained.
      ema: Decay in [0, 1) of a moving average of the parameters, updated with every applied update. None for no
        average.
      remat: What marked blocks store for the backward pass: "none", "full", "dots", "dots_no_batch", "names:a,b" or
        "offload:a,b" (`jaxtrain.passes.memory.remat`).
      unroll: Whether to compile the layers that the model scans over one by one: slower to compile, faster to run.
      loss_scale: A loss scaler. None for `dynamic_loss_scale()` in fp16 and no scaling otherwise.
      hooks: Functions of the gradient, by parameter path or by `checkpoint_name` of a value.
      allow_recompile: Number of further compilations allowed for other shapes or dtypes. None allows any number, and
        warns once of a batch with fewer rows.
      deterministic: Whether the step computes the same bits whenever it is compiled and run on a kind of GPU, as with
        `torch.use_deterministic_algorithms(True)`: slower, and an error for an operation that has no such kernel. Then
        `pure`, not `jitted`, is for use inside another `jax.jit`. CPUs always do.
      gradient_sums: What a device of the mesh axis fsdp keeps between the micro-batches of a window: "whole" for the
        sums of its own rows' gradients, added over devices once a window; "sharded" for its part of the sums over all
        rows, added over devices in every micro-batch, which takes less memory.
      reshard_after: How long a device of the mesh axis fsdp keeps the parameters that it has gathered: "forward" for
        the forward pass of a layer, and again for its backward pass, in every micro-batch (ZeRO-3); "window" for all
        micro-batches of a window, in the dtypes that the step computes in, which takes more memory (ZeRO-2,
        `reshard_after_forward=False` of PyTorch's `fully_shard`).
      pipeline_chunks: Chunks of layers that a device of the mesh axis pipeline has: more shorten the bubble, and
        communicate more (the interleaved schedule of Narayanan et al. 2021).

    Returns:
      A `TrainStep`: `state = step.init(params)`, then `state, metrics = step(state, batch)`.

    Raises:
      UserError: An argument is out of range or unknown.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxtrain import Loss
      >>> def loss_fn(params, batch, rng):
      ...     error = batch["x"] @ params - batch["y"]
      ...     return Loss((error**2).sum(), weight=len(error)), {}
      >>> step = train_step(loss_fn, optax.sgd(0.1), accumulate=2, clip_norm=1.0)
      >>> state = step.init(jnp.zeros(3), seed=0)
      >>> state, metrics = step(state, {"x": jnp.ones((4, 3)), "y": jnp.ones(4)})
      >>> float(metrics["loss"]), int(metrics["applied"])
      (1.0, 1)
    """
    check_loss_fn(loss_fn)
    check_optimizer(optimizer)
    options = StepOptions(
        precision=precision,
        accumulate=accumulate,
        clip_norm=clip_norm,
        clip_value=clip_value,
        frozen=frozen,
        ema=ema,
        remat=remat,
        unroll=unroll,
        loss_scale=loss_scale,
        hooks=hooks,
        allow_recompile=allow_recompile,
        deterministic=deterministic,
        gradient_sums=gradient_sums,
        reshard_after=reshard_after,
        pipeline_chunks=pipeline_chunks,
    )
    options.check()
    numerics = policy(precision)
    loss = LossProgram(loss_fn, numerics, hooks=hooks or {}, frozen=frozen, unroll=unroll, remat=remat)
    scaler = loss_scale or (dynamic_loss_scale() if numerics.loss_scaling else no_loss_scale())
    return TrainStep(StepParts(loss, loss.compute(), optimizer_in_float32(optimizer), scaler, options))


def _with_arrays(tree: Any) -> Any:
    """Return `tree` with arrays in place of shapes."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x, tree)
