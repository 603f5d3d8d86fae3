"""Checks of the arguments of optimizers and schedules: PyTorch's names, values of other types, and PyTorch's bounds."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import jax
import numpy as np
import optax

from jaxtrain.errors import UserError
from jaxtrain.fields import Bound, at_least, at_most
from jaxtrain.optim.complex_pairs import with_complex
from jaxtrain.optim.preprocessing import Mask

_F = TypeVar("_F", bound=Callable[..., Any])

PYTORCH_ARGUMENTS = {
    "lr": "use learning_rate",
    "betas": "use b1 and b2",
    "params": "give the parameters to step.init",
    **dict.fromkeys(("fused", "foreach", "capturable", "differentiable"), "leave it out, jit compiles the update"),
}
"""Arguments of PyTorch's optimizers that do not exist here, and what to do instead."""

_AT_LEAST_0 = at_least(0)
_IN_0_1 = Bound(lambda x: bool(0 <= x < 1), "be in [0, 1)")
_ETAS = Bound(lambda x: bool(0 < x[0] < 1 < x[1]), "be a number in (0, 1) and one above 1", "use (0.5, 1.2)")
_UPDATES = Bound(lambda x: isinstance(x, int | np.integer) and bool(x >= 1), "be a number of updates, at least 1")
_BOUNDS: dict[str, Bound] = {
    # Of the constructors in torch.optim.
    **dict.fromkeys(("learning_rate", "eps", "weight_decay", "momentum", "lr_decay", "momentum_decay"), _AT_LEAST_0),
    **dict.fromkeys(("initial_accumulator_value", "rmsprop.alpha"), _AT_LEAST_0),
    **dict.fromkeys(("b1", "b2"), _IN_0_1),
    "rho": Bound(lambda x: bool(0 <= x <= 1), "be in [0, 1]"),
    "d": at_least(1),
    "beta2_decay": at_most(0),
    "ns_steps": Bound(lambda x: bool(x < 100), "be below 100"),
    # Of schedules.
    **dict.fromkeys(("lr", "max_lr", "base_lr", "eta_min", "final_lr", "min_lr"), _AT_LEAST_0),
    **dict.fromkeys(
        ("warmup_steps", "stable_steps", "decay_steps", "total_iters", "patience", "cooldown"), _AT_LEAST_0
    ),
    **dict.fromkeys(("step_size", "t_max", "t_0", "t_mult", "total_steps", "step_size_up", "step_size_down"), _UPDATES),
}
"""Bounds by argument, or by function and argument."""


def bounded(function: _F) -> _F:
    """Raise `UserError` for arguments of a schedule that are out of bounds.

    >>> @bounded
    ... def step_lr(lr, step_size): return lambda t: lr * 0.1 ** (t // step_size)
    >>> try:
    ...     step_lr(0.1, 0)
    ... except UserError as error:
    ...     print(error)
    step_size of step_lr must be a number of updates, at least 1, got 0
    """
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def build(*args: Any, **kwargs: Any) -> Any:
        _check_bounds(function.__name__, {**dict(zip(names, args, strict=False)), **kwargs})
        return function(*args, **kwargs)

    return cast(_F, build)


def optimizer(factory: _F) -> _F:
    """Raise `UserError` for arguments that a function which builds an optimizer does not have, or out of bounds.

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
        _check_bounds(factory.__name__, {**dict(zip(names, args, strict=False)), **kwargs})
        given = signature.bind(*args, **kwargs)

        def make(mask: Mask) -> optax.GradientTransformation:
            chosen = {**given.arguments, **({"mask": mask} if "mask" in given.arguments else {})}
            made: optax.GradientTransformation = factory(**chosen)
            return made

        return with_complex(factory.__name__, make, given.arguments.get("mask"))

    return cast(_F, build)


def _check_rate(name: str, rate: Any) -> None:
    if isinstance(rate, optax.GradientTransformation | int | float | np.number | np.ndarray | jax.Array) or callable(
        rate
    ):
        return
    value = repr(rate) if isinstance(rate, str) else f"a {type(rate).__name__}"
    remedy = "use float(...) of it" if isinstance(rate, str) else "the parameters are given to step.init, not to it"
    raise UserError(f"the learning_rate of {name} must be a number or a schedule, got {value}: {remedy}")


def _check_bounds(function: str, arguments: Mapping[str, Any]) -> None:
    """Raise `UserError` for a number, or one of a pair, that PyTorch's constructor refuses; schedules are accepted."""
    for name, value in arguments.items():
        if name == "etas":
            _ETAS.check(f"etas of {function}", value)
        bound = _BOUNDS.get(name, _BOUNDS.get(f"{function}.{name}"))
        numbers = value if isinstance(value, tuple) else (value,)
        if bound is not None and not all(bound.holds(x) for x in numbers if _is_known_number(x)):
            raise UserError(bound.message(f"{name} of {function}", value))


def _is_known_number(x: Any) -> bool:
    """Whether a bound applies: a traced number has no value yet."""
    is_number = isinstance(x, int | float | np.number | np.ndarray | jax.Array) and np.ndim(x) == 0
    return is_number and not isinstance(x, jax.core.Tracer)
