"""JAX training steps with single features added or removed, to measure what each costs."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jaxtrain
from benchmarks.job import Job
from jaxtrain.cpu.products import cpu_products
from jaxtrain.passes import policy, unroll
from jaxtrain.step import dynamic_loss_scale, validated
from parity.case import Case
from parity.oracle.in_jax import in_float64

FEATURES: Mapping[str, Mapping[str, Any]] = {
    "": {},
    "no clipping": {"clip_norm": None},
    "loss scaling": {"loss_scale": dynamic_loss_scale(init_scale=1024.0)},
    "ema": {"ema": 0.999},
    "loop": {"unroll": False},
    "deterministic": {"unroll": False, "deterministic": True},
}
"""Options of `jaxtrain.train_step`, by feature; "loop" is the loop over layers, which is unrolled otherwise."""
MICRO_STEPS = "a call each"
"""The feature of a window computed by `MicroSteps`."""


def train_step(case: Case, job: Job) -> Any:
    """Return the step of `job`: `jaxtrain.train_step`, or one of `OWN_STEPS`."""
    if job.feature in OWN_STEPS:
        return OWN_STEPS[job.feature](case, job)
    options = {"clip_norm": case.clip_norm, "unroll": True, **FEATURES[job.feature]}
    return jaxtrain.train_step(
        _loss_fn(case, job),
        case.optimizer.jax,
        precision=job.precision,
        accumulate=job.accumulate,
        remat=job.remat,
        **options,
    )


class BareState(NamedTuple):
    """State of `BareStep`: parameters and optimizer state."""

    params: Any
    opt_state: Any
    rng: jax.Array


class BareStep:
    """The step of a tutorial: differentiate and update, without clipping, finite check or metrics."""

    def __init__(self, case: Case, job: Job) -> None:
        self.optimizer = case.optimizer.jax
        mean = _mean_loss(case, job)

        def step(state: BareState, batch: Any) -> tuple[BareState, dict[str, Any]]:
            loss, grads = jax.value_and_grad(mean)(state.params, batch, state.rng)
            updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
            return BareState(optax.apply_updates(state.params, updates), opt_state, state.rng), {"loss": loss}

        self.pure = step
        self.jitted = jax.jit(step, donate_argnums=0)

    def init(self, params: Any, model_state: Any) -> BareState:
        """Return the initial state; `model_state` must be None."""
        if model_state is not None:
            raise ValueError("the bare step supports no model state: use a model without buffers")
        return BareState(params, self.optimizer.init(params), jax.random.key(0))


class AccumulatorState(NamedTuple):
    """State of `MicroSteps`: that of `BareStep` with the window's sums of gradients and of losses."""

    params: Any
    opt_state: Any
    rng: jax.Array
    grads: Any
    loss: jax.Array


class MicroSteps:
    """The loop of a PyTorch user: `add` a micro-batch's gradient, `accumulate` times, then `update`."""

    def __init__(self, case: Case, job: Job) -> None:
        self.optimizer = case.optimizer.jax
        mean = _mean_loss(case, job)
        clip = optax.clip_by_global_norm(case.clip_norm)

        def add(state: AccumulatorState, micro_batch: Any) -> AccumulatorState:
            loss, grads = jax.value_and_grad(mean)(state.params, micro_batch, state.rng)
            summed = jax.tree.map(lambda total, g: total + g / job.accumulate, state.grads, grads)
            return state._replace(grads=summed, loss=state.loss + loss / job.accumulate)

        def update(state: AccumulatorState) -> tuple[AccumulatorState, jax.Array]:
            grads, _ = clip.update(state.grads, clip.init(state.params))
            updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            zeros = jax.tree.map(jnp.zeros_like, state.grads)
            return AccumulatorState(params, opt_state, state.rng, zeros, jnp.zeros_like(state.loss)), state.loss

        self.add, self.update = jax.jit(add, donate_argnums=0), jax.jit(update, donate_argnums=0)

    def init(self, params: Any, model_state: Any) -> AccumulatorState:
        """Return the initial state, with sums of zero."""
        zeros = jax.tree.map(jnp.zeros_like, params)
        return AccumulatorState(params, self.optimizer.init(params), jax.random.key(0), zeros, jnp.zeros([]))


def _mean_loss(case: Case, job: Job) -> Callable[..., jax.Array]:
    compute = cpu_products(unroll(policy(job.precision).apply(validated(_loss_fn(case, job)))))

    def mean(params: Any, batch: Any, rng: Any) -> Any:
        loss, *_ = compute(params, batch, rng, None)
        return loss.total / loss.weight

    return mean


def _loss_fn(case: Case, job: Job) -> Any:
    """Return the case's loss; in fp64 also with constants and casts of the model in float64."""
    return in_float64(case.loss_fn) if job.precision == "fp64" else case.loss_fn


OWN_STEPS: Mapping[str, Callable[[Case, Job], Any]] = {"bare": BareStep}
