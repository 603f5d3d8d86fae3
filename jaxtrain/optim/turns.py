"""Optimizers that take turns, as those of a generator and a discriminator."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain.errors import UserError


class TurnState(NamedTuple):
    """State of `at_turn`.

    Attributes:
      inner: State of the optimizer.
    """

    inner: Any


def at_turn(
    optimizer: optax.GradientTransformation, turn: int, metric: str = "turn"
) -> optax.GradientTransformationExtraArgs:
    """Update if a metric of the loss function has a number; else parameters and the optimizer's state stay as they are.

    `train_step` passes the metrics of each update, such as `{"turn": batch["turn"]}`.

    Args:
      optimizer: An optax transformation.
      turn: The number.
      metric: Name of the metric.

    Returns:
      An optax transformation.

    Raises:
      UserError: In an update: there is no such metric.

    Example:
      >>> from jaxtrain.optim import sgd
      >>> tx = at_turn(sgd(0.5), turn=1)
      >>> state, found = tx.init(jnp.zeros(1)), []
      >>> for i in (0, 1):
      ...     updates, state = tx.update(jnp.ones(1), state, jnp.zeros(1), metrics={"turn": jnp.float32(i)})
      ...     found.append(float(updates[0]))
      >>> found
      [0.0, -0.5]
    """
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> TurnState:
        return TurnState(inner.init(params))

    def update(grads: Any, state: TurnState, params: Any = None, *, metrics: Any = None, **extra: Any) -> Any:
        if metric not in (metrics or {}):
            raise UserError(f"at_turn: loss_fn returns no metric {metric!r}: return it, as in {{{metric!r}: turn}}")
        updates, new = inner.update(grads, state.inner, params, metrics=metrics, **extra)
        is_turn = jnp.round(metrics[metric]) == turn
        updates = jax.tree.map(lambda x: jnp.where(is_turn, x, jnp.zeros_like(x)), updates)
        return updates, TurnState(jax.tree.map(lambda x, old: jnp.where(is_turn, x, old), new, state.inner))

    return optax.GradientTransformationExtraArgs(init, update)


class AddedState(NamedTuple):
    """State of `added`.

    Attributes:
      first: State of the first optimizer.
      second: State of the second one.
    """

    first: Any
    second: Any


def added(
    first: optax.GradientTransformation, second: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Update by the sum of the updates of two optimizers, as for parameters that both update at their turns.

    Args:
      first: An optax transformation.
      second: Another one, which gets the same gradients.

    Returns:
      An optax transformation.

    Example:
      >>> from jaxtrain.optim import sgd
      >>> tx = added(at_turn(sgd(0.5), turn=0), at_turn(sgd(0.1), turn=1))
      >>> state, found = tx.init(jnp.zeros(1)), []
      >>> for i in (0, 1):
      ...     updates, state = tx.update(jnp.ones(1), state, jnp.zeros(1), metrics={"turn": jnp.float32(i)})
      ...     found.append(round(float(updates[0]), 6))
      >>> found
      [-0.5, -0.1]
    """
    one, two = optax.with_extra_args_support(first), optax.with_extra_args_support(second)

    def init(params: Any) -> AddedState:
        return AddedState(one.init(params), two.init(params))

    def update(grads: Any, state: AddedState, params: Any = None, **extra: Any) -> Any:
        updates, new_first = one.update(grads, state.first, params, **extra)
        others, new_second = two.update(grads, state.second, params, **extra)
        return jax.tree.map(jnp.add, updates, others), AddedState(new_first, new_second)

    return optax.GradientTransformationExtraArgs(init, update)
