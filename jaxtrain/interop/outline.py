"""What a PyTorch checkpoint holds besides tensors, so that a run can be written as PyTorch reads it."""

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
from jaxtrain.interop.torch_optimizer import KINDS
from jaxtrain.optim import OPTIMIZERS, SCHEDULES, Call, Expression, build_expression


@dataclass(frozen=True)
class Outline:
    """All that is in a checkpoint besides tensors, so that it can be written as it was read.

    `model_names`, in order; `param_groups`, and the names of the parameters in each; `scheduler` and `scaler`, their
    `state_dict()`s; `count`, the updates made; `scalar_dtype`, that of the optimizer's "step".
    """

    model_names: list[str]
    param_groups: list[dict[str, Any]]
    group_names: list[list[str]]
    scheduler: Mapping[str, Any] | None
    scaler: Mapping[str, Any] | None
    count: int
    epoch: int | None = None
    scalar_dtype: str = "float32"


def write_outline(path: Path, outline: Outline) -> None:
    """Keep it in a file. Raises `UserError` where torch is not installed."""
    save(path, asdict(outline))


def read_outline(path: Path) -> Outline:
    """What `write_outline` wrote. Raises `UserError` where that is not what the file holds."""
    try:
        outline = Outline(**load(path))
    except TypeError as error:
        raise UserError(f"{path} is not what was kept of a PyTorch checkpoint ({error}): restore it") from error
    if wrong := type_errors(outline):
        raise UserError(f"{path} is not what was kept of a PyTorch checkpoint ({wrong[0]}): restore it")
    return outline


def new_outline(
    expression: Expression,
    names: NameTable,
    params_like: Any,
    *,
    buffer_names: Sequence[str] = (),
    count: int,
    lr: float,
    scaler: Mapping[str, Any],
    decays: Callable[[str], bool],
) -> Outline:
    """Of a run that began here, as it stands after `count` updates.

    The groups are those of PyTorch's optimizer of the same name. Where `expression` leaves the decay to `decays`, of
    paths, they are two: what decays, then what does not. The schedule becomes a `LambdaLR` of `lr`, whatever it is;
    its state is a position, which other schedulers of PyTorch's take too.
    """
    torch = installed_torch("its optimizer is made by it")
    members = _members(expression, names, params_like, decays)
    groups = [
        {**_arguments(call, count), "lr": lr if _scheduled(call) else call.arguments["learning_rate"], **own}
        for call, own, _ in members
    ]
    group_names = [named for _, _, named in members]
    first = members[0][0]
    kind = next(kind for kind in KINDS if kind.lower() == first.function)
    matrices = [[torch.zeros(1, 1) for _ in named] for named in group_names]
    optimizer = getattr(torch.optim, kind)([{"params": p, **group} for p, group in zip(matrices, groups, strict=True)])
    scheduler = None
    if any(_scheduled(call) for call, _, _ in members):
        factors = [partial(_factor, call, lr) for call, _, _ in members]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the optimizer's steps were taken elsewhere
            stepped = torch.optim.lr_scheduler.LambdaLR(optimizer, factors)
            if count:
                stepped.last_epoch, stepped._step_count = count - 1, count
                stepped.step()
        scheduler = {**stepped.state_dict(), "lr_lambdas": [None] * len(members)}
    order = names.torch_order(params_like)
    aliases = [alias for alias, name in names.tied.items() if name in order]
    tensors = [*order, *aliases, *buffer_names]
    return Outline(tensors, optimizer.state_dict()["param_groups"], group_names, scheduler, scaler, count)


def _members(
    expression: Expression, names: NameTable, params_like: Any, decays: Callable[[str], bool]
) -> list[tuple[Call, dict[str, Any], list[str]]]:
    """(call, options of its own, names of its parameters) of each group."""
    path_of = {name: path for path in names.params for name in names.only([path]).torch_order(params_like)}
    order = names.torch_order(params_like)

    def named(rule: Callable[[str], bool]) -> list[str]:
        return [name for name in order if rule(path_of[name])]

    if not isinstance(expression, Call):
        return [(call, {}, named(set(paths.split()).__contains__)) for paths, call in expression.items()]
    takes = inspect.signature(OPTIMIZERS[expression.function]).parameters
    if "mask" not in takes or "mask" in expression.arguments or not expression.arguments.get("weight_decay", 0):
        return [(expression, {}, order)]
    return [
        (expression, {}, named(decays)),
        (expression, {"weight_decay": 0.0}, named(lambda path: not decays(path))),
    ]


def _arguments(call: Call, count: int) -> dict[str, Any]:
    """PyTorch's, all of them; a momentum that has a schedule as it stands."""
    takes = inspect.signature(OPTIMIZERS[call.function]).parameters
    given = {name: parameter.default for name, parameter in takes.items()} | dict(call.arguments)
    plain = {name: _double(value, count) if isinstance(value, Call) else value for name, value in given.items()}
    for ours in ("learning_rate", "mask", "moments_dtype", "out_axis", "dtype"):
        plain.pop(ours, None)
    return {"betas": (plain.pop("b1"), plain.pop("b2")), **plain} if "b1" in plain else plain


def _factor(call: Call, lr: float, position: int) -> float:
    """A `lr_lambda` of PyTorch's."""
    return _double(call.arguments["learning_rate"], position) / lr


def _scheduled(call: Call) -> bool:
    return isinstance(call.arguments["learning_rate"], Call)


def _double(schedule: Call, count: int) -> float:
    """Its value for the update numbered `count`."""
    with jax.enable_x64(True):
        return float(build_expression(schedule, SCHEDULES, {})(jnp.array(count, np.int32)))
