"""Validation of the shapes of a loss's arguments: they are never broadcast."""

import jax

from jaxtrain.errors import UserError


def require_alike(**arrays: jax.Array) -> None:
    """Raise `UserError` unless all arrays have the same shape.

    PyTorch broadcasts [N, 1] against [N] to N² differences, with a warning.
    """
    if len({x.shape for x in arrays.values()}) > 1:
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in arrays.items())
        raise UserError(f"the arguments of a loss must have one shape, got {shapes}")
