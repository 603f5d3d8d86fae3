"""A recording as programs that begin where the model does: all else that they read, the script itself gives them.

What a script computes without its model, such as the rows of a batch, noise, a mask or an annealed weight, is an input
of its programs, which the script itself makes while the port trains (`jaxtrain.port.feeder`). Tensors that the model
computed in the update before are carried from update to update, as hidden states are. What a script computes after an
update, such as the weights of a teacher that follow those of a student, is the lead of the next program.
"""

import inspect
import itertools
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from jaxtrain.port.calls import ALIAS, Call, Origin, Step, Value, mapped
from jaxtrain.port.inputs import Inputs, changed, free, owned_values
from jaxtrain.port.recording import Backward, Recording
from jaxtrain.port.refused import refused_at
from jaxtrain.port.same_program import SAME
from jaxtrain.port.script import digest
from jaxtrain.torch_import import Line

PADDING = "is_padding"
"""The input that says whether a micro-batch only fills up a window, and counts for nothing."""
ARITHMETIC = frozenset({"add", "sub", "mul", "div", "pow", "true_divide", "lerp", "rsub", "where"})
"""Functions that take a tensor of one number in place of a number."""


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


class Root(NamedTuple):
    """A tensor that a program reads and does not make.

    Attributes:
      kind: "model" for a parameter or a buffer, "input", or "constant".
      name: Its name; a digest of a constant.
    """

    kind: str
    name: str


@dataclass(frozen=True)
class Cut:
    """What all programs of a script have in common.

    Attributes:
      calls: Their calls.
      slots: For each place where a call reads a root, in order, the number of the root. A tensor that one update reads
        at several places, as zeros for both states of an LSTM, may be several in others.
      roots: Their roots; numbers that differ are the last ones.
      carried: The names of the inputs that the update before computes, if there is one; names of what these programs
        compute for those of another optimizer.
      places: Where they are computed.
      foreign: The names of the inputs that programs of another optimizer compute.
      numbers: The numbers that differ.
      rates: Names of the learning rates of the optimizer's groups, if the script gives them.
      window: Number of micro-batches to which shorter windows are filled up; 0 if all have the same number.
      lead: What follows an update, which a micro-batch that follows none does without; None if all begin alike.
    """

    calls: tuple[Key, ...]
    slots: tuple[int, ...]
    roots: tuple[Root, ...]
    carried: tuple[str, ...]
    places: tuple[Place, ...]
    foreign: tuple[str, ...]
    numbers: tuple[Number, ...]
    rates: tuple[str, ...] = ()
    window: int = 0
    lead: Lead | None = None

    def read(self, backward: Backward, before: Backward | None) -> Backward:
        """Return the program of an interval from where the model begins.

        Args:
          backward: What was recorded up to a call of `backward`.
          before: The same of the call before.

        Raises:
          UserError: It is another program.
        """
        found = _program(backward, self.calls, self.places)
        absent = _absent(found, self.calls, self.lead)
        if _calls(found) != self.calls[absent.calls :] or len(_reads(found)) + absent.reads != len(self.slots):
            raise refused_at("the calls of an update differ from update to update", _other_line(self, found), SAME)
        found = _with_numbers(_with_slots(found, self.slots, absent), self.numbers, absent)
        by_name = {
            root.name: x for x, root in zip(found.program.roots, self.roots, strict=True) if root.kind == "input"
        }
        before_made = {*_carried(before, found)} if before is not None else set()
        flags = [by_name[name] in before_made for name in self.carried if name in by_name]
        flags += [by_name[name] in found.interval.carried for name in self.foreign]
        if any(flags) and not all(flags):
            raise refused_at(
                "some of the tensors that are carried are given anew", backward.line, "give all of them anew"
            )
        kept = (*found.program.kept, *(by_name[name] for name in self.foreign))  # foreign ones stay as they are
        return replace(
            found, is_carried=any(flags), is_led=absent.calls == 0, program=found.program._replace(kept=kept)
        )

    def inputs(self, backward: Backward) -> Inputs:
        """Return where the roots of a program come from, which `read` has returned."""
        by_kind: dict[str, dict[Value, str]] = {"model": {}, "input": {}, "constant": {}}
        for value, root in zip(backward.program.roots, self.roots, strict=True):
            by_kind[root.kind][value] = root.name
        constants = {x: backward.tensors[x] for x in by_kind["constant"]}
        lead = (0, ()) if self.lead is None else (self.lead.calls, self.lead.changes)
        kept = dict(zip((*self.carried, *self.foreign), backward.program.kept, strict=True))
        known = backward.interval
        sizes = {name: known.sizes[x] if x in known.sizes else tuple(known.given[x].shape) for name, x in kept.items()}
        return Inputs(by_kind["model"], by_kind["input"], {}, constants, kept, sizes, *lead)

    def completed(
        self, window: Sequence[Mapping[str, torch.Tensor]], groups: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, torch.Tensor]]:
        """Return the micro-batches of an update as a run takes them.

        Args:
          window: What its programs read.
          groups: The optimizer's groups, whose learning rates are added if the script gives them.
        """
        pairs = zip(self.rates, groups, strict=True) if self.rates else ()
        rates = {name: torch.tensor(float(group["lr"]), dtype=torch.float64) for name, group in pairs}
        if not self.window:
            return [{**micro_batch, **rates} for micro_batch in window]
        return [
            {**window[min(i, len(window) - 1)], **rates, PADDING: torch.tensor(i >= len(window))}
            for i in range(self.window)
        ]


@dataclass(frozen=True)
class Feed:
    """What a script gives to the updates of a run.

    Attributes:
      cuts: What the programs of each turn have in common; one for an optimizer that takes no turns.
    """

    cuts: tuple[Cut, ...]

    def given(
        self, turn: int, window: Sequence[Mapping[str, torch.Tensor]], groups: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, torch.Tensor]]:
        """Return the micro-batches of an update as a run takes them.

        Args:
          turn: Number of its optimizer, which the names of its inputs begin with if there are several.
          window: What its programs read.
          groups: The groups of its optimizer.
        """
        completed = self.cuts[turn].completed(window, groups)
        if len(self.cuts) == 1:
            return completed
        return [{f"{turn}.{name}": x for name, x in micro_batch.items()} for micro_batch in completed]

    def as_json(self) -> str:
        """Return it as text."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def of_json(cls, text: str) -> "Feed":
        """Return what `as_json` has written.

        Args:
          text: The text.
        """
        found = json.loads(text)
        return cls(tuple(map(_cut_of, found["cuts"])))


def _cut_of(found: Mapping[str, Any]) -> Cut:
    return Cut(
        calls=tuple(Key(*call) for call in found["calls"]),
        slots=tuple(found["slots"]),
        roots=tuple(Root(*root) for root in found["roots"]),
        carried=tuple(found["carried"]),
        foreign=tuple(found["foreign"]),
        places=tuple(Place(Key(*call), _path(path)) for call, path in found["places"]),
        numbers=tuple(Number(name, call, _path(path)) for name, call, path in found["numbers"]),
        rates=tuple(found["rates"]),
        window=found["window"],
        lead=None if found["lead"] is None else Lead(*found["lead"][:2], tuple(found["lead"][2])),
    )


def _path(steps: Sequence[Sequence[Any]]) -> tuple[Step, ...]:
    return tuple((kind, key) for kind, key in steps)


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
    calls, places = _calls_of_model(backwards, modules, produced or {})
    programs = [_program(backward, calls, places) for backward in backwards]
    first = max(programs, key=lambda backward: len(backward.program.calls))
    lead = _lead(programs, first, modules)
    absent = [_absent(program, _calls(first), lead) for program in programs]
    slots = _slots(programs, absent, _reads(first))
    numbers = _differing_numbers(first, programs, absent)
    separate = [_with_slots(program, slots, its) for program, its in zip(programs, absent, strict=True)]
    of_first = separate[programs.index(first)]
    roots, carried, foreign = _roots(of_first, separate, modules, numbers, others)
    by_place = {**(produced or {}), **carried}
    if by_place.keys() != {*places}:
        raise refused_at("some updates alone read what the model computed before", first.line, SAME)
    found = Cut(
        calls=_calls(first),
        slots=slots,
        roots=(*roots, *(Root("input", x.name) for x in numbers)),
        carried=tuple(by_place[place] for place in places),
        places=places,
        foreign=foreign,
        numbers=numbers,
        lead=lead,
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
        programs = [_program(backward, calls, places) for backward in backwards]
        new_calls = {key for backward in programs for key in _calls(backward)} - calls
        new_places = {
            place_of(before, value): None
            for before, backward in itertools.pairwise(programs)
            for value in _carried(before, backward)
            if value not in owned_values(backward, modules)
        }
        if not new_calls and new_places.keys() <= places.keys():
            return calls, tuple(places)
        calls |= new_calls
        places |= new_places


def _program(backward: Backward, calls: Collection[Key], places: Iterable[Place]) -> Backward:
    """Return a program of some calls and of all that depend on the model; it also makes what the next one reads."""
    keys = _keys(backward)
    kept = [_value_at(backward, place) for place in places]
    program = backward.interval.program(lambda call: bool(call.origin & Origin.MODEL) or keys[id(call)] in calls, kept)
    return replace(backward, program=program)


def _reads(backward: Backward) -> list[Value]:
    """Return the roots that the calls of a program read, in order, one as often as it is read."""
    roots = {*backward.program.roots}
    return [value for call in backward.program.calls for value in call.reads() if value in roots]


def _lead(backwards: Sequence[Backward], longest: Backward, modules: Mapping[str, torch.nn.Module]) -> Lead | None:
    """Return the first calls of the longest program, if others are the same without these.

    The other calls read nothing that these make: they see what these change in parameters and buffers.
    """
    keys, found = _calls(longest), [_calls(backward) for backward in backwards]
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


def _absent(backward: Backward, calls: tuple[Key, ...], lead: Lead | None) -> Lead:
    """Return what a program lacks of some calls: their lead, or nothing."""
    lacks_it = lead is not None and _calls(backward) == calls[lead.calls :]
    return lead if lead is not None and lacks_it else Lead(0, 0, ())


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
        reads = _reads(backward)
        if len(reads) + its.reads == len(of_first):
            first = {value: i for i, value in reversed([*enumerate(reads, its.reads)])}
            of_place = [*of_first[: its.reads], *reads]
            keys = [
                (*key, begins[of_first[i]] if begins[of_first[i]] < its.reads else first[of_place[i]])
                for i, key in enumerate(keys)
            ]
    numbers = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    return tuple(numbers[key] for key in keys)


def _with_slots(backward: Backward, slots: Sequence[int], absent: Lead) -> Backward:
    """Return a program with a root of its own for each number; programs of another number of reads are left."""
    reads = _reads(backward)
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


def _calls(backward: Backward) -> tuple[Key, ...]:
    keys = _keys(backward)
    return tuple(keys[id(call)] for call in backward.program.calls)


def _keys(backward: Backward) -> dict[int, Key]:
    """Return the keys of the calls of an interval, by their identity."""
    count, found = Counter[str](), dict[int, Key]()
    for call in reversed(backward.interval.calls):
        text = _text(call)
        found[id(call)] = Key(text, count[text])
        count[text] += 1
    return found


def _carried(before: Backward, backward: Backward) -> Iterator[Value]:
    """Yield the roots of a program that the model computed in the interval before."""
    made = {value for call in before.interval.calls for _, value in call.results}
    yield from (x for x in backward.program.roots if x in backward.interval.carried and x in made)


def place_of(backward: Backward, wanted: Value) -> Place:
    """Return where an interval makes a tensor."""
    return next(place for place, value in _places(backward) if value == wanted)


def _value_at(backward: Backward, wanted: Place) -> Value:
    found = next((value for place, value in _places(backward) if place == wanted), None)
    if found is None:
        raise refused_at(
            "a tensor that is carried to the next update is not computed in this one",
            backward.line,
            "compute it always",
        )
    return found


def _places(backward: Backward) -> Iterator[tuple[Place, Value]]:
    """Yield where an interval makes tensors."""
    keys = _keys(backward)
    for call in backward.interval.calls:
        yield from ((Place(keys[id(call)], path), value) for path, value in call.results)


def _text(call: Call) -> str:
    """Return a call as text, which is the same in every process."""
    function = call.function
    name = type(function).__name__ if isinstance(function, torch.nn.Module) else getattr(function, "__name__", "")
    return f"{Path(call.line.file).name}:{call.line.number} {name}"


def _other_line(found: Cut, backward: Backward) -> Line:
    pairs = zip(backward.program.calls, _calls(backward), found.calls, strict=False)
    return next((call.line for call, key, other in pairs if key != other), backward.line)


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


def _with_numbers(backward: Backward, numbers: Sequence[Number], absent: Lead) -> Backward:
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
        args, kwargs = _replaced((call.args, call.kwargs), number.path, value)
        calls[i] = call._replace(args=args, kwargs=kwargs)
    program = backward.program._replace(calls=tuple(calls), roots=(*backward.program.roots, *values))
    return replace(backward, program=program, interval=backward.interval._replace(given=given))


def _replaced(argument: Any, path: tuple[Step, ...], new: Any) -> Any:
    if not path:
        return new
    (_, key), *rest = path
    if isinstance(argument, Mapping):
        return {name: _replaced(x, tuple(rest), new) if name == key else x for name, x in argument.items()}
    items = [_replaced(x, tuple(rest), new) if i == key else x for i, x in enumerate(argument)]
    return items if isinstance(argument, list) else tuple(items)


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
        of_before = {*_carried(before, backward)}
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
            name = first.names.get(_value_at(first, carried_at[i])) if i in carried_at else None
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
