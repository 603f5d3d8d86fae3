"""The shapes that losses are given, checked: what does not fit is refused, never broadcast."""

import jax

from jaxtrain.errors import UserError


def require_alike(**arrays: jax.Array) -> None:
    """Raises `UserError` unless all have one shape.

    PyTorch broadcasts [N, 1] against [N] to N² differences, with a warning.
    """
    if len({x.shape for x in arrays.values()}) > 1:
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in arrays.items())
        raise UserError(f"the loss was given {shapes}: give them one shape")
