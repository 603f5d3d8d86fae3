"""Checks of an optimizer's arguments: PyTorch's names, and values of other types."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import numpy as np
import optax

from jaxtrain.errors import UserError

_F = TypeVar("_F", bound=Callable[..., Any])

PYTORCH_ARGUMENTS = {
    "lr": "use learning_rate",
    "betas": "use b1 and b2",
    "params": "give the parameters to step.init",
    **dict.fromkeys(("fused", "foreach", "capturable", "differentiable"), "leave it out, jit compiles the update"),
}
"""Arguments of PyTorch's optimizers that do not exist here, and what to do instead."""


def optimizer(factory: _F) -> _F:
    """Raise `UserError` for arguments that a function which builds an optimizer does not have.

    >>> @optimizer
    ... def sgd(learning_rate=1e-3): return optax.sgd(learning_rate)
    >>> try:
    ...     sgd(lr=0.1)
    ... except UserError as error:
    ...     print(error)
    sgd has no argument lr=0.1: use learning_rate
    """
    signature = inspect.signature(factory)
    names = list(signature.parameters)

    @functools.wraps(factory)
    def build(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs.keys() - signature.parameters.keys():
            value = repr(kwargs[name])
            argument = f"{name}={value}" if len(value) <= 40 else name
            remedy = PYTORCH_ARGUMENTS.get(name, f"use one of {', '.join(names)}")
            raise UserError(f"{factory.__name__} has no argument {argument}: {remedy}")
        if names and names[0] == "learning_rate":
            _check_rate(factory.__name__, args[0] if args else kwargs.get("learning_rate", 0.0))
        return factory(*args, **kwargs)

    return cast(_F, build)


def _check_rate(name: str, rate: Any) -> None:
    if isinstance(rate, optax.GradientTransformation | int | float | np.number | np.ndarray | jax.Array) or callable(
        rate
    ):
        return
    value = repr(rate) if isinstance(rate, str) else f"a {type(rate).__name__}"
    remedy = "use float(...) of it" if isinstance(rate, str) else "the parameters are given to step.init, not to it"
    raise UserError(f"the learning_rate of {name} must be a number or a schedule, got {value}: {remedy}")
