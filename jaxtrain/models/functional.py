"""An nnx model as a pure function of its parameters, which is what a training step differentiates."""

from collections.abc import Callable
from typing import Any

from flax import nnx


def functional(model: nnx.Module) -> tuple[Callable[..., Any], dict[str, Any]]:
    """(apply, params): `apply(params, *inputs)` calls the model; `params` is nested dicts of arrays.

    >>> from jaxtrain.models.mlp import MLP
    >>> import jax.numpy as jnp
    >>> apply, params = functional(MLP((4, 3, 2), rngs=nnx.Rngs(0)))
    >>> apply(params, jnp.ones((5, 4))).shape
    (5, 2)
    """
    graphdef, state = nnx.split(model, nnx.Param)

    def apply(params: Any, *inputs: Any) -> Any:
        return nnx.merge(graphdef, params)(*inputs)

    return apply, nnx.to_pure_dict(state)
