"""Parameter groups: the optimizer of a parameter, and whether it decays, by its path.

PyTorch lists parameters in `param_groups`; here a rule returns the group of a path, "blocks/qkv/kernel". One difference
remains: PyTorch skips a parameter whose gradient is None, while here such a gradient is 0, which decays and updates
moments. Parameters that never have a gradient belong in a group of `optax.set_to_zero()`.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax

from jaxtrain.errors import UserError
from jaxtrain.paths import path_name


def groups(
    rule: Callable[[str], str], transformations: Mapping[str, optax.GradientTransformation]
) -> optax.GradientTransformationExtraArgs:
    """Update each parameter by the transformation of its group, as with PyTorch's `param_groups`.

    The step reports the metric `lr` if exactly one group has a learning rate; `used_learning_rates` reads all of them
    from the optimizer's state.

    Args:
      rule: From a parameter's path to the name of its group.
      transformations: Transformation by group name; each receives the parameters of its group only.

    Returns:
      An optax transformation; its `init` raises `UserError` for a group without a transformation.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxtrain.optim import sgd
      >>> tx = groups(lambda path: path.split("/")[0], {"body": optax.set_to_zero(), "head": sgd(0.5)})
      >>> params = {"body": {"kernel": jnp.ones(1)}, "head": jnp.ones(1)}
      >>> updates, _ = tx.update(params, tx.init(params), params)
      >>> float(updates["body"]["kernel"][0]), float(updates["head"][0])
      (0.0, -0.5)
    """

    def name(path: Any, leaf: Any) -> str:
        del leaf
        group = rule(path_name(path))
        if group not in transformations:
            available = ", ".join(transformations)
            raise UserError(f"group {group!r} of {path_name(path)} does not exist: use one of {available}")
        return group

    return optax.partition(transformations, lambda params: jax.tree_util.tree_map_with_path(name, params))


def no_decay(path: str, parameter: Any = None) -> bool:
    """Return whether a parameter is a bias or a norm's scale, which usually do not decay.

    Args:
      path: The parameter's path, in JAX or as PyTorch names it: "blocks/norm/scale", "blocks.0.norm.weight".
      parameter: The array; one of less than two axes does not decay whatever its name, as norms' `weight` in PyTorch.
        The axis of layers that an imported module stacks, "layers.*.norm.weight", does not count. None goes by the
        name.

    Example:
      >>> no_decay("head.bias"), no_decay("norm.weight"), no_decay("norm.weight", np.ones(3))
      (True, False, True)
    """
    parts = re.split(r"[/.]", path)
    if parts[-1] in ("bias", "scale"):
        return True
    is_stack = any(re.fullmatch(r"\*|\d+:\d+(:\d+)?", part) for part in parts)
    return parameter is not None and np.ndim(parameter) - is_stack < 2


def all_but(rule: Callable[[str], bool]) -> Callable[[Any], Any]:
    """Return the `mask` of an optimizer that decays all parameters except those selected by `rule`.

    Args:
      rule: Predicate on a parameter's path; `no_decay` is also given the parameter.

    Returns:
      A function from the parameters to a pytree of booleans. It raises `UserError` if `rule` selects none of them.

    Raises:
      UserError: `rule` is not a function.

    Example:
      >>> all_but(no_decay)({"kernel": np.ones((2, 2)), "bias": np.ones(2)})
      {'bias': False, 'kernel': True}
    """

    if not callable(rule):
        raise UserError(
            f"all_but takes a function of a parameter's path, got {rule!r}: use all_but(no_decay), or"
            f" all_but(lambda path: path.startswith({str(rule)!r}))"
        )

    def mask(params: Any) -> Any:
        decays = decay_mask(rule, params)
        if (leaves := jax.tree.leaves(decays)) and all(leaves):
            paths = ", ".join(path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params))
            name = getattr(rule, "__name__", "the rule")
            raise UserError(
                f"all_but({name}) selects no parameter: leave the mask out, or change it; paths are {paths}"
            )
        return decays

    return mask


def decay_mask(rule: Callable[[str], bool], params: Any) -> Any:
    """Return the pytree of booleans of `all_but`; `rule` may select no parameter."""

    def decays(path: Any, leaf: Any) -> bool:
        name = path_name(path)
        return not (no_decay(name, leaf) if rule is no_decay else rule(name))

    return jax.tree_util.tree_map_with_path(decays, params)
