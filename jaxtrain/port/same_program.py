"""Whether the updates of a script compute one program."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from jaxtrain.port.calls import Value
from jaxtrain.port.inputs import Inputs
from jaxtrain.port.recorder import has_tensors
from jaxtrain.port.recording import Backward
from jaxtrain.port.refused import refused_at
from jaxtrain.port.script import digest


def check_same(first: Backward, its: Inputs, other: Backward, inputs: Inputs, *, of_sizes: bool = False) -> None:
    """Refuse a program that differs from another one, except for integers if these are sizes of batches that differ."""
    # What follows an update is compared where both do.
    lead = its.lead if first.is_led != other.is_led else 0
    calls = (
        _described(backward, of, lead if backward.is_led else 0, of_sizes=of_sizes)
        for backward, of in ((first, its), (other, inputs))
    )
    for one, two in itertools.zip_longest(*calls):
        if one == two:
            continue
        line = (two or one)[0]
        if one is None or two is None or one[1] != two[1]:
            raise refused_at("the calls of an update differ from update to update", line, SAME)
        if one[2] != two[2]:
            raise refused_at(f"an argument differs from update to update ({one[2]}, then {two[2]})"[:300], line, SAME)
        raise refused_at("what a call reads, or its autocast region, differs from update to update", line, SAME)
    for value, constant in zip(inputs.constants, its.constants, strict=True):
        if digest(inputs.constants[value]) != digest(its.constants[constant]):
            line = next((c.line for c in other.program.calls if value in {*c.reads()}), other.line)
            raise refused_at(
                f"a tensor {list(inputs.constants[value].shape)} differs from update to update and comes from no batch",
                line,
                "take it from the batch, or keep it as a buffer of the module",
            )


SAME = "a step computes the same in every update; what differs belongs into the batch"


def _described(backward: Backward, inputs: Inputs, lead: int, *, of_sizes: bool) -> Iterator[tuple[Any, ...]]:
    """Yield what equal programs share of each call after the lead, as (line, function, arguments, rest)."""
    numbers = {value: f"<{i}>" for i, value in enumerate(inputs.constants)}
    numbers |= {value: f"<{name}>" for value, name in (*inputs.owned.items(), *inputs.batch.items())}
    for call in backward.program.calls[lead:]:
        for path, value in call.results:
            numbers[value] = f"<result {len(numbers)} {path}>"
        arguments = _plain((call.args, call.kwargs), numbers, of_sizes)
        what = function_key(call.function)
        yield call.line, what, arguments, (call.ambient, call.random is None, len(call.results), len(call.writes))


def function_key(function: Any) -> Any:
    """Return what equal functions and equal modules share.

    Modules without tensors, as a loss made in every epoch, need not be one object; methods of attributes are made anew
    for each call.
    """
    if isinstance(function, torch.nn.Module):
        return function if has_tensors(function) else (type(function), str(function))
    return getattr(function, "__self__", None), getattr(function, "__qualname__", function)


def _plain(argument: Any, numbers: Mapping[Value, str], of_sizes: bool) -> Any:
    if isinstance(argument, Value):
        return numbers[argument]
    if isinstance(argument, slice):
        return ("slice", _plain((argument.start, argument.stop, argument.step), numbers, of_sizes))
    if isinstance(argument, tuple | list):
        return tuple(_plain(item, numbers, of_sizes) for item in argument)
    if isinstance(argument, Mapping):
        return tuple((key, _plain(item, numbers, of_sizes)) for key, item in argument.items())
    return "size" if of_sizes and type(argument) is int else argument
