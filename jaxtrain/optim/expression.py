"""Optimizers and schedules as text: "adamw(learning_rate=one_cycle_lr(max_lr=0.003, total_steps=100), b2=0.99)".

The text is a Python expression of calls to the functions below, numbers, strings, None, tuples and lists. It is parsed,
never executed. A dictionary defines parameter groups: paths, separated by spaces, and their optimizer.
"""

import ast
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import optax

from jaxtrain.errors import UserError
from jaxtrain.optim import schedules
from jaxtrain.optim.adadelta import adadelta
from jaxtrain.optim.adafactor import adafactor
from jaxtrain.optim.adagrad import adagrad
from jaxtrain.optim.adamax import adamax
from jaxtrain.optim.adamw import adam, adamw
from jaxtrain.optim.asgd import asgd
from jaxtrain.optim.clamped import clamped
from jaxtrain.optim.clipped import clipped
from jaxtrain.optim.eight_bit import adam8bit, adamw8bit, sgd8bit
from jaxtrain.optim.groups import groups
from jaxtrain.optim.metric_rate import rate_of_metric
from jaxtrain.optim.muon import muon
from jaxtrain.optim.nadam import nadam
from jaxtrain.optim.plateau import reduce_lr_on_plateau
from jaxtrain.optim.radam import radam
from jaxtrain.optim.rmsprop import rmsprop
from jaxtrain.optim.rprop import rprop
from jaxtrain.optim.sgd import sgd
from jaxtrain.optim.turns import added, at_turn

OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformationExtraArgs]] = {
    "adadelta": adadelta,
    "adafactor": adafactor,
    "adagrad": adagrad,
    "adam": adam,
    "adam8bit": adam8bit,
    "adamax": adamax,
    "adamw": adamw,
    "adamw8bit": adamw8bit,
    "added": added,
    "asgd": asgd,
    "at_turn": at_turn,
    "clamped": clamped,
    "clipped": clipped,
    "muon": muon,
    "nadam": nadam,
    "radam": radam,
    "rmsprop": rmsprop,
    "rprop": rprop,
    "sgd": sgd,
    "sgd8bit": sgd8bit,
}
SCHEDULES: dict[str, Callable[..., Any]] = {
    "annealed": schedules.annealed,
    "chained": schedules.chained,
    "constant_lr": schedules.constant_lr,
    "cosine_annealing_lr": schedules.cosine_annealing_lr,
    "cosine_annealing_warm_restarts": schedules.cosine_annealing_warm_restarts,
    "cyclic_lr": schedules.cyclic_lr,
    "cyclic_momentum": schedules.cyclic_momentum,
    "exponential_lr": schedules.exponential_lr,
    "held": schedules.held,
    "lambda_lr": schedules.lambda_lr,
    "linear_lr": schedules.linear_lr,
    "multi_step_lr": schedules.multi_step_lr,
    "multiplicative_lr": schedules.multiplicative_lr,
    "one_cycle_lr": schedules.one_cycle_lr,
    "one_cycle_momentum": schedules.one_cycle_momentum,
    "polynomial_lr": schedules.polynomial_lr,
    "rate_of_metric": rate_of_metric,
    "reduce_lr_on_plateau": reduce_lr_on_plateau,
    "sequential": schedules.sequential,
    "shifted": schedules.shifted,
    "step_lr": schedules.step_lr,
    "warmup_cosine": schedules.warmup_cosine,
    "wsd": schedules.wsd,
}
FROZEN = "frozen"
"""The group of the parameters that belong to no other group: they are not updated."""


@dataclass(frozen=True)
class Call:
    """A call of a function by name.

    Attributes:
      function: Name of the function.
      arguments: Arguments by name; an argument may be a call itself.

    Example:
      >>> call = Call("sgd", {"learning_rate": Call("step_lr", {"lr": 0.1, "step_size": 30}), "momentum": 0.9})
      >>> str(call)
      'sgd(learning_rate=step_lr(lr=0.1, step_size=30), momentum=0.9)'
      >>> parse_expression(str(call)) == call
      True
    """

    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.function}({', '.join(f'{name}={_format(value)}' for name, value in self.arguments.items())})"


Expression: TypeAlias = Call | dict[str, Call]
"""A call, or one per parameter group, by the group's paths separated by spaces."""


def format_expression(expression: Expression) -> str:
    """Format an expression as text that `parse_expression` reads.

    Raises:
      UserError: An argument is a function, which has no text.
    """
    if isinstance(expression, Call):
        return str(expression)
    return "{" + ", ".join(f"{paths!r}: {call}" for paths, call in expression.items()) + "}"


def parse_expression(text: str) -> Expression:
    """Parse an expression. Functions are not looked up.

    Raises:
      UserError: The text is any other Python.
    """
    try:
        body = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{text!r} is not an expression such as 'adamw(b2=0.99)': fix it") from error
    if isinstance(body, ast.Dict):
        pairs = [(_value(key), _value(value)) for key, value in zip(body.keys, body.values, strict=True)]
        if not all(isinstance(key, str) and isinstance(value, Call) for key, value in pairs):
            raise UserError(f"{text!r} does not define groups: write {{'paths of a group': adamw(…), …}}")
        return dict(pairs)
    value = _value(body)
    if not isinstance(value, Call):
        raise UserError(f"{text!r} is not a call: write a name such as adamw, or 'adamw(b2=0.99)'")
    return value


def complete_expression(
    expression: Expression, functions: Mapping[str, Callable[..., Any]], defaults: Mapping[str, Any]
) -> Expression:
    """Add default arguments to the functions of an expression that accept them.

    Args:
      expression: A call, or one per parameter group.
      functions: Functions by name.
      defaults: Default arguments by name.

    Returns:
      The expression, its own arguments unchanged.

    Example:
      >>> str(complete_expression(parse_expression("sgd"), OPTIMIZERS, {"learning_rate": 0.1, "b2": 0.9}))
      'sgd(learning_rate=0.1)'
    """
    if not isinstance(expression, Call):
        whole = {paths: complete_expression(call, functions, defaults) for paths, call in expression.items()}
        return {paths: call for paths, call in whole.items() if isinstance(call, Call)}
    parameters = inspect.signature(_function(expression, functions)).parameters
    arguments = {name: value for name, value in defaults.items() if name in parameters}
    return Call(expression.function, {**arguments, **expression.arguments})


def build_expression(
    expression: Expression, functions: Mapping[str, Callable[..., Any]], defaults: Mapping[str, Any]
) -> Any:
    """Build the optimizer or schedule of an expression.

    Args:
      expression: A call, or one per parameter group.
      functions: Functions by name, `OPTIMIZERS` or `SCHEDULES`.
      defaults: Default arguments by name, for the functions that accept them.

    Returns:
      The result of the call; for parameter groups a transformation of `groups`.

    Raises:
      UserError: A function is unknown, or does not accept an argument.

    Example:
      >>> import jax.numpy as jnp
      >>> tx = build_expression(parse_expression("sgd(momentum=0.9)"), OPTIMIZERS, {"learning_rate": 0.5})
      >>> float(tx.update(jnp.ones(1), tx.init(jnp.zeros(1)))[0][0])
      -0.5
    """
    if not isinstance(expression, Call):
        group_of = {path: str(i) for i, paths in enumerate(expression) for path in paths.split()}
        members = {str(i): build_expression(call, functions, defaults) for i, call in enumerate(expression.values())}
        return groups(lambda path: group_of.get(path, FROZEN), {**members, FROZEN: optax.set_to_zero()})
    function = _function(expression, functions)
    parameters = inspect.signature(function).parameters
    arguments = {name: value for name, value in defaults.items() if name in parameters}
    arguments |= {name: _build_argument(value) for name, value in expression.arguments.items()}
    for name in arguments.keys() - parameters.keys():
        raise UserError(f"{expression.function} has no argument {name}: use one of {', '.join(parameters)}")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in arguments:
            raise UserError(f"{expression.function} needs {name}: write {expression.function}({name}=…)")
    return function(**arguments)


def _function(call: Call, functions: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    if call.function not in functions:
        raise UserError(f"function {call.function!r} is unknown: use one of {', '.join(functions)}")
    return functions[call.function]


def _build_argument(value: Any) -> Any:
    """Build the schedule or the optimizer of an argument that is a call; return any other argument."""
    if isinstance(value, list):
        return [_build_argument(entry) for entry in value]
    if not isinstance(value, Call):
        return value
    return build_expression(value, OPTIMIZERS if value.function in OPTIMIZERS else SCHEDULES, {})


def _format(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_format, value)) + "]"
    if callable(value) or (isinstance(value, float) and not math.isfinite(value)):
        raise UserError(f"{value} cannot be written as text: use a schedule by name")
    return str(value) if isinstance(value, Call) else repr(value)


def _value(node: Any) -> Any:
    match node:
        case ast.Name(id=name):
            return Call(name)
        case ast.Call(func=ast.Name(id=name), args=[], keywords=keywords) if all(k.arg for k in keywords):
            return Call(name, {str(k.arg): _value(k.value) for k in keywords})
        case ast.List(elts=entries):
            return [_value(entry) for entry in entries]
        case _:
            try:
                return ast.literal_eval(node)
            except ValueError as error:
                text = ast.unparse(node) if isinstance(node, ast.AST) else repr(node)
                raise UserError(
                    f"{text!r} is neither a call with arguments by name nor a plain value: fix it"
                ) from error
