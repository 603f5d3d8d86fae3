"""Parameter groups: the optimizer of a parameter, and whether it decays, by its path.

PyTorch lists parameters in `param_groups`; here a rule returns the group of a path, "blocks/qkv/kernel". One difference
remains: PyTorch skips a parameter whose gradient is None, while here such a gradient is 0, which decays and updates
moments. Parameters that never have a gradient belong in a group of `optax.set_to_zero()`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
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


def no_decay(path: str) -> bool:
    """Return whether a parameter is a bias or a norm's scale, which usually do not decay.

    Args:
      path: The parameter's path; its last part is compared with "bias" and "scale".
    """
    return path.rsplit("/", 1)[-1] in ("bias", "scale")


def all_but(rule: Callable[[str], bool]) -> Callable[[Any], Any]:
    """Return the `mask` of an optimizer that decays all parameters except those selected by `rule`.

    Args:
      rule: Predicate on a parameter's path.

    Returns:
      A function from the parameters to a pytree of booleans.

    Example:
      >>> all_but(no_decay)({"kernel": 1.0, "bias": 2.0})
      {'bias': False, 'kernel': True}
    """
    return lambda params: jax.tree_util.tree_map_with_path(lambda path, _: not rule(path_name(path)), params)
