"""The training step: clipping, accumulation, loss scale, skipped updates, precision, order of the data."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
import torch
from torch import optim as T
from torch.optim import lr_scheduler as S

from jaxtrain import optim
from jaxtrain.optim import schedules
from jaxtrain.step import (
    apply_updates,
    build,
    clip_grad_norm,
    clip_grad_value,
    dynamic_loss_scale,
    split_batch,
    step,
    stochastic_round,
)
from jaxtrain.step.accumulate import add_micro_batch, mean_gradient
from parity.case import Case
from parity.mutate.mutant import Mutant, Patch, patched
from parity.optimizer import Optimizer
from tests.parity.mutants.losses import square
from tests.parity.mutants.network import SGD, criterion, normal
from tests.parity.mutants.optimizers import squares

GradScaler = torch.amp.GradScaler
LR = 0.05
SLOW = Optimizer("SGD", partial(T.SGD, lr=LR / 50), optim.sgd(LR / 50))
MOMENTUM = Optimizer("SGD", partial(T.SGD, lr=LR, momentum=0.9), optim.sgd(LR, 0.9))
SCHEDULED = Optimizer(
    "SGD", partial(T.SGD, lr=LR), optim.sgd(schedules.step_lr(LR, 2)), scheduler=partial(S.StepLR, step_size=2)
)


def linear(ours: Callable[..., Any] = square, optimizer: Any = SGD, clip_norm: float | None = None) -> Case:
    """A linear layer with a squared error."""
    return criterion(squares, ours, normal, optimizer=optimizer, clip_norm=clip_norm)


def slow_linear() -> Case:
    """`linear` with updates that are small beside the parameters."""
    return linear(optimizer=SLOW)


@cache
def clipped_linear(clip_norm: float | None) -> Callable[[], Case]:
    """`linear` with a bound, the same function object for every mutant, so that they share its clean verdict."""
    return partial(linear, clip_norm=clip_norm)


def stepped(name: str, patch: Patch, stage: str = "", clip_norm: float | None = None, **settings: Any) -> Mutant:
    """A training step with one part patched."""
    case = clipped_linear(clip_norm)
    return Mutant(name, case, case, stage, patch=patch, settings=settings)


def clipped(name: str, wrong: Callable[[Any, float], Any], bound: float = 0.01) -> Mutant:
    """A step with `wrong` for clipping."""
    both = lambda grads, bound: (wrong(grads, bound), optax.tree.norm(grads))  # noqa: E731
    return stepped(name, patched(clip_grad_norm, both, within=step), "clip|update", bound)


def accumulated(name: str, function: Callable[..., Any], wrong: Any, **settings: Any) -> Mutant:
    """A window of four micro-batches, with `wrong` for one function of `jaxtrain.step.accumulate`."""
    return stepped(name, patched(function, wrong, within=step), accumulate=4, **settings)


HIGH = 2.0**24
"""A scale at which the first updates overflow."""


@contextmanager
def scalers(start: float) -> Iterator[None]:
    """Start the loss scale of both sides at `start` and let it grow after two finite updates."""
    ours = partial(dynamic_loss_scale, start, growth_interval=2)
    theirs = partial(GradScaler, init_scale=start, growth_interval=2)
    scaler = patched(dynamic_loss_scale, ours, within=build)
    with patched(GradScaler, theirs, within=torch.amp)(), scaler():
        yield


def scaled(name: str, wrong: Any, start: float = 1024.0) -> Mutant:
    """A step with the loss scale `wrong()` in place of that of `scalers`."""
    patch = patched(dynamic_loss_scale, wrong, within=build)
    settings = {"precision": "fp16", "steps": 9}
    return Mutant(name, linear, linear, patch=patch, around=partial(scalers, start), settings=settings)


def skipping(name: str, wrong: Any, optimizer: Any) -> Mutant:
    """A step with `wrong` for the selection between old and new state."""
    case = partial(linear, optimizer=optimizer)
    patch = patched(step._restore_if, wrong)
    settings = {"precision": "fp16", "steps": 9}
    return Mutant(name, case, case, patch=patch, around=partial(scalers, HIGH), settings=settings)


def unscaled(change: Callable[[Any, Any], Any]) -> Callable[[], optax.GradientTransformation]:
    """The loss scale of `scalers` with the gradients `change(scaled, unscaled)`."""

    def make() -> optax.GradientTransformation:
        scaler = dynamic_loss_scale(1024.0, growth_interval=2)

        def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            right, new = scaler.update(grads, state)
            return change(grads, right), new

        return optax.GradientTransformation(scaler.init, update)

    return make


def keep_parameters_only(skip: Any, old: Any, new: Any) -> Any:
    """Restore only the parameters of a skipped update, not the optimizer's state and count of updates."""
    params = new[0] if skip is False else jax.tree.map(lambda o, n: jnp.where(skip, o, n), old[0], new[0])
    return params, *new[1:]


def rounded(name: str, precision: str, wrong: Callable[..., Any]) -> Mutant:
    """Many small updates of bfloat16 parameters, with `wrong` for how they are added."""
    patch = patched(apply_updates, wrong, within=step)
    return Mutant(name, slow_linear, slow_linear, patch=patch, settings={"precision": precision, "steps": 20})


def without_compensation(how: str, params: Any, updates: Any, compensation: Any, key: Any) -> Any:
    """Kahan's sum without what was lost before."""
    return apply_updates(how, params, updates, jax.tree.map(jnp.zeros_like, compensation), key)


def compensated_the_wrong_way(how: str, params: Any, updates: Any, compensation: Any, key: Any) -> Any:
    """Kahan's sum with what was lost before subtracted."""
    return apply_updates(how, params, updates, jax.tree.map(jnp.negative, compensation), key)


def with_the_first_bits(how: str, params: Any, updates: Any, compensation: Any, key: Any) -> Any:
    """Stochastic rounding with the same random bits in every update."""
    return apply_updates(how, params, updates, compensation, jax.random.key(0))


def truncated(how: str, params: Any, updates: Any, compensation: Any, key: Any) -> Any:
    """Stochastic rounding without random bits: towards zero."""
    with patched(stochastic_round, lambda x, bits: stochastic_round(x, jnp.zeros_like(bits)))():
        return apply_updates(how, params, updates, compensation, key)


def shifted(z: Any, y: Any) -> tuple[Any, Any]:
    """The squared error of each row with the label of another row."""
    return square(z, jnp.roll(y, 1, 0))


def in_bfloat16(z: Any, y: Any) -> tuple[Any, Any]:
    """The squared error of outputs rounded to bfloat16."""
    return square(z.astype(jnp.bfloat16).astype(z.dtype), y)


def by_leaf(grads: Any, bound: float) -> Any:
    """Clip each leaf by its own norm."""
    return jax.tree.map(lambda g: clip_grad_norm(g, bound)[0], grads)


def last_repeated(batch: Any, k: int) -> Any:
    """Split a batch and repeat the second-to-last micro-batch in place of the last."""
    return jax.tree.map(lambda x: jnp.concatenate([x[:-1], x[-2:-1]]), split_batch(batch, k))


MUTANTS = [
    clipped("clip-without-the-epsilon", lambda grads, bound: clip_grad_norm(grads, bound + 1e-6)[0]),
    clipped("clip-by-leaf", by_leaf),
    clipped("clip-by-value", clip_grad_value),
    clipped("clip-dropped", lambda grads, bound: grads),
    clipped(
        "clip-scales-up",
        lambda grads, bound: jax.tree.map(lambda g: g * bound / optax.tree.norm(grads), grads),
        bound=100.0,
    ),
    accumulated("window-summed", mean_gradient, lambda w: jax.tree.map(lambda g: 4 * g, mean_gradient(w))),
    accumulated("window-averaged-twice", mean_gradient, lambda w: jax.tree.map(lambda g: g / 4, mean_gradient(w))),
    accumulated("window-without-its-last", split_batch, last_repeated),
    accumulated(
        "window-only-its-last",
        add_micro_batch,
        lambda window, grads, loss, k, _: add_micro_batch(
            window._replace(sums=jax.tree.map(jnp.zeros_like, window.sums)), grads, loss, k
        ),
    ),
    accumulated(
        "window-in-bfloat16",
        add_micro_batch,
        lambda window, grads, loss, k, _: add_micro_batch(
            window, jax.tree.map(lambda g: g.astype(jnp.bfloat16).astype(g.dtype), grads), loss, k
        ),
        precision="fp32",
    ),
    scaled("scale-grows-one-update-late", partial(dynamic_loss_scale, 1024.0, growth_interval=3)),
    scaled("scale-grows-fourfold", partial(dynamic_loss_scale, 1024.0, 4.0, growth_interval=2)),
    scaled("scale-starts-elsewhere", partial(dynamic_loss_scale, 2048.0, growth_interval=2)),
    scaled("gradients-left-scaled", unscaled(lambda scaled, right: scaled)),
    scaled("gradients-clipped-before-unscaling", unscaled(lambda scaled, right: clip_grad_norm(scaled, 1.0)[0])),
    scaled("gradients-unscaled-twice", unscaled(lambda scaled, right: jax.tree.map(lambda g: g / 1024, right))),
    scaled("scale-quartered-on-overflow", partial(dynamic_loss_scale, HIGH, 2.0, 0.25, 2), HIGH),
    scaled("scale-has-a-ceiling", partial(dynamic_loss_scale, 1024.0, growth_interval=2, max_scale=1024.0)),
    skipping("skipped-updates-count-in-the-schedule", keep_parameters_only, SCHEDULED),
    skipping("skipped-updates-reach-the-momentum", keep_parameters_only, MOMENTUM),
    skipping("overflows-applied", lambda skip, old, new: new, SGD),
    rounded("compensation-dropped", "bf16_params_kahan", without_compensation),
    rounded("compensation-with-the-other-sign", "bf16_params_kahan", compensated_the_wrong_way),
    rounded("random-bits-of-the-first-update", "bf16_params_stochastic", with_the_first_bits),
    rounded("stochastic-rounding-truncates", "bf16_params_stochastic", truncated),
    Mutant("rows-and-labels-apart", partial(linear, shifted), linear, "forward", "loss", shifted),
    Mutant("outputs-in-bfloat16", partial(linear, in_bfloat16), linear, settings={"precision": "fp32"}),
]
