"""Parameter groups: which optimizer a parameter has, and whether it decays, by its path.

PyTorch lists parameters in `param_groups`; here a rule names the group of a path, "blocks/qkv/kernel". One difference
no group can mend: a PyTorch parameter whose gradient is None is passed over, here such a gradient is 0, which decays
and advances moments. Parameters that never have a gradient belong in a group of `optax.set_to_zero()`.
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
    """Each parameter updated by the transformation of its group, which sees only its own parameters.

    The metric `lr` is there where only one group has a learning rate; `used_learning_rates` reads all of them from the
    optimizer's state. Raises `UserError` where `rule` names a group that is not there.

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
            known = ", ".join(transformations)
            raise UserError(f"{path_name(path)} is in group {group!r}, which is not there: choose from {known}")
        return group

    return optax.partition(transformations, lambda params: jax.tree_util.tree_map_with_path(name, params))


def no_decay(path: str) -> bool:
    """Whether the parameter is a bias or a norm's scale, which are usually not decayed."""
    return path.rsplit("/", 1)[-1] in ("bias", "scale")


def all_but(rule: Callable[[str], bool]) -> Callable[[Any], Any]:
    """The `mask` of an optimizer that decays every parameter but those `rule` holds of.

    >>> all_but(no_decay)({"kernel": 1.0, "bias": 2.0})
    {'bias': False, 'kernel': True}
    """
    return lambda params: jax.tree_util.tree_map_with_path(lambda path, _: not rule(path_name(path)), params)
