"""A JAX training step with one feature more or less, to see what each costs."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jaxtrain
from benchmarks.job import Job
from jaxtrain.cpu.products import cpu_products
from jaxtrain.step import dynamic_loss_scale, validated
from jaxtrain.transforms import policy, unroll
from parity.case import Case

FEATURES: Mapping[str, Mapping[str, Any]] = {
    "": {},
    "no clipping": {"clip_norm": None},
    "loss scaling": {"loss_scale": dynamic_loss_scale(init_scale=1024.0)},
    "ema": {"ema": 0.999},
}
"""Options of `jaxtrain.train_step`, by what they add."""


def train_step(case: Case, job: Job) -> Any:
    """The step of `job`: jaxtrain's, or the barest that could do its work."""
    if job.feature in BY_HAND:
        return BY_HAND[job.feature](case, job)
    options = {"clip_norm": case.clip_norm, **FEATURES[job.feature]}
    return jaxtrain.train_step(
        case.loss_fn,
        case.optimizer.jax,
        precision=job.precision,
        accumulate=job.accumulate,
        remat=job.remat,
        unroll=True,
        **options,
    )


class Bare(NamedTuple):
    """Parameters and optimizer state, and nothing else."""

    params: Any
    opt_state: Any
    rng: jax.Array


class BareStep:
    """What a tutorial writes: differentiate, update; no clipping, no check, no metrics but the loss."""

    def __init__(self, case: Case, job: Job) -> None:
        self.optimizer = case.optimizer.jax
        mean = _mean_loss(case, job)

        def whole(state: Bare, batch: Any) -> tuple[Bare, dict[str, Any]]:
            loss, grads = jax.value_and_grad(mean)(state.params, batch, state.rng)
            updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
            return Bare(optax.apply_updates(state.params, updates), opt_state, state.rng), {"loss": loss}

        self.pure = whole
        self.jitted = jax.jit(whole, donate_argnums=0)

    def init(self, params: Any, model_state: Any) -> Bare:
        """A fresh state; `model_state` has no place in it."""
        if model_state is not None:
            raise ValueError("the bare step keeps no model state: time it on a model without")
        return Bare(params, self.optimizer.init(params), jax.random.key(0))


class Accumulating(NamedTuple):
    """And the window's sums: of the gradients, and of the losses."""

    params: Any
    opt_state: Any
    rng: jax.Array
    grads: Any
    loss: jax.Array


class MicroSteps:
    """What a PyTorch user's loop would be: `add` a micro-batch's gradient to the sums, `accumulate` times; `update`."""

    def __init__(self, case: Case, job: Job) -> None:
        self.optimizer = case.optimizer.jax
        mean = _mean_loss(case, job)
        clip = optax.clip_by_global_norm(case.clip_norm)

        def add(state: Accumulating, micro_batch: Any) -> Accumulating:
            loss, grads = jax.value_and_grad(mean)(state.params, micro_batch, state.rng)
            summed = jax.tree.map(lambda total, g: total + g / job.accumulate, state.grads, grads)
            return state._replace(grads=summed, loss=state.loss + loss / job.accumulate)

        def update(state: Accumulating) -> tuple[Accumulating, jax.Array]:
            grads, _ = clip.update(state.grads, clip.init(state.params))
            updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            zeros = jax.tree.map(jnp.zeros_like, state.grads)
            return Accumulating(params, opt_state, state.rng, zeros, jnp.zeros_like(state.loss)), state.loss

        self.add, self.update = jax.jit(add, donate_argnums=0), jax.jit(update, donate_argnums=0)

    def init(self, params: Any, model_state: Any) -> Accumulating:
        """A fresh state, its sums empty."""
        zeros = jax.tree.map(jnp.zeros_like, params)
        return Accumulating(params, self.optimizer.init(params), jax.random.key(0), zeros, jnp.zeros([]))


def _mean_loss(case: Case, job: Job) -> Callable[..., jax.Array]:
    compute = cpu_products(unroll(policy(job.precision).apply(validated(case.loss_fn))))

    def mean(params: Any, batch: Any, rng: Any) -> Any:
        loss, *_ = compute(params, batch, rng, None)
        return loss.total / loss.weight

    return mean


BY_HAND: Mapping[str, Callable[[Case, Job], Any]] = {"bare": BareStep}
MICRO_STEPS = "a call each"
