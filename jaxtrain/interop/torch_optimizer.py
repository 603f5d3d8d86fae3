"""Conversion of PyTorch's optimizers with their schedulers and parameter groups, live or from `state_dict()`s.

Only settings are converted: moments start at zero and schedules at the beginning of the scheduler, whatever its
position; `jaxtrain.interop.torch_run` converts the state. torch is not imported, its objects are only read.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxtrain.errors import UserError
from jaxtrain.interop import bitsandbytes
from jaxtrain.interop.names import AS_IS, LINEAR, OUT_IN, NameTable
from jaxtrain.optim import OPTIMIZERS, Call, Expression, build_expression
from jaxtrain.records import Record, disregard, unread_fields

Names = NameTable | Mapping[str, str] | Callable[[str], str | None]
"""Mapping from a PyTorch parameter's name to the path of its JAX leaf."""

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
"""Supported classes of `torch.optim`; our functions have their names in lower case."""

_MEANINGLESS = {"foreach", "fused", "capturable", "differentiable", "params", "param_names", "name"}
_SCHEDULED = {"lr", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}

# Keys that only the groups of one optimizer have; RAdam and Adamax have fewer than Adam and are recognized last.
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
# Keys of the states of schedulers; the first match counts.
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


# Where a scheduler is, not what it does.
_POSITION = (
    *("_get_lr_called_within_step", "_is_initial", "_last_lr", "_step_count", "base_lrs", "last_epoch", "verbose"),
    *("T_cur", "T_i", "best", "num_bad_epochs", "cooldown_counter", "default_min_lr", "mode_worse", "total_steps"),
    *("cycle_momentum", "use_beta1", "base_momentums", "max_momentums", "_schedule_phases"),
)


class Scheduler(NamedTuple):
    """A scheduler of PyTorch: its class, and its attributes or its `state_dict()`, which are equal."""

    kind: str
    values: Mapping[str, Any]

    @property
    def parts(self) -> "list[Scheduler]":
        """Schedulers of a `SequentialLR` or a `ChainedScheduler`."""
        return [
            scheduler_from_state(s) if isinstance(s, Mapping) else _live(s) for s in self.values.get("_schedulers", [])
        ]

    @property
    def position(self) -> int:
        """Number of its steps."""
        own = self.values.get("last_epoch")
        return max(part.position for part in self.parts) if own is None else int(own)


def scheduler_from_state(state: Mapping[str, Any]) -> Scheduler:
    """Return the scheduler of a `state_dict()`, its class recognized by its keys."""
    kind = next((kind for mark, kind in _SCHEDULER_MARKS.items() if mark in state), None)
    if kind is None:
        raise UserError(f"a scheduler with the state {', '.join(state)} is not supported: set --schedule")
    if state.get("_scale_fn_custom") is not None:
        raise UserError("the state of a CyclicLR does not contain its scale_fn: set --schedule")
    return Scheduler(kind, state)


def unread_of_scheduler(state: Record) -> list[str]:
    """Return the fields of a scheduler's `state_dict()` that its conversion has not looked up."""
    disregard(state, *_POSITION)
    for part in state.get("_schedulers") or ():
        disregard(part, *_POSITION)
    return unread_fields(state)


def optimizer_class_of_state(groups: Groups, entries: set[str]) -> str:
    """Return the class of an optimizer from the groups and the names in the state of its `state_dict()`."""
    group = groups[0]
    if bitsandbytes.is_of_bitsandbytes(group, entries):
        return bitsandbytes.class_of_state(group)
    found = next((kind for mark, kind in _MARKS.items() if mark in group), None)
    if found is not None:
        return found
    if "amsgrad" in group:
        if "decoupled_weight_decay" not in group:
            raise UserError("older versions of PyTorch write equal states for Adam and AdamW: set --optimizer")
        return "AdamW" if group["decoupled_weight_decay"] else "Adam"
    if "betas" in group:
        if "exp_inf" in entries or not (entries or "decoupled_weight_decay" in group):
            return "Adamax"
        if "decoupled_weight_decay" in group:
            return "RAdam"
    raise UserError(f"an optimizer with the settings {', '.join(group)} is not supported: set --optimizer")


def from_torch(
    optimizer: Any, scheduler: Any = None, *, model: Any = None, names: Names | None = None
) -> optax.GradientTransformationExtraArgs:
    """Convert a PyTorch optimizer and its scheduler to a gradient transformation with the same updates.

    Args:
      optimizer: Optimizer of `torch.optim`, or `AdamW8bit`, `Adam8bit` or `SGD8bit` of `bitsandbytes.optim`.
      scheduler: Its scheduler, of `torch.optim.lr_scheduler`, or None.
      model: Module of the parameters; needed for parameter groups, unless the optimizer was created from
        `named_parameters()`.
      names: Mapping from PyTorch's names to JAX paths; needed for parameter groups. With it, parameters that the
        optimizer does not have are not updated.

    Returns:
      An optax transformation.

    Raises:
      UserError: A setting is not supported; it is named.

    Example:
      >>> import importlib.util
      >>> if importlib.util.find_spec("torch"):
      ...     import torch
      ...     theirs = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5, maximize=True)
      ...     tx = from_torch(theirs, torch.optim.lr_scheduler.ExponentialLR(theirs, 0.1))
      ...     updates, state = tx.update(jnp.ones(1), tx.init(jnp.zeros(1)))
      ...     assert float(updates[0]) == 0.5
    """
    if type(optimizer).__module__.startswith("bitsandbytes.optim"):
        return _of_bitsandbytes(optimizer, scheduler, model, names)
    return build_expression(live_expression(optimizer, scheduler, model=model, names=names), OPTIMIZERS, {})


def live_expression(
    optimizer: Any, scheduler: Any = None, *, model: Any = None, names: Names | None = None
) -> Expression:
    """Convert a PyTorch optimizer and its scheduler to an expression of our functions, as `from_torch` does.

    Args:
      optimizer: Optimizer of `torch.optim`.
      scheduler: Its scheduler, or None.
      model: As in `from_torch`.
      names: As in `from_torch`.

    Raises:
      UserError: A setting is not supported; it is named.
    """
    kind, param_groups = type(optimizer).__name__, optimizer.param_groups
    if kind not in OPTIMIZER_CLASSES or not type(optimizer).__module__.startswith("torch.optim"):
        raise UserError(f"{kind} is not supported: use one of {', '.join(OPTIMIZER_CLASSES)}")
    if any(getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post")):
        raise UserError(f"{kind} has step hooks, which are not supported: remove them")
    if scheduler is not None and scheduler.optimizer is not optimizer:
        raise UserError(f"{type(scheduler).__name__} schedules another optimizer: pass its own")
    # PyTorch initializes the sums of Adagrad from the argument of the optimizer, not of the group.
    filled = {k: _number(v) for k, v in optimizer.defaults.items() if k == "initial_accumulator_value"}
    param_groups = [{**group, **filled} for group in param_groups]
    live = None if scheduler is None else _live(scheduler)
    if names is None:
        if len(param_groups) > 1:
            raise UserError(f"{kind} has {len(param_groups)} parameter groups: pass names")
        return optimizer_expression(kind, param_groups, live)
    return optimizer_expression(kind, param_groups, live, names, _names_of_groups(optimizer.param_groups, model))


def _of_bitsandbytes(
    optimizer: Any, scheduler: Any, model: Any, names: Names | None
) -> optax.GradientTransformationExtraArgs:
    """Convert an optimizer of bitsandbytes; blocks are those of PyTorch's tensors if `names` has their layouts."""
    kind, options, kept = bitsandbytes.live_options(optimizer)
    groups, live = optimizer.param_groups, None if scheduler is None else _live(scheduler)
    if names is None:
        if len(groups) > 1 or kept:
            what = f"{len(groups)} parameter groups" if len(groups) > 1 else "parameters with 32 bits"
            raise UserError(f"{kind} has {what}: pass names")
        expression = optimizer_expression(kind, groups, live)
        return build_expression(expression, OPTIMIZERS, options)
    named = _names_of_groups(groups, model)
    path_of, float32, shapes = _path_of(names), [], {}
    for group, own in zip(groups, named, strict=True):
        for p, name in zip(group["params"], own, strict=True):
            path = path_of(name)
            if path is not None and id(p) in kept:
                float32.append(path)
            elif path is not None and p.numel() >= options["min_8bit_size"]:
                shapes[path] = tuple(p.shape)
    orders = bitsandbytes.block_orders(names, shapes) if isinstance(names, NameTable) else {}
    options |= {"float32": float32, "block_order": orders}
    return build_expression(optimizer_expression(kind, groups, live, names, named), OPTIMIZERS, options)


def optimizer_expression(
    kind: str,
    param_groups: Groups,
    scheduler: Scheduler | None,
    names: Names | None = None,
    group_names: Sequence[Sequence[str]] = (),
    *,
    shift: int = 0,
) -> Expression:
    """Convert an optimizer to an expression of our functions.

    Args:
      kind: Class of the optimizer.
      param_groups: Its groups.
      scheduler: Its scheduler, or None.
      names: Mapping from PyTorch's names to JAX paths; None for one group of all parameters.
      group_names: Names of the parameters of every group, with `names`.
      shift: Number of steps of the scheduler minus the number of updates.

    Raises:
      UserError: A setting is not supported; it is named.
    """
    if scheduler is None and any("initial_lr" in group for group in param_groups):
        raise UserError(f"{kind} has a scheduler: pass it too, for the initial learning rate")
    if names is None:
        return _call(kind, param_groups, scheduler, 0, paths=[], names=None, shift=shift)
    group_of = _group_of_path(names, group_names)
    members = [[path for path, group in group_of.items() if group == i] for i in range(len(param_groups))]
    return {
        " ".join(paths): _call(kind, param_groups, scheduler, i, paths=paths, names=names, shift=shift)
        for i, paths in enumerate(members)
    }


def _call(
    kind: str,
    param_groups: Groups,
    scheduler: Scheduler | None,
    i: int,
    *,
    paths: list[str],
    names: Names | None,
    shift: int,
) -> Call:
    group = param_groups[i]
    eight_bit = kind in bitsandbytes.CLASSES
    used = bitsandbytes.settings(kind, group) if eight_bit else group
    options = {k: _number(v) for k, v in used.items() if k not in _MEANINGLESS | _SCHEDULED}
    function = bitsandbytes.CLASSES[kind] if eight_bit else kind.lower()
    if function in ("adam", "adamw"):
        function = "adamw" if options.pop("decoupled_weight_decay", function == "adamw") else "adam"
    if "betas" in options:
        options["b1"], options["b2"] = map(_number, options.pop("betas"))
    for option in options:
        if option not in inspect.signature(OPTIMIZERS[function]).parameters:
            raise UserError(f"{kind}'s {option}={options[option]!r} in group {i} is not supported: leave it out")
    if "mask" in inspect.signature(OPTIMIZERS[function]).parameters:
        options["mask"] = None  # every parameter of the group decays
    if kind in ("Muon", "Adafactor") and isinstance(names, NameTable):
        options |= _layout(kind, paths, names)
    if scheduler is not None and scheduler.values.get("cycle_momentum"):
        options["b1" if "b1" in options else "momentum"] = _shift(_momentum(scheduler, group, i), shift)
    rate = _number(group["lr"]) if scheduler is None else _shift(_rate(scheduler, group, i), shift)
    return Call(function, {"learning_rate": rate, **options})


def _shift(schedule: Call, by: int) -> Call:
    # Plateaus do not count updates.
    return Call("shifted", {"schedule": schedule, "by": by}) if by and "plateau" not in schedule.function else schedule


def _rate(scheduler: Scheduler, group: Mapping[str, Any], i: int) -> Call:
    """Return the schedule of the learning rate of group `i`."""
    kind, s = scheduler
    if kind == "ReduceLROnPlateau":
        own = {k: s[k] for k in ("mode", "factor", "patience", "threshold", "threshold_mode", "cooldown", "eps")}
        return Call("reduce_lr_on_plateau", {"learning_rate": _number(group["lr"]), **own, "min_lr": s["min_lrs"][i]})
    if kind in ("SequentialLR", "ChainedScheduler"):
        for part in scheduler.parts:
            if part.values.get("cycle_momentum"):
                raise UserError(f"cycle_momentum of a {part.kind} in a {kind} is not supported: set it to False")
        parts = [_rate(part, group, i) for part in scheduler.parts]
        if kind == "SequentialLR":
            return Call("sequential", {"schedules": parts, "milestones": list(s["_milestones"])})
        return Call("chained", {"schedules": parts})
    if kind == "OneCycleLR":
        return _one_cycle(s, group, "lr")
    lr = _number(s["base_lrs"][i]) if "base_lrs" in s else None
    makers: dict[str, Callable[[], dict[str, Any]]] = {
        "StepLR": lambda: {"step_size": s["step_size"], "gamma": s["gamma"]},
        "MultiStepLR": lambda: {"milestones": sorted(_expand_counts(s["milestones"])), "gamma": s["gamma"]},
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
        raise UserError(f"{kind} is not supported: use a scheduler of torch.optim.lr_scheduler")
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


def _expand_counts(counts: Mapping[int, int]) -> list[int]:
    return [milestone for milestone, n in counts.items() for _ in range(n)]


def _traceable(fn: Any, what: str) -> Callable[[Any], Any]:
    if not callable(fn):
        raise UserError(f"the state of a scheduler does not contain its {what}: set --schedule")
    try:
        jax.eval_shape(lambda t: jnp.asarray(fn(t)), jax.ShapeDtypeStruct((), jnp.result_type(float)))
    except Exception as error:
        raise UserError(f"{what} must be a JAX function of an array: use jax.numpy, and jnp.where for if") from error
    return fn


def _names_of_groups(param_groups: Groups, model: Any) -> list[list[str]]:
    by_id = {id(p): name for name, p in model.named_parameters()} if model is not None else {}
    found = []
    for i, group in enumerate(param_groups):
        found.append([by_id.get(id(p)) or _own_name(group, i, j) for j, p in enumerate(group["params"])])
    return found


def _own_name(group: Mapping[str, Any], i: int, j: int) -> str:
    if "param_names" not in group:
        raise UserError(f"parameter {j} of group {i} has no name: pass model, its module")
    return str(group["param_names"][j])


def _group_of_path(names: Names, group_names: Sequence[Sequence[str]]) -> dict[str, int]:
    path_of, found = _path_of(names), dict[str, int]()
    for i, group in enumerate(group_names):
        for name in group:
            path = path_of(name)
            if path is None:
                raise UserError(f"{name} of group {i} is not in names: add it")
            if found.setdefault(path, i) != i:
                raise UserError(f"{path} stacks parameters of groups {found[path]} and {i}: use one group per leaf")
    return found


def _path_of(names: Names) -> Callable[[str], str | None]:
    if isinstance(names, NameTable):

        def path_of(name: str) -> str | None:
            name = names.tied.get(name, name)
            return next((path for path, param in names.params.items() if param.has(name)), None)

        return path_of
    return names.get if isinstance(names, Mapping) else names


def _layout(kind: str, paths: list[str], names: NameTable) -> dict[str, Any]:
    """Validate that parameters have PyTorch's layout, transposed at most, as Muon and Adafactor need it."""
    axes = set()
    for path in paths:
        param = names.params[path]
        if param.is_stack or param.layout not in (AS_IS, LINEAR, OUT_IN):
            raise UserError(
                f"{path} does not have the layout of {param.name}, which {kind} needs: use another group for it"
            )
        axes.add(-1 if param.layout is LINEAR else 0)
    if kind == "Adafactor":
        return {}
    if len(axes) > 1:
        raise UserError(f"{', '.join(paths)}: Muon cannot have transposed and other parameters in one group: divide it")
    return {"out_axis": axes.pop()} if axes else {}


def _live(scheduler: Any) -> Scheduler:
    kind = type(scheduler).__name__
    if not type(scheduler).__module__.startswith("torch.optim"):
        raise UserError(f"{kind} is not supported: use a scheduler of torch.optim.lr_scheduler")
    return Scheduler(kind, vars(scheduler))


def _number(value: Any) -> Any:
    """Return a number, or the element of a tensor."""
    return value.item() if hasattr(value, "item") else value
