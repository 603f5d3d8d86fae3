"""State of PyTorch's scheduler and parameter groups after more updates, by stepping PyTorch's own scheduler."""

import copy
import warnings
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import jax

from jaxtrain.interop import optimizer_state
from jaxtrain.interop.metadata import CheckpointMetadata
from jaxtrain.interop.torch_file import installed_torch
from jaxtrain.interop.torch_optimizer import scheduler_from_state
from jaxtrain.optim import Call, Expression, PlateauState


def advance_schedule(
    metadata: CheckpointMetadata, expression: Expression, opt_state: Any, count: int
) -> tuple[list[dict[str, Any]], Mapping[str, Any] | None]:
    """Return (param_groups, state of the scheduler) after `count` updates; unchanged without new updates."""
    more, saved = count - metadata.count, metadata.scheduler
    groups = copy.deepcopy(metadata.param_groups)
    if not more:
        return groups, saved
    if saved is None:
        for i, group in enumerate(groups):
            if isinstance(_call(expression, i).arguments["learning_rate"], Call):
                group["lr"] = rate_of_group(expression, i, count)
        return groups, None
    if scheduler_from_state(saved).kind == "ReduceLROnPlateau":
        return _plateaus(groups, saved, expression, opt_state, more)
    torch = installed_torch("steps the scheduler")
    # The only attributes of an optimizer that a scheduler uses.
    optimizer = SimpleNamespace(param_groups=groups, step=None)

    def create_scheduler(state: Mapping[str, Any]) -> Any:
        """Create the scheduler of a state; its functions are replaced by our rates."""
        kind = getattr(torch.optim.lr_scheduler, scheduler_from_state(state).kind)
        scheduler = kind.__new__(kind)
        scheduler.optimizer = optimizer
        if "_schedulers" in state:
            scheduler._schedulers = [create_scheduler(part) for part in state["_schedulers"]]
        if "lr_lambdas" in state:
            scheduler.lr_lambdas = [_Factor(expression, i, state, metadata.count) for i in range(len(groups))]
        if "_scale_fn_custom" in state:
            scheduler._scale_fn_custom = None
        scheduler.load_state_dict(copy.deepcopy(dict(state)))
        return scheduler

    scheduler = create_scheduler(saved)
    if "lr_lambdas" in saved:
        # Its rates are not recursive, so that the last step is enough.
        scheduler.last_epoch, scheduler._step_count = (saved[k] + more - 1 for k in ("last_epoch", "_step_count"))
        more = 1
    with warnings.catch_warnings():
        # The optimizer was not stepped.
        warnings.simplefilter("ignore")
        for _ in range(more):
            scheduler.step()
    state = scheduler.state_dict()
    return groups, {**state, **({"lr_lambdas": saved["lr_lambdas"]} if "lr_lambdas" in saved else {})}


class _Factor:
    """An `lr_lambda` of PyTorch: our learning rate divided by the base one."""

    def __init__(self, expression: Expression, group: int, state: Mapping[str, Any], count: int) -> None:
        self.expression, self.group, self.base = expression, group, float(state["base_lrs"][group])
        self.offset = state["last_epoch"] - count

    def __call__(self, position: int) -> float:
        return rate_of_group(self.expression, self.group, position - self.offset) / self.base if self.base else 0.0


def rate_of_group(expression: Expression, group: int, count: int) -> float:
    """Return the learning rate of update `count`, in float64."""
    with jax.enable_x64(True):
        return float(optimizer_state.rate(_call(expression, group), count))


def _call(expression: Expression, group: int) -> Call:
    return expression if isinstance(expression, Call) else list(expression.values())[group]


def _plateaus(
    groups: list[dict[str, Any]], saved: Mapping[str, Any], expression: Expression, opt_state: Any, more: int
) -> tuple[list[dict[str, Any]], Mapping[str, Any]]:
    found: dict[int, PlateauState] = {}

    def collect(state: Any, call: Call, group: int) -> Any:
        del call
        if isinstance(state, PlateauState):
            found[group] = state
        return state

    optimizer_state.map_states(opt_state, expression, collect)
    for i, group in enumerate(groups):
        group["lr"] = float(found[i].next_rate)
    own = {
        "best": float(found[0].best),
        "num_bad_epochs": int(found[0].bad),
        "cooldown_counter": int(found[0].cooldown),
    }
    rates = [group["lr"] for group in groups]
    return groups, {**saved, **own, "last_epoch": saved["last_epoch"] + more, "_last_lr": rates}
