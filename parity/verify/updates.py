"""The updates of a training in float64, one by one, and the first tensor over its bar."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from parity.bars import FIRST_BAR, LAST_BAR, NEGLIGIBLE
from parity.compare.verdict import relative
from parity.record import Snapshot, Step, Tensors, norm
from parity.sides import torch_side
from parity.verify.difference import Difference
from parity.verify.port_program import PortProgram
from parity.verify.source_case import SourceCase


class Update(NamedTuple):
    """The results of an update: its loss, the gradients that the optimizer received, and the tensors after it."""

    loss: float
    grads: Tensors
    after: Snapshot


def torch_updates(case: SourceCase, steps: int, seed: int) -> list[Update]:
    """Return the updates of the source."""
    updates: list[Update] = []

    def watch(step: Step) -> None:
        updates.append(Update(step.loss, step.fed, step.after))

    torch_side.run(case, "fp64", steps=steps, seed=seed, watch=watch)
    return updates


def port_updates(case: SourceCase, program: PortProgram, steps: int, seed: int) -> list[Update]:
    """Return the updates of a port; only the first has gradients."""
    updates: list[Update] = []

    def watch(loss: float, after: Snapshot) -> None:
        updates.append(Update(loss, {}, after))

    record = program.run(case, {}, steps=steps, seed=seed, watch=watch)
    return [updates[0]._replace(grads=record.grads), *updates[1:]]


def over_bars(ours: Update, theirs: Update, number: int, has_gradients: bool) -> Iterator[Difference | None]:
    """Yield a difference for each group of tensors with one over its bar, None for another, in the order of a run.

    Args:
      ours: An update of the port.
      theirs: The same of the source.
      number: Its number, counted from 1.
      has_gradients: Whether gradients are compared, in the first update.
    """
    bar, whole = FIRST_BAR if number == 1 else LAST_BAR, norm(theirs.grads.values())
    noise = {name for name, x in theirs.grads.items() if 0 < norm([x]) <= NEGLIGIBLE * whole}
    yield _over(f"the loss of update {number}", number, {"loss": _apart(ours.loss, theirs.loss)}, bar)
    if has_gradients and number == 1:
        yield _over("the gradients of update 1", number, relative(ours.grads, theirs.grads), bar)
    distances = relative(ours.after.params, theirs.after.params, noise=noise)
    if theirs.after.buffers:
        distances |= relative(ours.after.buffers, theirs.after.buffers)
    yield _over(f"the tensors after update {number}", number, distances, bar)


def _apart(our: float, their: float) -> float:
    if our == their:
        return 0.0
    return abs(our - their) / abs(their) if math.isfinite(our) and their else math.inf


def _over(what: str, number: int, distances: dict[str, float], bar: float) -> Difference | None:
    over = {name: x for name, x in sorted(distances.items(), key=lambda item: -item[1]) if not x <= bar}
    if not over:
        return None
    name, x = next(iter(over.items()))
    line = f"{what}: {name} is {x:.1e} apart, over {bar:.0e}"
    return Difference("numbers", line, name, tuple(over), number, x, bar)
