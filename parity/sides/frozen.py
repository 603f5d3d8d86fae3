"""Frozen parameters in JAX, as PyTorch's without `requires_grad`: no gradient, no update."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.paths import Frozen, none_frozen, path_name
from jaxtrain.step import LossFn
from parity.optimizer import AdamW, Optimizer


def without_frozen(loss_fn: LossFn, frozen: Frozen) -> LossFn:
    """Return a loss without a gradient of the frozen parameters."""
    if frozen is none_frozen:
        return loss_fn

    def stopped(path: Any, x: Any) -> Any:
        return jax.lax.stop_gradient(x) if frozen(path_name(path)) else x

    def with_constants(params: Any, *rest: Any) -> Any:
        return loss_fn(jax.tree_util.tree_map_with_path(stopped, params), *rest)

    return with_constants


def frozen_too(optimizer: AdamW | Optimizer, frozen: Frozen) -> AdamW | Optimizer:
    """Return an optimizer that leaves frozen parameters as they are, as PyTorch's does without a gradient.

    It takes them and their gradients for zeros, so that no decay of theirs is in its moments.
    """
    if frozen is none_frozen:
        return optimizer
    inner = optax.with_extra_args_support(optimizer.jax)

    def zeroed(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, x: jnp.zeros_like(x) if frozen(path_name(path)) else x, tree
        )

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        updates, state = inner.update(zeroed(updates), state, zeroed(params), **extra)
        return zeroed(updates), state

    kept = optax.GradientTransformationExtraArgs(lambda params: inner.init(zeroed(params)), update)
    by_path = isinstance(optimizer, Optimizer) and optimizer.by_path
    return Optimizer(optimizer.name, optimizer.torch, kept, optimizer.moments, optimizer.scheduler, by_path)
