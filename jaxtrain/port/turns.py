"""Updates of several optimizers in turn: the updates of each optimizer are a program of their own.

The losses that an update calls `backward` on are added. What it reads of the updates of others before it, as the output
of a generator, is kept for it if it reads values alone. If gradients flow into it, its program computes it again; the
statistics of modules do not change then.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from jaxtrain.port.calls import ALIAS, Ambient, Call, Interval, Origin, Value, mapped
from jaxtrain.port.joint import Joint
from jaxtrain.port.recording import Backward, Recording, Update

MOST = 64
"""Calls of `backward` of other optimizers that a turn may read from."""


class Turns:
    """Joins the calls of `backward` of updates, one update after another."""

    def __init__(self) -> None:
        self._all: list[Backward] = []
        self._since: dict[int, list[Backward]] = {}

    def joined(self, turn: int, own: Sequence[Backward]) -> Backward:
        """Return the program of an update; it may read what was computed since the last one of its turn.

        Args:
          turn: Number of its optimizer.
          own: Its calls of `backward`.
        """
        before = self._since.get(turn, self._all)
        found = joined(before[-MOST:], own)
        for other in self._since:
            self._since[other] = [*self._since[other], *own][-MOST:]
        self._all = [*self._all, *own][-MOST:]
        self._since[turn] = []
        return found


def of_turns(recording: Recording, optimizers: Sequence[torch.optim.Optimizer | Joint]) -> list[Recording]:
    """Return the updates of each optimizer, each with one program.

    Args:
      recording: The recording.
      optimizers: The optimizers, in the order in which they were made.
    """
    numbers = {id(optimizer): i for i, optimizer in enumerate(optimizers)}
    turns, found = Turns(), [list[Update]() for _ in optimizers]
    for update in recording.updates:
        turn = numbers[id(update.optimizer)]
        found[turn].append(replace(update, backwards=[turns.joined(turn, update.backwards)]))
    return [replace(recording, updates=updates) for updates in found]


def joined(before: Sequence[Backward], own: Sequence[Backward]) -> Backward:
    """Return the calls of `backward` of an update as one of the sum of their losses.

    Args:
      before: Those of updates of other optimizers before it.
      own: Those of the update.
    """
    if _are_kept(before, own):
        before = ()
    if not before and len(own) == 1:
        return own[0]
    last = own[-1]
    before, own = _with_versions(before, own)
    calls = [call._replace(is_repeated=True) for b in before for call in b.interval.calls]
    calls += [call for b in own for call in b.interval.calls]
    memory: dict[Value, int] = {}
    given: dict[Value, torch.Tensor] = {}
    identities: dict[Value, int] = {}
    sizes: dict[Value, tuple[int, ...]] = {}
    for backward in (*before, *own):
        memory |= _memory(backward.interval.memory, memory)
        given |= backward.interval.given
        identities |= backward.interval.identities
        sizes |= backward.interval.sizes
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
        sizes=sizes,
        carried=frozenset(x for b in (*before, *own) for x in b.interval.carried if x not in made_here),
        parts=tuple(b.interval.loss for b in own) if len(own) > 1 else (),
        leaves=frozenset(x for b in (*before, *own) for x in b.interval.leaves),
    )
    names: Mapping[Value, str] = {key: name for b in (*before, *own) for key, name in b.names.items()}
    return replace(last, interval=interval, loss=value, names=names, leaves={})


def _are_kept(before: Sequence[Backward], own: Sequence[Backward]) -> bool:
    """Return whether an update reads nothing of those before it but values without their gradient, which are kept."""
    made = {x for b in before for call in b.interval.calls if call.origin & Origin.MODEL for _, x in call.results}
    return all(_reads_values(call) for b in own for call in b.interval.calls if not made.isdisjoint(call.reads()))


def _reads_values(call: Call) -> bool:
    return getattr(call.function, "__name__", "") == "detach" or call.reads_data or not call.ambient.grad


def made_in(recording: Recording) -> set[Value]:
    """Return the tensors that the model made in the updates of an optimizer."""
    backwards = (backward for update in recording.updates for backward in update.backwards)
    return {x for b in backwards for c in b.interval.calls if c.origin & Origin.MODEL for _, x in c.results}


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


def _memory(own: Mapping[Value, int], before: Mapping[Value, int]) -> dict[Value, int]:
    """Return the memory of an interval's tensors: memory that was freed since the one before is another one."""
    known = {place: before[value] for value, place in own.items() if value in before}
    first = max(before.values(), default=0) + 1
    new = {place: first + i for i, place in enumerate(dict.fromkeys(own.values())) if place not in known}
    return {value: known.get(place, new.get(place, 0)) for value, place in own.items() if value not in before}


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
    )
