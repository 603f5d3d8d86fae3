"""The program of an interval from where the model begins: its calls, and what these read."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from jaxtrain.port.calls import ALIAS, Call, Origin, Step, Value, mapped
from jaxtrain.port.recording import Backward
from jaxtrain.port.refused import refused_at
from jaxtrain.port.same_program import SAME


class Key(NamedTuple):
    """A call of an interval.

    Attributes:
      text: The call, as text.
      later: How many calls of the same text come after it; evaluations come before.
    """

    text: str
    later: int


class Place(NamedTuple):
    """Where a tensor is made in an interval.

    Attributes:
      call: The call.
      path: Where the tensor is in its result.
    """

    call: Key
    path: tuple[Step, ...]


class Number(NamedTuple):
    """A number that differs from update to update.

    Attributes:
      name: Name of a variable of the script that holds it.
      call: Place of its call in the program.
      path: Its place in the arguments.
    """

    name: str
    call: int
    path: tuple[Step, ...]


class Lead(NamedTuple):
    """What follows an update: the first calls of a program.

    Attributes:
      calls: How many.
      reads: How many times these read a root.
      changes: The names of the parameters and buffers that they change.
    """

    calls: int
    reads: int
    changes: tuple[str, ...]


def program_of(backward: Backward, calls: Collection[Key], places: Iterable[Place]) -> Backward:
    """Return a program of some calls and of all that depend on the model; it also makes what the next one reads."""
    keys = keys_of(backward)
    kept = [value_at(backward, place) for place in places]
    program = backward.interval.program(lambda call: bool(call.origin & Origin.MODEL) or keys[id(call)] in calls, kept)
    return replace(backward, program=program)


def absent_of(backward: Backward, calls: tuple[Key, ...], lead: Lead | None) -> Lead:
    """Return what a program lacks of some calls: their lead, or nothing."""
    lacks_it = lead is not None and calls_of(backward) == calls[lead.calls :]
    return lead if lead is not None and lacks_it else Lead(0, 0, ())


def calls_of(backward: Backward) -> tuple[Key, ...]:
    """Return the keys of the calls of a program."""
    keys = keys_of(backward)
    return tuple(keys[id(call)] for call in backward.program.calls)


def keys_of(backward: Backward) -> dict[int, Key]:
    """Return the keys of the calls of an interval, by their identity."""
    count, found = Counter[str](), dict[int, Key]()
    for call in reversed(backward.interval.calls):
        text = _text(call)
        found[id(call)] = Key(text, count[text])
        count[text] += 1
    return found


def _text(call: Call) -> str:
    """Return a call as text, which is the same in every process."""
    function = call.function
    name = type(function).__name__ if isinstance(function, torch.nn.Module) else getattr(function, "__name__", "")
    return f"{Path(call.line.file).name}:{call.line.number} {name}"


def reads_of(backward: Backward) -> list[Value]:
    """Return the roots that the calls of a program read, in order, one as often as it is read."""
    roots = {*backward.program.roots}
    return [value for call in backward.program.calls for value in call.reads() if value in roots]


def with_slots(backward: Backward, slots: Sequence[int], absent: Lead) -> Backward:
    """Return a program with a root of its own for each number; programs of another number of reads are left."""
    reads = reads_of(backward)
    if len(reads) + absent.reads != len(slots):
        return backward
    given, of_slot = dict(backward.interval.given), dict[int, Value]()
    for slot, value in zip(slots[absent.reads :], reads, strict=True):
        if slot not in of_slot:
            of_slot[slot] = Value(-ALIAS - slot) if value in of_slot.values() else value
            if of_slot[slot] != value:
                given[of_slot[slot]] = given[value]
    of_slot |= {slot: Value(-ALIAS - slot) for slot in slots if slot not in of_slot}
    places, roots = iter(slots[absent.reads :]), {*backward.program.roots}
    calls = [
        call._replace(
            args=mapped(call.args, lambda x: of_slot[next(places)] if x in roots else x),
            kwargs=mapped(call.kwargs, lambda x: of_slot[next(places)] if x in roots else x),
        )
        for call in backward.program.calls
    ]
    others = [value for value in backward.program.roots if value not in {*reads}]
    program = backward.program._replace(calls=tuple(calls), roots=(*(of_slot[i] for i in sorted(of_slot)), *others))
    return replace(backward, program=program, interval=backward.interval._replace(given=given))


def with_numbers(backward: Backward, numbers: Sequence[Number], absent: Lead) -> Backward:
    """Return a program that reads numbers that differ as tensors of float64, PyTorch's own precision of numbers."""
    calls, given = [*backward.program.calls], dict(backward.interval.given)
    values = [Value(-1 - k) for k in range(len(numbers))]
    for value, number in zip(values, numbers, strict=True):
        i = number.call - absent.calls
        if i < 0:
            given[value] = torch.zeros((), dtype=torch.float64)
            continue
        call = calls[i] if i < len(calls) else None
        there = {} if call is None else dict(numbers_in((call.args, call.kwargs)))
        if call is None or number.path not in there:
            raise refused_at("a number is no number in every update", (call or calls[-1]).line, SAME)
        given[value] = torch.tensor(there[number.path], dtype=torch.float64)
        args, kwargs = replaced((call.args, call.kwargs), number.path, value)
        calls[i] = call._replace(args=args, kwargs=kwargs)
    program = backward.program._replace(calls=tuple(calls), roots=(*backward.program.roots, *values))
    return replace(backward, program=program, interval=backward.interval._replace(given=given))


def numbers_in(argument: Any, path: tuple[Step, ...] = ()) -> Iterator[tuple[tuple[Step, ...], float]]:
    """Yield the numbers with a fraction among the arguments of a call, with their places."""
    if type(argument) is float:
        yield path, argument
    elif isinstance(argument, Mapping):
        for key, item in argument.items():
            yield from numbers_in(item, (*path, ("item", key)))
    elif isinstance(argument, tuple | list) and not isinstance(argument, Value):
        for i, item in enumerate(argument):
            yield from numbers_in(item, (*path, ("item", i)))


def replaced(argument: Any, path: tuple[Step, ...], new: Any) -> Any:
    """Return arguments with another one at a place."""
    if not path:
        return new
    (_, key), *rest = path
    if isinstance(argument, Mapping):
        return {name: replaced(x, tuple(rest), new) if name == key else x for name, x in argument.items()}
    items = [replaced(x, tuple(rest), new) if i == key else x for i, x in enumerate(argument)]
    return items if isinstance(argument, list) else tuple(items)


def carried_between(before: Backward, backward: Backward) -> Iterator[Value]:
    """Yield the roots of a program that the model computed in the interval before."""
    made = {value for call in before.interval.calls for _, value in call.results}
    yield from (x for x in backward.program.roots if x in backward.interval.carried and x in made)


def place_of(backward: Backward, wanted: Value) -> Place:
    """Return where an interval makes a tensor."""
    return next(place for place, value in places_of(backward) if value == wanted)


def value_at(backward: Backward, wanted: Place) -> Value:
    """Return the tensor that an interval makes at a place."""
    found = next((value for place, value in places_of(backward) if place == wanted), None)
    if found is None:
        raise refused_at(
            "a tensor that is carried to the next update is not computed in this one",
            backward.line,
            "compute it always",
        )
    return found


def places_of(backward: Backward) -> Iterator[tuple[Place, Value]]:
    """Yield where an interval makes tensors."""
    keys = keys_of(backward)
    for call in backward.interval.calls:
        yield from ((Place(keys[id(call)], path), value) for path, value in call.results)
