"""Updates of several optimizers in turn: each turn of a cycle has a program and an optimizer of its own.

The losses that an update calls `backward` on are added. What a turn reads of the updates before in its cycle, as the
output of a generator, its program computes again; the statistics of modules do not change then.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from jaxtrain.port.calls import ALIAS, Ambient, Call, Interval, Origin, Value, mapped
from jaxtrain.port.recording import Backward, Recording, Update
from jaxtrain.port.refused import refused_at

LONGEST = 16
"""Updates of the longest cycle that is looked for."""


def cycle_of(updates: Sequence[Update]) -> int:
    """Return the number of updates after which the optimizers repeat.

    Raises:
      UserError: They do not.
    """
    order = [id(update.optimizer) for update in updates]
    for count in range(1, min(LONGEST, len(order) // 2) + 1):
        if all(order[i] == order[i % count] for i in range(len(order))):
            return count
    other = next(update for update in updates if id(update.optimizer) != order[0])
    raise refused_at(
        f"the optimizers take no turns that repeat in {len(updates)} updates",
        other.line,
        "give --updates a larger number",
    )


def of_turn(recording: Recording, turn: int, count: int) -> Recording:
    """Return the updates of a turn, each with one program.

    Args:
      recording: The recording.
      turn: Number of the turn.
      count: Number of turns of a cycle.
    """
    updates = recording.updates
    found = []
    for i in range(turn, len(updates), count):
        before = [b for update in updates[i - turn : i] for b in update.backwards]
        found.append(replace(updates[i], backwards=[joined(before, updates[i].backwards)]))
    return replace(recording, updates=found)


def joined(before: Sequence[Backward], own: Sequence[Backward]) -> Backward:
    """Return the calls of `backward` of an update as one of the sum of their losses.

    Args:
      before: Those of the updates before in its cycle.
      own: Those of the update.
    """
    if not before and len(own) == 1:
        return own[0]
    last = own[-1]
    before, own = _with_versions(before, own)
    calls = [call._replace(is_repeated=True) for b in before for call in b.interval.calls]
    calls += [call for b in own for call in b.interval.calls]
    memory: dict[Value, int] = {}
    given: dict[Value, torch.Tensor] = {}
    identities: dict[Value, int] = {}
    for backward in (*before, *own):
        memory |= backward.interval.memory
        given |= backward.interval.given
        identities |= backward.interval.identities
    total, value = own[0].interval.loss, own[0].loss
    for i, backward in enumerate(own[1:]):
        made = Value(last.interval.loss.number * _LARGER + i)
        operands = (total, backward.interval.loss)
        calls.append(_sum(operands, made, last))
        memory[made] = -made.number
        total, value = made, value + backward.loss
    made_here = {x for call in calls for _, x in call.results}
    interval = Interval(
        calls=tuple(calls),
        loss=total,
        memory=memory,
        given=given,
        identities=identities,
        carried=frozenset(x for b in (*before, *own) for x in b.interval.carried if x not in made_here),
        parts=tuple(b.interval.loss for b in own) if len(own) > 1 else (),
    )
    names: Mapping[Value, str] = {key: name for b in (*before, *own) for key, name in b.names.items()}
    return replace(last, interval=interval, loss=value, names=names, leaves={})


def _with_versions(
    before: Sequence[Backward], own: Sequence[Backward]
) -> tuple[Sequence[Backward], Sequence[Backward]]:
    """Return programs that read a tensor under another number where it has been changed since the one before."""
    given: dict[Value, torch.Tensor] = {}
    count, found = itertools.count(3 * ALIAS), []
    for backward in (*before, *own):
        interval = backward.interval
        new = {x: Value(-next(count)) for x, t in interval.given.items() if x in given and not _same(given[x], t)}

        def to(x: Value, new: Mapping[Value, Value] = new) -> Value:
            return new.get(x, x)

        calls = tuple(c._replace(args=mapped(c.args, to), kwargs=mapped(c.kwargs, to)) for c in interval.calls)
        of_interval = interval._replace(
            calls=calls,
            memory={**interval.memory, **{alias: -alias.number for alias in new.values()}},
            given={to(x): tensor for x, tensor in interval.given.items()},
        )
        given |= of_interval.given
        names = {**backward.names, **{alias: backward.names[x] for x, alias in new.items() if x in backward.names}}
        found.append(replace(backward, interval=of_interval, names=names))
    return found[: len(before)], found[len(before) :]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a, b)))


_LARGER = 10**6
"""Factor of the numbers of tensors that are no tensors of the script."""


def _sum(operands: tuple[Value, Value], made: Value, backward: Backward) -> Call:
    return Call(
        function=torch.add,
        args=operands,
        kwargs={},
        results=(((), made),),
        writes=(),
        ambient=Ambient(grad=True, autocast=None),
        line=backward.line,
        random=None,
        origin=Origin.MODEL,
        evaluated=frozenset(),
    )
