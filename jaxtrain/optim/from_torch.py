"""Our optimizer from a live one of PyTorch, its schedulers and parameter groups included.

It is the recipe that is carried over, not what the optimizer has done: its moments start at zero, and schedules at the
scheduler's beginning, wherever it stands. Neither is torch imported: its objects are only read.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.errors import UserError
from jaxtrain.interop import NameTable
from jaxtrain.interop.names import AS_IS, LAYER, LINEAR
from jaxtrain.optim import schedules
from jaxtrain.optim.adadelta import adadelta
from jaxtrain.optim.adafactor import adafactor
from jaxtrain.optim.adagrad import adagrad
from jaxtrain.optim.adamax import adamax
from jaxtrain.optim.adamw import adam, adamw
from jaxtrain.optim.asgd import asgd
from jaxtrain.optim.groups import groups
from jaxtrain.optim.learning_rate import LearningRate
from jaxtrain.optim.muon import muon
from jaxtrain.optim.nadam import nadam
from jaxtrain.optim.plateau import reduce_lr_on_plateau
from jaxtrain.optim.radam import radam
from jaxtrain.optim.rmsprop import rmsprop
from jaxtrain.optim.rprop import rprop
from jaxtrain.optim.sgd import sgd

Names = NameTable | Mapping[str, str] | Callable[[str], str | None]
"""From a PyTorch parameter's name to the path of the JAX leaf it is, or is stacked in."""

_OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformationExtraArgs]] = {
    "Adadelta": adadelta,
    "Adafactor": adafactor,
    "Adagrad": adagrad,
    "Adam": adam,
    "Adamax": adamax,
    "AdamW": adamw,
    "ASGD": asgd,
    "Muon": muon,
    "NAdam": nadam,
    "RAdam": radam,
    "RMSprop": rmsprop,
    "Rprop": rprop,
    "SGD": sgd,
}

_MEANINGLESS = {"foreach", "fused", "capturable", "differentiable", "params", "param_names", "name"}
_SCHEDULERS = {"lr", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}
_FROZEN = "frozen"


def from_torch(
    optimizer: Any, scheduler: Any = None, *, model: Any = None, names: Names | None = None
) -> optax.GradientTransformationExtraArgs:
    """The optimizer that updates as `optimizer` does, under `scheduler`.

    Parameter groups need `names`, from PyTorch's names to JAX's paths, and, unless the optimizer was made of
    `named_parameters()`, the `model`. With `names` a parameter the optimizer was not given is left as it is. Raises
    `UserError`, naming it, for whatever cannot be honoured.

    >>> import importlib.util
    >>> if importlib.util.find_spec("torch"):
    ...     import torch
    ...     theirs = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5, maximize=True)
    ...     tx = from_torch(theirs, torch.optim.lr_scheduler.ExponentialLR(theirs, 0.1))
    ...     updates, state = tx.update(jnp.ones(1), tx.init(jnp.zeros(1)))
    ...     assert float(updates[0]) == 0.5
    """
    if scheduler is not None and scheduler.optimizer is not optimizer:
        raise UserError(f"{_name(scheduler)} schedules another optimizer: give it with its own")
    if scheduler is None and any("initial_lr" in group for group in optimizer.param_groups):
        raise UserError(f"{_name(optimizer)} has a scheduler: give it too, for the learning rate now is not the first")
    if names is None:
        if len(optimizer.param_groups) > 1:
            raise UserError(f"{_name(optimizer)} has {len(optimizer.param_groups)} parameter groups: give names")
        return _transformation(optimizer, scheduler, 0, [], None)
    group_of = _group_of_path(optimizer, model, names)
    transformations: dict[str, optax.GradientTransformation] = {_FROZEN: optax.set_to_zero()}
    for i in range(len(optimizer.param_groups)):
        paths = [path for path, group in group_of.items() if group == i]
        transformations[str(i)] = _transformation(optimizer, scheduler, i, paths, names)
    return groups(lambda path: str(group_of.get(path, _FROZEN)), transformations)


def _transformation(
    optimizer: Any, scheduler: Any, i: int, paths: list[str], names: Names | None
) -> optax.GradientTransformationExtraArgs:
    kind = _name(optimizer)
    if kind not in _OPTIMIZERS or not type(optimizer).__module__.startswith("torch.optim"):
        raise UserError(f"{kind} is not an optimizer we have: choose from {', '.join(_OPTIMIZERS)}")
    if any(getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post")):
        raise UserError(f"{kind} has step hooks, which are not honoured: remove them")
    group = optimizer.param_groups[i]
    options = {k: _number(v) for k, v in group.items() if k not in _MEANINGLESS | _SCHEDULERS}
    make = _OPTIMIZERS[kind]
    if make in (adam, adamw):
        make = adamw if options.pop("decoupled_weight_decay", make is adamw) else adam
    if "betas" in options:
        options["b1"], options["b2"] = map(_number, options.pop("betas"))
    if make is adagrad:
        # PyTorch fills the sums when the optimizer is made, from its argument and not the group's.
        options["initial_accumulator_value"] = _number(optimizer.defaults["initial_accumulator_value"])
    for option in options:
        if option not in inspect.signature(make).parameters:
            raise UserError(f"{kind}'s {option}={options[option]!r} in group {i} is not honoured: leave it out")
    if kind in ("Muon", "Adafactor") and isinstance(names, NameTable):
        options |= _layout(kind, paths, names)
    if getattr(scheduler, "cycle_momentum", False):
        options["b1" if "b1" in options else "momentum"] = _momentum(scheduler, i)
    rate = _number(group["lr"]) if scheduler is None else _rate(scheduler, i)
    return make(rate, **options)


def _rate(scheduler: Any, i: int) -> LearningRate:
    """The learning rate of group `i`."""
    s, kind = scheduler, _name(scheduler)
    if kind == "ReduceLROnPlateau":
        options = (s.mode, s.factor, s.patience, s.threshold, s.threshold_mode, s.cooldown, s.min_lrs[i], s.eps)
        return reduce_lr_on_plateau(_number(s.optimizer.param_groups[i]["lr"]), *options)
    if kind in ("SequentialLR", "ChainedScheduler"):
        for part in s._schedulers:
            if getattr(part, "cycle_momentum", False):
                raise UserError(f"cycle_momentum of a {_name(part)} in a {kind} is not honoured: make it False")
        parts = [_rate(part, i) for part in s._schedulers]
        return schedules.sequential(parts, s._milestones) if kind == "SequentialLR" else schedules.chained(parts)
    if kind == "OneCycleLR":
        return _one_cycle(s, i, "lr")
    lr: Any = _number(s.base_lrs[i]) if hasattr(s, "base_lrs") else None
    if kind == "CyclicLR":
        return schedules.cyclic_lr(lr, _number(s.max_lrs[i]), *_cycle(s))
    makers: dict[str, Callable[[], schedules.Scheduler]] = {
        "StepLR": lambda: schedules.step_lr(lr, s.step_size, s.gamma),
        "MultiStepLR": lambda: schedules.multi_step_lr(lr, list(s.milestones.elements()), s.gamma),
        "ConstantLR": lambda: schedules.constant_lr(lr, s.factor, s.total_iters),
        "LinearLR": lambda: schedules.linear_lr(lr, s.start_factor, s.end_factor, s.total_iters),
        "ExponentialLR": lambda: schedules.exponential_lr(lr, s.gamma),
        "PolynomialLR": lambda: schedules.polynomial_lr(lr, s.total_iters, s.power),
        "CosineAnnealingLR": lambda: schedules.cosine_annealing_lr(lr, s.T_max, s.eta_min),
        "CosineAnnealingWarmRestarts": lambda: schedules.cosine_annealing_warm_restarts(lr, s.T_0, s.T_mult, s.eta_min),
        "LambdaLR": lambda: schedules.lambda_lr(lr, _traceable(s.lr_lambdas[i], "lr_lambda")),
        "MultiplicativeLR": lambda: schedules.multiplicative_lr(lr, _traceable(s.lr_lambdas[i], "lr_lambda")),
    }
    if kind not in makers or not type(s).__module__.startswith("torch.optim"):
        raise UserError(f"{kind} is not a scheduler we have: choose from those of torch.optim.lr_scheduler")
    return makers[kind]()


def _momentum(scheduler: Any, i: int) -> schedules.Scheduler:
    if _name(scheduler) == "OneCycleLR":
        return _one_cycle(scheduler, i, "momentum")
    low, high = _number(scheduler.base_momentums[i]), _number(scheduler.max_momentums[i])
    return schedules.cyclic_momentum(low, high, *_cycle(scheduler))


def _one_cycle(scheduler: Any, i: int, what: str) -> schedules.Scheduler:
    group, phases = scheduler.optimizer.param_groups[i], scheduler._schedule_phases
    marks = [phases[0][f"start_{what}"], *(phase[f"end_{what}"] for phase in phases)]
    ends = [phase["end_step"] for phase in phases]
    return schedules.annealed([_number(group[mark]) for mark in marks], ends, scheduler._anneal_func_type)


def _cycle(scheduler: Any) -> tuple[Any, ...]:
    up = round(scheduler.total_size * scheduler.step_ratio)
    custom = scheduler._scale_fn_custom
    scale = _traceable(custom, "scale_fn") if custom else None
    return up, round(scheduler.total_size) - up, scheduler.mode, scheduler.gamma, scale, scheduler.scale_mode


def _traceable(fn: Callable[[Any], Any], what: str) -> Callable[[Any], Any]:
    try:
        jax.eval_shape(lambda t: jnp.asarray(fn(t)), jax.ShapeDtypeStruct((), jnp.result_type(float)))
    except Exception as error:
        raise UserError(f"{what} is no JAX function of an array: write it with jax.numpy, jnp.where for if") from error
    return fn


def _group_of_path(optimizer: Any, model: Any, names: Names) -> dict[str, int]:
    by_id = {id(p): name for name, p in model.named_parameters()} if model is not None else {}
    path_of, found = _path_of(names), dict[str, int]()
    for i, group in enumerate(optimizer.param_groups):
        for j, p in enumerate(group["params"]):
            name = by_id.get(id(p)) or (group["param_names"][j] if "param_names" in group else None)
            if name is None:
                raise UserError(f"parameter {j} of group {i} has no name: give model, the module it belongs to")
            path = path_of(name)
            if path is None:
                raise UserError(f"{name} of group {i} is not in names: add it")
            if found.setdefault(path, i) != i:
                raise UserError(f"{path} stacks parameters of groups {found[path]} and {i}: give each leaf one group")
    return found


def _path_of(names: Names) -> Callable[[str], str | None]:
    if isinstance(names, NameTable):
        patterns = [
            (re.compile(re.escape(param.name).replace(re.escape(LAYER), r"\d+")), path)
            for path, param in names.params.items()
        ]

        def path_of(name: str) -> str | None:
            name = names.tied.get(name, name)
            return next((path for pattern, path in patterns if pattern.fullmatch(name)), None)

        return path_of
    return names.get if isinstance(names, Mapping) else names


def _layout(kind: str, paths: list[str], names: NameTable) -> dict[str, Any]:
    """Muon and Adafactor see a parameter as a whole: it must be PyTorch's, transposed at most."""
    axes = set()
    for path in paths:
        param = names.params[path]
        if LAYER in param.name or (param.layout is not AS_IS and param.layout is not LINEAR):
            raise UserError(
                f"{path} is not laid out as {param.name}, which {kind} must see whole: give it another group"
            )
        axes.add(-1 if param.layout is LINEAR else 0)
    if kind == "Adafactor":
        return {}
    if len(axes) > 1:
        raise UserError(f"{', '.join(paths)}: Muon finds only some of them transposed: give these another group")
    return {"out_axis": axes.pop()} if axes else {}


def _name(thing: Any) -> str:
    return type(thing).__name__


def _number(value: Any) -> Any:
    """`value`, out of its tensor if it is in one."""
    return value.item() if hasattr(value, "item") else value
