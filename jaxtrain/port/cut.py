"""A recording as programs that begin where the model does: all else that they read, the script itself gives them.

What a script computes without its model, such as the rows of a batch, noise, a mask or an annealed weight, is an input
of its programs, which the script itself makes while the port trains (`jaxtrain.port.feeder`). Tensors that the model
computed in the update before are carried from update to update, as hidden states are. What a script computes after an
update, such as the weights of a teacher that follow those of a student, is the lead of the next program.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch

from jaxtrain.port.calls import Step, Value
from jaxtrain.port.first_states import FirstState, with_first_states
from jaxtrain.port.inputs import Inputs
from jaxtrain.port.interval_program import (
    Key,
    Lead,
    Number,
    Place,
    absent_of,
    calls_of,
    carried_between,
    program_of,
    reads_of,
    with_numbers,
    with_slots,
)
from jaxtrain.port.recording import Backward
from jaxtrain.port.refused import refused_at
from jaxtrain.port.same_program import SAME
from jaxtrain.torch_import import Line

PADDING = "is_padding"
"""The input that says whether a micro-batch only fills up a window, and counts for nothing."""


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
      optimizers: The numbers of the optimizers whose updates these are, in the order in which the script makes them.
      is_joined: Whether the calls of `backward` of an update are parts of one loss.
      first_states: The arguments that are None in some updates, and states in others.
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
    optimizers: tuple[int, ...] = (0,)
    is_joined: bool = False
    first_states: tuple[FirstState, ...] = ()
    lead: Lead | None = None

    def read(self, backward: Backward, before: Backward | None) -> Backward:
        """Return the program of an interval from where the model begins.

        Args:
          backward: What was recorded up to a call of `backward`.
          before: The same of the call before.

        Raises:
          UserError: It is another program.
        """
        found = program_of(with_first_states(backward, self.first_states), self.calls, self.places)
        absent = absent_of(found, self.calls, self.lead)
        if calls_of(found) != self.calls[absent.calls :] or len(reads_of(found)) + absent.reads != len(self.slots):
            raise refused_at("the calls of an update differ from update to update", _other_line(self, found), SAME)
        found = with_numbers(with_slots(found, self.slots, absent), self.numbers, absent)
        by_name = {
            root.name: x for x, root in zip(found.program.roots, self.roots, strict=True) if root.kind == "input"
        }
        unknown = next((name for name, x in by_name.items() if x not in found.tensors), None)
        if unknown is not None:
            raise refused_at(f"what {unknown} was is not known", found.line, "compute it in every update alike")
        before_made = {*carried_between(before, found)} if before is not None else set()
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
        optimizers=tuple(found["optimizers"]),
        is_joined=found["is_joined"],
        first_states=tuple(map(_first_state_of, found["first_states"])),
        lead=None if found["lead"] is None else _lead_of(*found["lead"]),
    )


def _first_state_of(found: Sequence[Any]) -> FirstState:
    call, path, shapes, dtype, is_tuple = found
    return FirstState(Key(*call), _path(path), tuple(map(tuple, shapes)), dtype, is_tuple)


def _lead_of(calls: int, reads: int, changes: Sequence[str]) -> Lead:
    return Lead(calls, reads, tuple(changes))


def _path(steps: Sequence[Sequence[Any]]) -> tuple[Step, ...]:
    return tuple((kind, key) for kind, key in steps)


def _other_line(found: Cut, backward: Backward) -> Line:
    pairs = zip(backward.program.calls, calls_of(backward), found.calls, strict=False)
    return next((call.line for call, key, other in pairs if key != other), backward.line)
