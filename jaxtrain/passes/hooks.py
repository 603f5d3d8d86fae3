"""Gradient hooks: a function of the gradient of a parameter or an activation, as `torch.Tensor.register_hook`.

As in PyTorch, a hook receives the gradient of one micro-batch's backward pass, still multiplied by the loss scale.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jaxtrain.errors import UserError
from jaxtrain.paths import path_name
from jaxtrain.program import equations, rewrite
from jaxtrain.program import operations as op

Hook = Callable[[jax.Array], jax.Array]
"""From a gradient to the gradient that replaces it, of the same shape and dtype."""


def hook(x: jax.Array, fn: Hook) -> jax.Array:
    """Replace the gradient of `x` by a function of it, as `torch.Tensor.register_hook`. Reverse mode only.

    Args:
      x: An array.
      fn: From the gradient of `x` to the one that replaces it, of the same shape and dtype.

    Returns:
      `x`.

    Example:
      >>> import jax.numpy as jnp
      >>> float(jax.grad(lambda x: hook(x, lambda g: 10 * g) ** 2)(3.0))
      60.0
    """

    @jax.custom_vjp
    def identity(x: jax.Array) -> jax.Array:
        return x

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        return (fn(gradient),)

    identity.defvjp(lambda x: (x, None), backward)
    return identity(x)


def add_hooks(compute: Callable[..., Any], hooks: Mapping[str, Hook]) -> Callable[..., Any]:
    """Add hooks to the parameters and to the named values of a computation.

    Args:
      compute: A function of (params, …).
      hooks: Hooks by parameter path or by `checkpoint_name` of a value.

    Returns:
      `compute` with hooks; when traced it raises `UserError` for a hook that names neither.
    """
    if not hooks:
        return compute

    def with_hooked_params(params: Any, *args: Any) -> Any:
        def leaf(path: Any, x: Any) -> Any:
            name = path_name(path)
            return hook(x, hooks[name]) if name in hooks else x

        return compute(jax.tree_util.tree_map_with_path(leaf, params), *args)

    def rule(eqn: JaxprEqn, args: list[Any], run: rewrite.Run) -> Sequence[Any] | None:
        del run
        if op.of(eqn) != op.NAME or equations.label(eqn) not in hooks:
            return None
        return [hook(x, hooks[equations.label(eqn)]) for x in rewrite.bind(eqn, args)]

    def compute_hooked(params: Any, *args: Any) -> Any:
        paths = {path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)}

        def evaluate(closed: ClosedJaxpr, leaves: list[Any]) -> list[Any]:
            _refuse_unknown(
                {*hooks},
                paths,
                {equations.label(eqn) for eqn in equations.visit(closed.jaxpr) if op.of(eqn) == op.NAME},
            )
            return rewrite.interpret(closed.jaxpr, closed.consts, leaves, rule)

        return rewrite.retrace(with_hooked_params, evaluate)(params, *args)

    return compute_hooked


def _refuse_unknown(hooks: set[str], paths: set[str], names: set[str]) -> None:
    if unknown := sorted(hooks - paths - names):
        available = ", ".join(sorted(paths | names))
        raise UserError(f"hook {unknown[0]!r} matches no parameter and no checkpoint_name: use one of {available}")
