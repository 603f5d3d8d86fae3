"""Contents of a PyTorch checkpoint besides tensors, from which a run is written as PyTorch reads it."""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.fields import type_errors
from jaxtrain.interop.names import NameTable
from jaxtrain.interop.torch_file import installed_torch, load, save
from jaxtrain.interop.torch_optimizer import OPTIMIZER_CLASSES
from jaxtrain.optim import OPTIMIZERS, SCHEDULES, Call, Expression, build_expression


@dataclass(frozen=True)
class CheckpointMetadata:
    """Contents of a checkpoint besides tensors.

    Attributes:
      model_names: Names of the model's tensors, in order.
      param_groups: `param_groups` of the optimizer.
      group_names: Names of the parameters of every group.
      scheduler: `state_dict()` of the scheduler, or None.
      scaler: `state_dict()` of the GradScaler, or None.
      count: Number of updates.
      epoch: Epoch that the script counted, or None.
      scalar_dtype: Dtype of "step" and of the other numbers in the state of the optimizer.
    """

    model_names: list[str]
    param_groups: list[dict[str, Any]]
    group_names: list[list[str]]
    scheduler: Mapping[str, Any] | None
    scaler: Mapping[str, Any] | None
    count: int
    epoch: int | None = None
    scalar_dtype: str = "float32"


def write_metadata(path: Path, metadata: CheckpointMetadata) -> None:
    """Write metadata to a file. Raises `UserError` if torch is not installed."""
    save(path, asdict(metadata))


def read_metadata(path: Path) -> CheckpointMetadata:
    """Read a file of `write_metadata`. Raises `UserError` if it is invalid."""
    try:
        metadata = CheckpointMetadata(**load(path))
    except TypeError as error:
        raise UserError(f"{path} is not the metadata of a PyTorch checkpoint ({error}): restore it") from error
    if wrong := type_errors(metadata):
        raise UserError(f"{path} is not the metadata of a PyTorch checkpoint ({wrong[0]}): restore it")
    return metadata


def new_metadata(
    expression: Expression,
    names: NameTable,
    params_like: Any,
    *,
    buffer_names: Sequence[str] = (),
    count: int,
    lr: float,
    scaler: Mapping[str, Any],
    decays: Callable[[str], bool],
) -> CheckpointMetadata:
    """Create the metadata of a run that did not start from a PyTorch checkpoint.

    Groups are those of PyTorch's optimizer of the same name: with weight decay the parameters that decay, and those
    that do not. The schedule becomes a `LambdaLR`, whose state is a position, which other schedulers of PyTorch load
    too.

    Args:
      expression: Optimizer.
      names: Name table of the parameters.
      params_like: Parameters, of which only the shapes are used.
      buffer_names: PyTorch's names of the running statistics.
      count: Number of updates.
      lr: Base learning rate.
      scaler: `state_dict()` of the GradScaler.
      decays: Predicate on paths: whether a parameter decays, where `expression` does not state it.
    """
    torch = installed_torch("creates the optimizer")
    members = _members(expression, names, params_like, decays)
    groups = [
        {**_arguments(call, count), "lr": lr if _scheduled(call) else call.arguments["learning_rate"], **own}
        for call, own, _ in members
    ]
    group_names = [named for _, _, named in members]
    first = members[0][0]
    kind = next((kind for kind in OPTIMIZER_CLASSES if kind.lower() == first.function), None)
    if kind is None:
        raise UserError(
            f"the moments of {first.function} are in 8 bits and in blocks of JAX's arrays, which PyTorch cannot read "
            "unless the run started from bitsandbytes' checkpoint: export the weights, as --format huggingface"
        )
    matrices = [[torch.zeros(1, 1) for _ in named] for named in group_names]
    optimizer = getattr(torch.optim, kind)([{"params": p, **group} for p, group in zip(matrices, groups, strict=True)])
    scheduler = None
    if any(_scheduled(call) for call, _, _ in members):
        factors = [partial(_factor, call, lr) for call, _, _ in members]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the optimizer itself was not stepped
            stepped = torch.optim.lr_scheduler.LambdaLR(optimizer, factors)
            if count:
                stepped.last_epoch, stepped._step_count = count - 1, count
                stepped.step()
        scheduler = {**stepped.state_dict(), "lr_lambdas": [None] * len(members)}
    order = names.torch_order(params_like)
    aliases = [alias for alias, name in names.tied.items() if name in order]
    tensors = [*order, *aliases, *buffer_names]
    return CheckpointMetadata(tensors, optimizer.state_dict()["param_groups"], group_names, scheduler, scaler, count)


def _members(
    expression: Expression, names: NameTable, params_like: Any, decays: Callable[[str], bool]
) -> list[tuple[Call, dict[str, Any], list[str]]]:
    """Return (call, options, names of the parameters) of every group."""
    path_of = {name: path for path in names.params for name in names.only([path]).torch_order(params_like)}
    order = names.torch_order(params_like)

    def named(rule: Callable[[str], bool]) -> list[str]:
        return [name for name in order if rule(path_of[name])]

    if not isinstance(expression, Call):
        return [(call, {}, named(set(paths.split()).__contains__)) for paths, call in expression.items()]
    takes = inspect.signature(OPTIMIZERS[expression.function]).parameters
    if "mask" not in takes or "mask" in expression.arguments or not expression.arguments.get("weight_decay", 0):
        return [(expression, {}, order)]
    groups: list[tuple[Call, dict[str, Any], list[str]]] = [
        (expression, {}, named(decays)),
        (expression, {"weight_decay": 0.0}, named(lambda path: not decays(path))),
    ]
    return [group for group in groups if group[2]]


def _arguments(call: Call, count: int) -> dict[str, Any]:
    """Return all options of PyTorch's optimizer; a scheduled momentum has its current value."""
    takes = inspect.signature(OPTIMIZERS[call.function]).parameters
    given = {name: parameter.default for name, parameter in takes.items()} | dict(call.arguments)
    plain = {name: _double(value, count) if isinstance(value, Call) else value for name, value in given.items()}
    for ours in ("learning_rate", "mask", "moments_dtype", "out_axis", "dtype"):
        plain.pop(ours, None)
    return {"betas": (plain.pop("b1"), plain.pop("b2")), **plain} if "b1" in plain else plain


def _factor(call: Call, lr: float, position: int) -> float:
    """Compute an `lr_lambda` of PyTorch."""
    return _double(call.arguments["learning_rate"], position) / lr


def _scheduled(call: Call) -> bool:
    return isinstance(call.arguments["learning_rate"], Call)


def _double(schedule: Call, count: int) -> float:
    """Return the value for update `count`, in float64."""
    with jax.enable_x64(True):
        return float(build_expression(schedule, SCHEDULES, {})(jnp.array(count, np.int32)))
