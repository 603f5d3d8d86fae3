"""Complex parameters, which the step differentiates as pairs of real numbers.

Their gradient then is PyTorch's, ∂L/∂re + i ∂L/∂im, along which the loss grows; JAX's is its conjugate.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.errors import UserError
from jaxtrain.paths import path_name


def as_real(tree: Any) -> Any:
    """Return a tree with each complex array as a real one with a last axis of two, as `torch.view_as_real`.

    >>> as_real({"w": jnp.array([1.0 + 2.0j])})["w"].tolist()
    [[1.0, 2.0]]
    """
    return jax.tree.map(lambda x: jnp.stack([jnp.real(x), jnp.imag(x)], -1) if is_complex(x) else x, tree)


def as_complex(tree: Any, like: Any) -> Any:
    """Return the tree of complex arrays whose `as_real` is `tree`; `like` has complex arrays in their places."""
    return jax.tree.map(lambda x, old: lax.complex(x[..., 0], x[..., 1]) if is_complex(old) else x, tree, like)


def refuse_complex(params: Any, where: str, remedy: str) -> None:
    """Raise `UserError` for complex parameters where they are not supported."""
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        if is_complex(x):
            raise UserError(f"the parameter {path_name(path)} is complex, which {where} does not support: {remedy}")


def is_complex(x: Any) -> bool:
    """Return whether an array is complex."""
    return bool(jnp.issubdtype(jnp.result_type(x), np.complexfloating))
