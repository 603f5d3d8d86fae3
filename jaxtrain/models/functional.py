"""An nnx model as a pure function of its parameters, as a training step differentiates it."""

from collections.abc import Callable
from typing import Any

from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.interop import leaves


def _call(model: Any, *inputs: Any, **keywords: Any) -> Any:
    return model(*inputs, **keywords)


def functional(model: nnx.Module, call: Callable[..., Any] = _call) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Split a model into a pure function and its parameters.

    Args:
      model: Module without running statistics; `functional_loss` also takes modules with `Rngs`, and other libraries'.
      call: Function of the model and of inputs, such as one of its methods or `log_probs`; the default calls the model.

    Returns:
      A tuple (apply, params): `apply(params, *inputs, **keywords)` calls the model, `params` are nested dicts of
      arrays.

    Raises:
      UserError: The model has other variables than parameters.

    Example:
      >>> from jaxtrain.models.mlp import MLP
      >>> import jax.numpy as jnp
      >>> apply, params = functional(MLP((4, 3, 2), rngs=nnx.Rngs(0)))
      >>> apply(params, jnp.ones((5, 4))).shape
      (5, 2)
    """
    others = [path for path, _ in leaves(nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param))))]
    if others:
        raise UserError(f"{type(model).__name__} has other variables than parameters, {others[0]}: use functional_loss")
    graphdef, state = nnx.split(model, nnx.Param)

    def apply(params: Any, *inputs: Any, **keywords: Any) -> Any:
        return call(nnx.merge(graphdef, params), *inputs, **keywords)

    return apply, nnx.to_pure_dict(state)


def functional_with_state(model: nnx.Module) -> tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]:
    """Split a model with BatchNorm into a pure function, its parameters and its running statistics.

    Args:
      model: Module with running statistics.

    Returns:
      A tuple (apply, params, model_state): `apply(params, model_state, *inputs, **keywords)` returns the output and
      the new model state.

    Example:
      >>> from jaxtrain.models.cnn import CNN
      >>> import jax.numpy as jnp
      >>> apply, params, state = functional_with_state(CNN((8, 8, 3), batch_norm=True, rngs=nnx.Rngs(0)))
      >>> logits, state = apply(params, state, jnp.ones((5, 8, 8, 3)), True)
      >>> logits.shape, int(state["norm"]["count"])
      ((5, 10), 1)
    """
    split: tuple[Any, ...] = nnx.split(model, nnx.Param, nnx.BatchStat)
    graphdef, params, state = split

    def apply(params: Any, model_state: Any, *inputs: Any, **keywords: Any) -> tuple[Any, Any]:
        model = nnx.merge(graphdef, params, model_state)
        return model(*inputs, **keywords), nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

    return apply, nnx.to_pure_dict(params), nnx.to_pure_dict(state)
