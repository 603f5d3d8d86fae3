"""Our optimizer from one of PyTorch's, its schedulers and parameter groups included: live, or as `state_dict`s keep it.

It is the recipe that is carried over, not what the optimizer has done: its moments start at zero, and schedules at the
scheduler's beginning, wherever it stands (`jaxtrain.interop` carries the rest). Neither is torch imported: its objects
are only read.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain.errors import UserError
from jaxtrain.interop.names import AS_IS, LAYER, LINEAR, NameTable
from jaxtrain.optim import OPTIMIZERS, Call, Expression, build_expression

Names = NameTable | Mapping[str, str] | Callable[[str], str | None]
"""From a PyTorch parameter's name to the path of the JAX leaf it is, or is stacked in."""

Groups = Sequence[Mapping[str, Any]]
"""PyTorch's `param_groups`."""

OPTIMIZER_CLASSES = (
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "Adamax",
    "AdamW",
    "ASGD",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
"""`torch.optim`'s; our function is the same in small letters."""

_MEANINGLESS = {"foreach", "fused", "capturable", "differentiable", "params", "param_names", "name"}
_SCHEDULED = {"lr", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}

# What only the groups of that optimizer hold; RAdam and Adamax hold less than Adam, and are told apart last.
_MARKS = {
    "rho": "Adadelta",
    "beta2_decay": "Adafactor",
    "lr_decay": "Adagrad",
    "lambd": "ASGD",
    "ns_steps": "Muon",
    "momentum_decay": "NAdam",
    "centered": "RMSprop",
    "etas": "Rprop",
    "dampening": "SGD",
}
# What the state of that scheduler holds, the first that fits.
_SCHEDULER_MARKS = {
    "_milestones": "SequentialLR",
    "_schedulers": "ChainedScheduler",
    "num_bad_epochs": "ReduceLROnPlateau",
    "_schedule_phases": "OneCycleLR",
    "max_lrs": "CyclicLR",
    "T_0": "CosineAnnealingWarmRestarts",
    "T_max": "CosineAnnealingLR",
    "lr_lambdas": "LambdaLR",
    "milestones": "MultiStepLR",
    "step_size": "StepLR",
    "power": "PolynomialLR",
    "start_factor": "LinearLR",
    "factor": "ConstantLR",
    "gamma": "ExponentialLR",
}


class Scheduler(NamedTuple):
    """A scheduler of PyTorch's: its class, and its attributes or its `state_dict()`, which are the same."""

    kind: str
    values: Mapping[str, Any]

    @property
    def parts(self) -> "list[Scheduler]":
        """Those that a `SequentialLR` or a `ChainedScheduler` is made of."""
        return [saved_scheduler(s) if isinstance(s, Mapping) else _live(s) for s in self.values.get("_schedulers", [])]

    @property
    def position(self) -> int:
        """How often it was stepped."""
        own = self.values.get("last_epoch")
        return max(part.position for part in self.parts) if own is None else int(own)


def saved_scheduler(state: Mapping[str, Any]) -> Scheduler:
    """The scheduler of a `state_dict()`, its class recognised by what it holds."""
    kind = next((kind for mark, kind in _SCHEDULER_MARKS.items() if mark in state), None)
    if kind is None:
        raise UserError(f"a scheduler's state of {', '.join(state)} is none we know: say --schedule")
    if state.get("_scale_fn_custom") is not None:
        raise UserError("the state of a CyclicLR does not hold its scale_fn: say --schedule")
    return Scheduler(kind, state)


def saved_kind(groups: Groups, entries: set[str]) -> str:
    """The class of the optimizer whose `state_dict()` has these groups; `entries`: the names in its state."""
    group = groups[0]
    found = next((kind for mark, kind in _MARKS.items() if mark in group), None)
    if found is not None:
        return found
    if "amsgrad" in group:
        if "decoupled_weight_decay" not in group:
            raise UserError("a state of Adam or of AdamW, which older versions of PyTorch wrote alike: say --optimizer")
        return "AdamW" if group["decoupled_weight_decay"] else "Adam"
    if "betas" in group:
        return "Adamax" if "exp_inf" in entries or "decoupled_weight_decay" not in group else "RAdam"
    raise UserError(f"an optimizer whose groups hold {', '.join(group)} is none we have: say --optimizer")


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
    kind, param_groups = type(optimizer).__name__, optimizer.param_groups
    if kind not in OPTIMIZER_CLASSES or not type(optimizer).__module__.startswith("torch.optim"):
        raise UserError(f"{kind} is not an optimizer we have: choose from {', '.join(OPTIMIZER_CLASSES)}")
    if any(getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post")):
        raise UserError(f"{kind} has step hooks, which are not honoured: remove them")
    if scheduler is not None and scheduler.optimizer is not optimizer:
        raise UserError(f"{type(scheduler).__name__} schedules another optimizer: give it with its own")
    # PyTorch fills the sums of Adagrad when the optimizer is made, from its argument and not the group's.
    filled = {k: _number(v) for k, v in optimizer.defaults.items() if k == "initial_accumulator_value"}
    param_groups = [{**group, **filled} for group in param_groups]
    live = None if scheduler is None else _live(scheduler)
    if names is None:
        if len(param_groups) > 1:
            raise UserError(f"{kind} has {len(param_groups)} parameter groups: give names")
        return build_expression(described(kind, param_groups, live), OPTIMIZERS, {})
    group_names = _names_of_groups(optimizer.param_groups, model)
    return build_expression(described(kind, param_groups, live, names, group_names), OPTIMIZERS, {})


def described(
    kind: str,
    param_groups: Groups,
    scheduler: Scheduler | None,
    names: Names | None = None,
    group_names: Sequence[Sequence[str]] = (),
    *,
    shift: int = 0,
) -> Expression:
    """The optimizer of that class, with those groups, as an expression of our functions.

    `group_names`: the parameters of each group; without `names` there is one group, of all. `shift`: how much more
    often the scheduler was stepped than the optimizer. Raises `UserError`, naming it, for what cannot be honoured.
    """
    if scheduler is None and any("initial_lr" in group for group in param_groups):
        raise UserError(f"{kind} has a scheduler: give it too, for the learning rate now is not the first")
    if names is None:
        return _call(kind, param_groups, scheduler, 0, [], None, shift)
    group_of = _group_of_path(names, group_names)
    members = [[path for path, group in group_of.items() if group == i] for i in range(len(param_groups))]
    return {
        " ".join(paths): _call(kind, param_groups, scheduler, i, paths, names, shift) for i, paths in enumerate(members)
    }


def _call(
    kind: str,
    param_groups: Groups,
    scheduler: Scheduler | None,
    i: int,
    paths: list[str],
    names: Names | None,
    shift: int,
) -> Call:
    group = param_groups[i]
    options = {k: _number(v) for k, v in group.items() if k not in _MEANINGLESS | _SCHEDULED}
    function = kind.lower()
    if function in ("adam", "adamw"):
        function = "adamw" if options.pop("decoupled_weight_decay", function == "adamw") else "adam"
    if "betas" in options:
        options["b1"], options["b2"] = map(_number, options.pop("betas"))
    for option in options:
        if option not in inspect.signature(OPTIMIZERS[function]).parameters:
            raise UserError(f"{kind}'s {option}={options[option]!r} in group {i} is not honoured: leave it out")
    if "mask" in inspect.signature(OPTIMIZERS[function]).parameters:
        options["mask"] = None  # all that is in the group decays
    if kind in ("Muon", "Adafactor") and isinstance(names, NameTable):
        options |= _layout(kind, paths, names)
    if scheduler is not None and scheduler.values.get("cycle_momentum"):
        options["b1" if "b1" in options else "momentum"] = _shifted(_momentum(scheduler, group, i), shift)
    rate = _number(group["lr"]) if scheduler is None else _shifted(_rate(scheduler, group, i), shift)
    return Call(function, {"learning_rate": rate, **options})


def _shifted(schedule: Call, by: int) -> Call:
    # A plateau counts no updates.
    return Call("shifted", {"schedule": schedule, "by": by}) if by and "plateau" not in schedule.function else schedule


def _rate(scheduler: Scheduler, group: Mapping[str, Any], i: int) -> Call:
    """The learning rate of `group`, the one numbered `i`."""
    kind, s = scheduler
    if kind == "ReduceLROnPlateau":
        own = {k: s[k] for k in ("mode", "factor", "patience", "threshold", "threshold_mode", "cooldown", "eps")}
        return Call("reduce_lr_on_plateau", {"learning_rate": _number(group["lr"]), **own, "min_lr": s["min_lrs"][i]})
    if kind in ("SequentialLR", "ChainedScheduler"):
        for part in scheduler.parts:
            if part.values.get("cycle_momentum"):
                raise UserError(f"cycle_momentum of a {part.kind} in a {kind} is not honoured: make it False")
        parts = [_rate(part, group, i) for part in scheduler.parts]
        if kind == "SequentialLR":
            return Call("sequential", {"schedules": parts, "milestones": list(s["_milestones"])})
        return Call("chained", {"schedules": parts})
    if kind == "OneCycleLR":
        return _one_cycle(s, group, "lr")
    lr = _number(s["base_lrs"][i]) if "base_lrs" in s else None
    makers: dict[str, Callable[[], dict[str, Any]]] = {
        "StepLR": lambda: {"step_size": s["step_size"], "gamma": s["gamma"]},
        "MultiStepLR": lambda: {"milestones": sorted(_repeated(s["milestones"])), "gamma": s["gamma"]},
        "ConstantLR": lambda: {"factor": s["factor"], "total_iters": s["total_iters"]},
        "LinearLR": lambda: {k: s[k] for k in ("start_factor", "end_factor", "total_iters")},
        "ExponentialLR": lambda: {"gamma": s["gamma"]},
        "PolynomialLR": lambda: {"total_iters": s["total_iters"], "power": s["power"]},
        "CosineAnnealingLR": lambda: {"t_max": s["T_max"], "eta_min": s["eta_min"]},
        "CosineAnnealingWarmRestarts": lambda: {"t_0": s["T_0"], "t_mult": s["T_mult"], "eta_min": s["eta_min"]},
        "LambdaLR": lambda: {"lr_lambda": _traceable(s["lr_lambdas"][i], "lr_lambda")},
        "MultiplicativeLR": lambda: {"lr_lambda": _traceable(s["lr_lambdas"][i], "lr_lambda")},
        "CyclicLR": lambda: {"max_lr": _number(s["max_lrs"][i]), **_cycle(s)},
    }
    if kind not in makers:
        raise UserError(f"{kind} is not a scheduler we have: choose from those of torch.optim.lr_scheduler")
    return Call(_FUNCTIONS[kind], {"base_lr" if kind == "CyclicLR" else "lr": lr, **makers[kind]()})


_FUNCTIONS = {
    "StepLR": "step_lr",
    "MultiStepLR": "multi_step_lr",
    "ConstantLR": "constant_lr",
    "LinearLR": "linear_lr",
    "ExponentialLR": "exponential_lr",
    "PolynomialLR": "polynomial_lr",
    "CosineAnnealingLR": "cosine_annealing_lr",
    "CosineAnnealingWarmRestarts": "cosine_annealing_warm_restarts",
    "LambdaLR": "lambda_lr",
    "MultiplicativeLR": "multiplicative_lr",
    "CyclicLR": "cyclic_lr",
}


def _momentum(scheduler: Scheduler, group: Mapping[str, Any], i: int) -> Call:
    kind, s = scheduler
    if kind == "OneCycleLR":
        return _one_cycle(s, group, "momentum")
    ends = {"base_momentum": _number(s["base_momentums"][i]), "max_momentum": _number(s["max_momentums"][i])}
    return Call("cyclic_momentum", {**ends, **_cycle(s)})


def _one_cycle(s: Mapping[str, Any], group: Mapping[str, Any], what: str) -> Call:
    phases = s["_schedule_phases"]
    marks = [phases[0][f"start_{what}"], *(phase[f"end_{what}"] for phase in phases)]
    ends = [phase["end_step"] for phase in phases]
    values = [_number(group[mark]) for mark in marks]
    return Call("annealed", {"marks": values, "ends": ends, "strategy": s["_anneal_func_type"]})


def _cycle(s: Mapping[str, Any]) -> dict[str, Any]:
    up = round(s["total_size"] * s["step_ratio"])
    custom = s.get("_scale_fn_custom")
    own = {"mode": s["mode"], "gamma": s["gamma"], "scale_mode": s["scale_mode"]}
    scale = {} if custom is None else {"scale_fn": _traceable(custom, "scale_fn")}
    return {"step_size_up": up, "step_size_down": round(s["total_size"]) - up, **own, **scale}


def _repeated(counts: Mapping[int, int]) -> list[int]:
    return [milestone for milestone, n in counts.items() for _ in range(n)]


def _traceable(fn: Any, what: str) -> Callable[[Any], Any]:
    if not callable(fn):
        raise UserError(f"the state of a scheduler does not hold its {what}: say --schedule")
    try:
        jax.eval_shape(lambda t: jnp.asarray(fn(t)), jax.ShapeDtypeStruct((), jnp.result_type(float)))
    except Exception as error:
        raise UserError(f"{what} is no JAX function of an array: write it with jax.numpy, jnp.where for if") from error
    return fn


def _names_of_groups(param_groups: Groups, model: Any) -> list[list[str]]:
    by_id = {id(p): name for name, p in model.named_parameters()} if model is not None else {}
    found = []
    for i, group in enumerate(param_groups):
        found.append([by_id.get(id(p)) or _own_name(group, i, j) for j, p in enumerate(group["params"])])
    return found


def _own_name(group: Mapping[str, Any], i: int, j: int) -> str:
    if "param_names" not in group:
        raise UserError(f"parameter {j} of group {i} has no name: give model, the module it belongs to")
    return str(group["param_names"][j])


def _group_of_path(names: Names, group_names: Sequence[Sequence[str]]) -> dict[str, int]:
    path_of, found = _path_of(names), dict[str, int]()
    for i, group in enumerate(group_names):
        for name in group:
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


def _live(scheduler: Any) -> Scheduler:
    kind = type(scheduler).__name__
    if not type(scheduler).__module__.startswith("torch.optim"):
        raise UserError(f"{kind} is not a scheduler we have: choose from those of torch.optim.lr_scheduler")
    return Scheduler(kind, vars(scheduler))


def _number(value: Any) -> Any:
    """`value`, out of its tensor if it is in one."""
    return value.item() if hasattr(value, "item") else value
