"""What the programs of a script have in common, found in its recording."""

import inspect
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from jaxtrain.port.calls import Call, Value
from jaxtrain.port.cut import Cut, Root
from jaxtrain.port.first_states import first_states, with_first_states
from jaxtrain.port.inputs import changed, free, owned_values
from jaxtrain.port.interval_program import (
    Key,
    Lead,
    Number,
    Place,
    absent_of,
    calls_of,
    carried_between,
    numbers_in,
    place_of,
    program_of,
    reads_of,
    value_at,
    with_slots,
)
from jaxtrain.port.recording import Backward, Recording
from jaxtrain.port.refused import refused_at
from jaxtrain.port.same_program import SAME
from jaxtrain.port.script import digest

ARITHMETIC = frozenset({"add", "sub", "mul", "div", "pow", "true_divide", "lerp", "rsub", "where"})
"""Functions that take a tensor of one number in place of a number."""


def cut(
    recording: Recording,
    modules: Mapping[str, torch.nn.Module],
    others: Collection[Value] = (),
    produced: Mapping[Place, str] | None = None,
) -> tuple[list[Backward], Cut]:
    """Return the programs of a recording from where the model begins, and what they have in common.

    Args:
      recording: A recording.
      modules: The script's modules, by name.
      others: The tensors that the model made in updates of other optimizers.
      produced: What these programs compute for those of other optimizers, with names.

    Raises:
      UserError: The programs differ, or read what the model computed, but not in the update before.
    """
    backwards = [backward for update in recording.updates for backward in update.backwards]
    states = first_states(backwards)
    backwards = [with_first_states(backward, states) for backward in backwards]
    calls, places = _calls_of_model(backwards, modules, produced or {})
    programs = [program_of(backward, calls, places) for backward in backwards]
    first = max(programs, key=lambda backward: len(backward.program.calls))
    lead = _lead(programs, first, modules)
    absent = [absent_of(program, calls_of(first), lead) for program in programs]
    slots = _slots(programs, absent, reads_of(first))
    numbers = _differing_numbers(first, programs, absent)
    separate = [with_slots(program, slots, its) for program, its in zip(programs, absent, strict=True)]
    of_first = separate[programs.index(first)]
    roots, carried, foreign = _roots(of_first, separate, modules, numbers, others)
    by_place = {**(produced or {}), **carried}
    if by_place.keys() != {*places}:
        raise refused_at("some updates alone read what the model computed before", first.line, SAME)
    found = Cut(
        calls=calls_of(first),
        slots=slots,
        roots=(*roots, *(Root("input", x.name) for x in numbers)),
        carried=tuple(by_place[place] for place in places),
        places=places,
        foreign=foreign,
        numbers=numbers,
        lead=lead,
        first_states=states,
    )
    read = [found.read(backward, before) for before, backward in zip([None, *backwards], backwards, strict=False)]
    for backward in read:
        known, owned = owned_values(backward, modules), found.inputs(backward).owned
        if known != {x: name for x, name in owned.items() if x in known or backward.is_led}:
            raise refused_at("an update reads other parameters than the first one", backward.line, SAME)
    return read, found


def _calls_of_model(
    backwards: Sequence[Backward], modules: Mapping[str, torch.nn.Module], produced: Iterable[Place]
) -> tuple[set[Key], tuple[Place, ...]]:
    """Return the calls that depend on the model in an update, and those of their results that the next update reads.

    A call may depend on it in some updates alone, as that of a hidden state that is given anew for the others.
    """
    calls: set[Key] = set()
    places: dict[Place, None] = dict.fromkeys(produced)
    while True:
        programs = [program_of(backward, calls, places) for backward in backwards]
        new_calls = {key for backward in programs for key in calls_of(backward)} - calls
        new_places = {
            place_of(before, value): None
            for before, backward in itertools.pairwise(programs)
            for value in carried_between(before, backward)
            if value not in owned_values(backward, modules)
        }
        if not new_calls and new_places.keys() <= places.keys():
            return calls, tuple(places)
        calls |= new_calls
        places |= new_places


def _lead(backwards: Sequence[Backward], longest: Backward, modules: Mapping[str, torch.nn.Module]) -> Lead | None:
    """Return the first calls of the longest program, if others are the same without these.

    The other calls read nothing that these make: they see what these change in parameters and buffers.
    """
    keys, found = calls_of(longest), [calls_of(backward) for backward in backwards]
    count = len(keys) - min(map(len, found))
    lead, rest = longest.program.calls[:count], longest.program.calls[count:]
    made = {value for call in lead for _, value in call.results}
    if (
        count == 0
        or any(x not in (keys, keys[count:]) for x in found)
        or any(x in made for c in rest for x in c.reads())
    ):
        return None
    owned, roots = owned_values(longest, modules), {*longest.program.roots}
    for call in lead:
        if any(value in roots and value not in owned for value in call.reads()):
            raise refused_at(
                "what follows an update reads more than parameters and buffers",
                call.line,
                "compute it before the update",
            )
    reads = sum(value in roots for call in lead for value in call.reads())
    return Lead(count, reads, changed(longest, lead, modules))


def _slots(backwards: Sequence[Backward], absent: Sequence[Lead], of_first: Sequence[Value]) -> tuple[int, ...]:
    """Return numbers for the places where programs read roots: equal ones where all read one tensor.

    Args:
      backwards: The programs.
      absent: What they lack.
      of_first: The roots that a program reads that lacks nothing.
    """
    begins = {value: i for i, value in reversed([*enumerate(of_first)])}
    keys: list[tuple[int, ...]] = [()] * len(of_first)
    for backward, its in zip(backwards, absent, strict=True):
        reads = reads_of(backward)
        if len(reads) + its.reads == len(of_first):
            first = {value: i for i, value in reversed([*enumerate(reads, its.reads)])}
            of_place = [*of_first[: its.reads], *reads]
            keys = [
                (*key, begins[of_first[i]] if begins[of_first[i]] < its.reads else first[of_place[i]])
                for i, key in enumerate(keys)
            ]
    numbers = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    return tuple(numbers[key] for key in keys)


def _differing_numbers(first: Backward, backwards: Sequence[Backward], absent: Sequence[Lead]) -> tuple[Number, ...]:
    """Return the numbers of a program that differ from update to update."""
    found: list[Number] = []
    for i, call in enumerate(first.program.calls):
        if not _takes_numbers(call):
            continue
        places = ((b, i - its.calls) for b, its in zip(backwards, absent, strict=True))
        same = [(b, b.program.calls[k]) for b, k in places if 0 <= k < len(b.program.calls)]
        for path, number in numbers_in((call.args, call.kwargs)):
            values = [(b, dict(numbers_in((c.args, c.kwargs))).get(path, number)) for b, c in same]
            if any(value != number for _, value in values):
                name = free(_number_name(values), [x.name for x in found])
                found.append(Number(name, i, path))
    return tuple(found)


def _number_name(values: Sequence[tuple[Backward, float]]) -> str:
    """Return the name of a variable of the script that always has the value of a number."""
    names = [{name for name, x in backward.numbers.items() if x == value} for backward, value in values]
    return min(set.intersection(*names), default="number")


def _takes_numbers(call: Call) -> bool:
    name = getattr(call.function, "__name__", "").strip("_")
    return name.removeprefix("r") in ARITHMETIC or name.removeprefix("i") in ARITHMETIC or name in ARITHMETIC


def _roots(
    first: Backward,
    backwards: Sequence[Backward],
    modules: Mapping[str, torch.nn.Module],
    numbers: tuple[Number, ...],
    others: Collection[Value],
) -> tuple[list[Root], dict[Place, str], tuple[str, ...]]:
    """Return the roots of all programs, by those of the first one.

    Returns:
      The roots; the names of those that the update before makes, by where it does; the names of those that other
      optimizers' programs make.
    """
    count = len(first.program.roots)
    owned = owned_values(first, modules)
    same = [backward for backward in backwards if len(backward.program.roots) == count]
    carried_at: dict[int, Place] = {}
    for before, backward in itertools.pairwise(backwards):
        of_before = {*carried_between(before, backward)}
        for i, value in enumerate(backward.program.roots[:count]):
            if value in of_before and first.program.roots[i] not in owned:
                carried_at[i] = place_of(before, value)
    of_place = [[b.program.roots[i] for b in same] for i in range(count)]
    digests = [{digest(b.tensors[x]) for b, x in zip(same, found, strict=True) if x in b.tensors} for found in of_place]
    foreign_at = {i for i in range(count) if i not in carried_at and all(b.program.roots[i] in others for b in same)}
    foreign_at = {i for i in foreign_at if first.program.roots[i] not in owned}
    # A script whose batches never differ, as for a graph, gives all that it has.
    has_batch = bool(carried_at or foreign_at) or any(len(found) > 1 for found in digests)
    roots: list[Root] = []
    foreign: list[str] = []
    for i, value in enumerate(first.program.roots):
        if value in owned:
            roots.append(Root("model", owned[value]))
        elif i in carried_at or i in foreign_at or len(digests[i]) > 1 or not has_batch:
            if i not in carried_at and i not in foreign_at:
                _check_not_of_model(same, i)
            taken = [*(root.name for root in roots if root.kind == "input"), *(x.name for x in numbers)]
            name = first.names.get(value_at(first, carried_at[i])) if i in carried_at else None
            roots.append(Root("input", free(name or _input_name(first, value), taken)))
            foreign += [roots[-1].name] if i in foreign_at else []
        else:
            roots.append(Root("constant", next(iter(digests[i]), None) or ""))
    return roots, {place: roots[i].name for i, place in carried_at.items()}, tuple(foreign)


def _check_not_of_model(backwards: Sequence[Backward], i: int) -> None:
    for backward in backwards:
        value = backward.program.roots[i]
        if value in backward.interval.carried:
            line = next((c.line for c in backward.program.calls if value in {*c.reads()}), backward.line)
            raise refused_at(
                "a tensor that the model computed before the last update is read", line, "compute it in every update"
            )


def _input_name(backward: Backward, value: Value) -> str:
    """Return a name for an input: of a variable that holds it, of the argument that it is, or of what it is made of."""
    if value in backward.names:
        return backward.names[value]
    for call in backward.program.calls:
        function = call.function.forward if isinstance(call.function, torch.nn.Module) else call.function
        try:
            bound = inspect.signature(function).bind(*call.args, **call.kwargs).arguments
        except (TypeError, ValueError):
            continue
        for name, x in bound.items():
            if x == value and type(x) is Value:
                return name
    for call in backward.interval.calls:
        if value in (made for _, made in call.results):
            return next((backward.names[x] for x in call.reads() if x in backward.names), "batch")
    return "batch"
