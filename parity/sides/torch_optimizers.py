"""Optimizers and schedules of `jaxtrain.optim`, written as expressions, as PyTorch's of the same hyperparameters.

Every hyperparameter is passed to PyTorch, since the defaults of the frameworks differ. Schedules are PyTorch's
schedulers; those that PyTorch does not have are formulas of `math`, evaluated by a `LambdaLR`.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxtrain.optim import OPTIMIZERS, Call, Expression

if TYPE_CHECKING:
    import torch

    Named = Iterable[tuple[str, torch.nn.Parameter]]

CLASSES = {
    "adadelta": "Adadelta",
    "adafactor": "Adafactor",
    "adagrad": "Adagrad",
    "adam": "Adam",
    "adamax": "Adamax",
    "adamw": "AdamW",
    "asgd": "ASGD",
    "nadam": "NAdam",
    "radam": "RAdam",
    "rmsprop": "RMSprop",
    "rprop": "Rprop",
    "sgd": "SGD",
}
"""Classes of `torch.optim`. Muon is none of them: it computes in bfloat16, and takes matrices only."""
_OURS = ("learning_rate", "mask", "moments_dtype", "out_axis", "dtype")
"""Arguments that PyTorch's optimizers do not have, or have under another name."""
_SCHEDULERS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "step_lr": ("StepLR", {}),
    "multi_step_lr": ("MultiStepLR", {}),
    "constant_lr": ("ConstantLR", {}),
    "linear_lr": ("LinearLR", {}),
    "exponential_lr": ("ExponentialLR", {}),
    "polynomial_lr": ("PolynomialLR", {}),
    "cosine_annealing_lr": ("CosineAnnealingLR", {"t_max": "T_max"}),
    "cosine_annealing_warm_restarts": ("CosineAnnealingWarmRestarts", {"t_0": "T_0", "t_mult": "T_mult"}),
    "one_cycle_lr": ("OneCycleLR", {}),
    "cyclic_lr": ("CyclicLR", {}),
}
"""Classes of `torch.optim.lr_scheduler`, and their names of arguments that have others here."""


def has_counterpart(expression: Expression) -> bool:
    """Return whether PyTorch has the optimizer of an expression, with its schedule.

    >>> from jaxtrain.optim import parse_expression
    >>> has_counterpart(parse_expression("sgd(learning_rate=step_lr(lr=0.1, step_size=3), momentum=0.9)"))
    True
    >>> has_counterpart(parse_expression("adamw8bit(learning_rate=0.1)"))
    False
    """
    calls = [expression] if isinstance(expression, Call) else [*expression.values()]
    rates = [call.arguments.get("learning_rate") for call in calls]
    return (
        all(call.function == calls[0].function and call.function in CLASSES for call in calls)
        and all(rate == rates[0] for rate in rates if isinstance(rates[0], Call) or isinstance(rate, Call))
        and (not isinstance(rates[0], Call) or _is_scheduled_alike(rates[0]))
        and not any(_is_ours_alone(call) for call in calls)
    )


def torch_optimizer(
    expression: Expression, exempt: Callable[[str], bool], named: "Named", paths: Mapping[str, str]
) -> "torch.optim.Optimizer":
    """Return PyTorch's optimizer of an expression, each group of parameters with all its hyperparameters.

    Args:
      expression: An expression with a counterpart.
      exempt: Predicate on JAX's paths: whether a parameter does not decay, where the expression does not say.
      named: Pairs (name, parameter).
      paths: JAX's path of each name.
    """
    import torch

    first = expression if isinstance(expression, Call) else next(iter(expression.values()))
    groups = _groups(expression, exempt, list(named), paths)
    optimizer: torch.optim.Optimizer = getattr(torch.optim, CLASSES[first.function])(groups)
    return optimizer


def torch_scheduler(rate: Call) -> "Callable[[torch.optim.Optimizer], Any]":
    """Return the function that makes PyTorch's scheduler of a schedule."""
    from torch.optim import lr_scheduler

    if rate.function in _FORMULAS:
        factor = partial(_FORMULAS[rate.function], **rate.arguments)
        return lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda t: factor(t) / base_rate(rate))
    if rate.function == "sequential":
        parts, milestones = _parts(rate), list(rate.arguments["milestones"])
        return lambda optimizer: lr_scheduler.SequentialLR(optimizer, [part(optimizer) for part in parts], milestones)
    if rate.function == "chained":
        parts = _parts(rate)
        return lambda optimizer: lr_scheduler.ChainedScheduler([part(optimizer) for part in parts])
    kind, renamed = _SCHEDULERS[rate.function]
    options = {renamed.get(name, name): value for name, value in rate.arguments.items() if name != "lr"}
    if rate.function in ("one_cycle_lr", "cyclic_lr"):
        options["cycle_momentum"] = False
    return lambda optimizer: getattr(lr_scheduler, kind)(optimizer, **options)


def base_rate(rate: Any) -> float:
    """Return the learning rate with which PyTorch's optimizer is created, of a number or a schedule."""
    if not isinstance(rate, Call):
        return float(rate)
    if rate.function in ("sequential", "chained"):
        return base_rate(rate.arguments["schedules"][0])
    if rate.function in _FORMULAS:
        return 1.0  # the formula is the rate itself, which may be 0
    return float(next(rate.arguments[name] for name in ("lr", "max_lr", "base_lr") if name in rate.arguments))


def _parts(rate: Call) -> "list[Callable[[torch.optim.Optimizer], Any]]":
    return [torch_scheduler(part) for part in rate.arguments["schedules"]]


def _is_scheduled_alike(rate: Call) -> bool:
    if rate.function in ("sequential", "chained"):
        parts = rate.arguments["schedules"]
        return all(_is_scheduled_alike(part) for part in parts) and len(set(map(base_rate, parts))) == 1
    return rate.function in {*_SCHEDULERS, *_FORMULAS}


def _is_ours_alone(call: Call) -> bool:
    """Whether a call has arguments without a counterpart: moments in another dtype, a scheduled momentum."""
    given = {name: x for name, x in call.arguments.items() if name != "learning_rate" and x is not None}
    return "moments_dtype" in given or any(isinstance(x, Call) for x in given.values())


def _groups(
    expression: Expression, exempt: Callable[[str], bool], named: list[Any], paths: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return PyTorch's parameter groups."""
    if not isinstance(expression, Call):
        members = [(call, set(of.split())) for of, call in expression.items()]
        found = [_group(call, [x for x in named if paths.get(x[0]) in own]) for call, own in members]
    else:
        decays = "mask" not in inspect.signature(OPTIMIZERS[expression.function]).parameters
        decays = decays or "mask" in expression.arguments
        exempted = [x for x in named if not decays and x[0] in paths and exempt(paths[x[0]])]
        names = {name for name, _ in exempted}
        without = {"weight_decay": 0.0} if exempted else {}
        found = [
            _group(expression, [x for x in named if x[0] not in names]),
            {**_group(expression, exempted), **without},
        ]
    return [group for group in found if group["params"]]


def _group(call: Call, params: list[Any]) -> dict[str, Any]:
    takes = inspect.signature(OPTIMIZERS[call.function]).parameters
    given = {name: x.default for name, x in takes.items() if x.default is not x.empty} | dict(call.arguments)
    options = {name: x for name, x in given.items() if name not in _OURS}
    if "b1" in options:
        options["betas"] = (options.pop("b1"), options.pop("b2"))
    return {"params": params, "lr": base_rate(given["learning_rate"]), **options}


def _warmup_cosine(t: int, lr: float, warmup_steps: int, total_steps: int, final_lr: float = 0.0) -> float:
    if t < warmup_steps:
        return lr * t / warmup_steps
    fallen = min(t - warmup_steps, total_steps - warmup_steps) / max(total_steps - warmup_steps, 1)
    return final_lr + (lr - final_lr) * (1 + math.cos(math.pi * fallen)) / 2


def _wsd(
    t: int,
    lr: float,
    warmup_steps: int,
    stable_steps: int,
    decay_steps: int,
    final_lr: float = 0.0,
    decay: str = "linear",
) -> float:
    if t < warmup_steps:
        return lr * t / warmup_steps
    fallen = min(max(t - warmup_steps - stable_steps, 0), decay_steps) / max(decay_steps, 1)
    left = {"linear": 1 - fallen, "cosine": (1 + math.cos(math.pi * fallen)) / 2, "1-sqrt": 1 - math.sqrt(fallen)}
    return final_lr + (lr - final_lr) * left[decay]


_FORMULAS: Mapping[str, Callable[..., float]] = {"warmup_cosine": _warmup_cosine, "wsd": _wsd}
"""Schedules that PyTorch does not have: the learning rate of update `t`, counted from 0."""
