"""The state of a training run."""

from typing import Any, NamedTuple

import jax
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.paths import Frozen, Matching, merge, none_frozen, partition, path_name, require_distinct_names
from jaxtrain.step.accumulate import Window
from jaxtrain.step.checks.mistakes import called, check_container, check_params, is_deleted
from jaxtrain.step.loss_scale import skipped_updates


class TrainState(NamedTuple):
    """Everything a run consists of: saved and restored anywhere, the run continues bit for bit.

    Attributes:
      step: int32[], windows so far.
      micro_step: int32[], micro-batches so far.
      params: Pytree of parameters, in the policy's param dtype; frozen ones may be in lower precision.
      model_state: Pytree of model state (BatchNorm's statistics); None without any.
      opt_state: State of the optimizer.
      loss_scale: State of the loss scaler.
      rng: Key from which every micro-batch's key is folded.
      window: Accumulation window of a run that streams its micro-batches, else None.
      ema: Moving average of the trained parameters, at least float32, with None for the others, or None;
        `averaged(state)` evaluates it.
      scales: Scales of the precision policy with their history, or None for a policy that remembers nothing.
      compensation: bfloat16, what rounding has added too much to the trained parameters, with None for the others; None
        unless the policy's `param_rounding` is "kahan".
    """

    step: jax.Array
    micro_step: jax.Array
    params: Any
    model_state: Any
    opt_state: Any
    loss_scale: Any
    rng: jax.Array
    window: Window | None
    ema: Any
    scales: Any = None
    compensation: Any = None


def micro_batch_key(rng: jax.Array, micro_step: int | jax.Array) -> jax.Array:
    """Return the key of micro-batch number `micro_step` of a run whose key is `rng`."""
    return jax.random.fold_in(rng, micro_step)


def rounding_key(rng: jax.Array, step: int | jax.Array) -> jax.Array:
    """Return the key by which update number `step` of a run whose key is `rng` rounds its parameters.

    It is folded from a number that no `micro_step`, which is an int32, reaches.
    """
    return jax.random.fold_in(jax.random.fold_in(rng, np.uint32(2**32 - 1)), step)


def applied_updates(state: TrainState) -> jax.Array:
    """Return the number of updates applied so far, int32[]: what schedules count."""
    return state.step - skipped_updates(state.loss_scale)


def averaged(state: TrainState) -> TrainState:
    """Return the state to evaluate: with the moving average in place of the parameters, if there is one.

    Args:
      state: A state.

    Returns:
      The state with the trained `params` replaced by `ema`, or the state itself.
    """
    return state if state.ema is None else state._replace(params=merge(state.ema, state.params))


def is_factory(tree: Any) -> bool:
    """Return whether `tree` is a function that creates a pytree; a callable module is a pytree itself."""
    return callable(tree) and jax.tree_util.all_leaves([tree])


def materialize(tree: Any) -> Any:
    """Return `tree`, or the pytree that it creates if it is a function.

    >>> materialize({"w": 1.0}) == materialize(lambda: {"w": 1.0})
    True
    """
    check_container(tree)
    return called(tree) if is_factory(tree) else tree


def require_state(state: Any, batch: Any = None) -> None:
    """Raise `UserError` unless `state` is a `TrainState`."""
    if isinstance(state, TrainState):
        return
    if isinstance(state, tuple) and state and isinstance(state[0], TrainState):
        raise UserError(
            "state must be a jaxtrain.TrainState, got the tuple (state, metrics): "
            "unpack it, as in state, metrics = step(state, batch)"
        )
    if isinstance(batch, TrainState):
        raise UserError("the state was given as the batch: call step(state, batch), the state first")
    remedy = "use step.init(params)"
    if callable(state):
        remedy = "pass the state that step.init(params) returned"
    raise UserError(f"state must be a jaxtrain.TrainState, got {type(state).__name__}: {remedy}")


def require_present(state: Any) -> None:
    """Raise `UserError` for a state that was donated to an earlier call, before XLA reports it.

    All of a state is donated at once, so that one of its arrays tells.
    """
    if isinstance(state, TrainState) and is_deleted(state.step):
        raise UserError(DONATED)


DONATED = "the state was donated to an earlier call and no longer exists: use the state which that call returned"


def require_trainable(params: Any, frozen: Frozen) -> None:
    """Raise `UserError` for parameters of which none would be trained, or one would be skipped silently."""
    check_params(params)
    require_distinct_names(params, "params")
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for path, leaf in leaves:
        if isinstance(leaf, int):
            raise UserError(
                f"parameter {path_name(path)} is the Python {type(leaf).__name__} {leaf}, which has no gradient: "
                f"use {float(leaf)} to train it, or an integer array to leave it as it is"
            )
    paths = [path_name(path) for path, _ in leaves]
    for pattern in frozen.patterns if isinstance(frozen, Matching) else ():
        if not any(map(Matching((pattern,)), paths)):
            raise UserError(f"frozen pattern {pattern!r} matches no parameter: the paths are {', '.join(paths)}")
    if frozen is not none_frozen and not any(map(frozen, paths)):
        raise UserError(f"frozen matches no parameter: the paths are {', '.join(paths)}")
    trained, _ = partition(params, frozen)
    if not jax.tree.leaves(trained):
        cause = "params hold no floating-point array" if not any(map(frozen, paths)) else "frozen matches all of them"
        raise UserError(f"no parameter is trained, {cause}: leave at least one to train")
