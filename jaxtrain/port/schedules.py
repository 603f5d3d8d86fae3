"""How the settings of an optimizer change: by a scheduler of PyTorch's, or learning rates that the script gives."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from jaxtrain.port.recording import Recording, Update
from jaxtrain.port.refused import refused_at


def scheduler_of(recording: Recording, optimizer: torch.optim.Optimizer, loader: int | None) -> tuple[Any, bool]:
    """Return the scheduler, None without one, and whether it steps at the end of a pass."""
    updates = recording.updates
    steps = [step for update in (*updates, recording.rest) for step in update.schedulers]
    stepped, made = {id(step[0]): step for step in steps}, [*recording.schedulers.values()]
    if len(stepped) > 1:
        raise refused_at("two schedulers step", [*stepped.values()][1][1], "combine them by ChainedScheduler")
    if not stepped:
        check_settings(updates)
        if made:
            raise refused_at(f"no scheduler stepped in {len(updates)} updates", made[0], "give --updates more")
        return None, False
    ((scheduler, line),) = stepped.values()
    if scheduler.optimizer is not optimizer:
        raise refused_at(f"{type(scheduler).__name__} schedules another optimizer", line, "schedule the one that steps")
    if _has_function(scheduler):
        raise refused_at(f"{type(scheduler).__name__} has a function of the script's", line, "use another scheduler")
    later = [*updates[1:], *([recording.rest] if recording.is_over else [])]
    counts = [len(update.schedulers) for update in later]
    if all(count == 1 for count in counts):
        return scheduler, False
    if loader is not None and counts == [update.passes.count(loader) for update in later]:
        return scheduler, True
    raise refused_at(
        "the scheduler steps neither after every update nor after every epoch", line, "step it at one of these"
    )


def check_settings(updates: Sequence[Update], *, but_for_rates: bool = False) -> None:
    """Refuse settings that change from update to update."""

    def of(update: Update) -> list[dict[str, Any]]:
        return [{**group, "lr": 0} if but_for_rates else group for group in update.settings]

    changed = next((u for u in updates if u.settings and of(u) != of(updates[0])), None)
    if changed is not None:
        raise refused_at(
            f"settings of the optimizer change without a scheduler{_difference(of(updates[0]), of(changed))}",
            changed.line,
            "use a scheduler of torch.optim.lr_scheduler",
        )


def _has_function(scheduler: Any) -> bool:
    """Return whether a scheduler, or one that it contains, computes rates by a function in Python."""
    return hasattr(scheduler, "lr_lambdas") or any(map(_has_function, getattr(scheduler, "_schedulers", ())))


def rates_of(updates: Sequence[Update]) -> tuple[str, ...]:
    """Return names for the rates of groups; none if these are constant, or if other settings change."""
    found = [update.settings for update in updates if update.settings]
    if any(
        {**group, "lr": 0} != {**first, "lr": 0}
        for groups in found
        for group, first in zip(groups, found[0], strict=True)
    ):
        return ()
    by_group = [[groups[i]["lr"] for groups in found] for i in range(len(found[0]))]
    if all(len({*rates}) == 1 for rates in by_group):
        return ()
    is_one = all(rates == by_group[0] for rates in by_group)
    return tuple("rate" if is_one else f"rate_{i}" for i in range(len(by_group)))


def _difference(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> str:
    pairs = zip(before, after, strict=False)
    found = [(key, x[key], y.get(key)) for x, y in pairs for key in x if x[key] != y.get(key)]
    return f" ({found[0][0]} {found[0][1]}, then {found[0][2]})" if found else ""
