"""First states that a script gives as None, as that of the first batch: zeros, as they are for PyTorch's RNNs.

A script that takes a state out of the graph where there is one (`if h is not None: h = h.detach()`) calls `detach` in
these updates alone: a program reads the state itself there, which has no graph any more. Whether a module computes the
same of zeros is found when the recorded calls are made again.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from jaxtrain.port.calls import ALIAS, Step, Value, mapped
from jaxtrain.port.interval_program import Key, keys_of, replaced
from jaxtrain.port.recording import Backward


class FirstState(NamedTuple):
    """An argument that is None in some updates and tensors in others.

    Attributes:
      call: Its call.
      path: Its place in the arguments.
      shapes: Shapes of the tensors.
      dtype: Their dtype.
      is_tuple: Whether it is a tuple of tensors.
    """

    call: Key
    path: tuple[Step, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    is_tuple: bool


def first_states(backwards: Sequence[Backward]) -> tuple[FirstState, ...]:
    """Return the arguments of modules that are None in some updates and tensors in others."""
    absent = {place for backward in backwards for place, _, x in _arguments(backward) if x is None}
    found: dict[tuple[Key, tuple[Step, ...]], FirstState] = {}
    for backward in backwards:
        before = _before_detach(backward)
        for place, values, _ in _arguments(backward):
            given = [backward.interval.given.get(before.get(value, value)) for value in values]
            if place in absent and given and all(x is not None for x in given):
                tensors = [x for x in given if x is not None]
                shapes, dtype = tuple(tuple(x.shape) for x in tensors), str(tensors[0].dtype).removeprefix("torch.")
                found.setdefault(place, FirstState(*place, shapes, dtype, len(tensors) > 1))
    return tuple(found.values())


def with_first_states(backward: Backward, states: Sequence[FirstState]) -> Backward:
    """Return a program that reads zeros where an argument is None that is a state in other updates."""
    if not states:
        return backward
    keys, calls, before = keys_of(backward), [*backward.interval.calls], _before_detach(backward)
    given, memory, numbers = dict(backward.interval.given), dict(backward.interval.memory), itertools.count(2 * ALIAS)
    for i, call in enumerate(calls):
        arguments = {path: x for (_, path), _, x in _arguments(backward, i)}
        for state in states:
            if state.call != keys[id(backward.interval.calls[i])] or state.path not in arguments:
                continue
            new = mapped(arguments[state.path], lambda value: before.get(value, value))
            if new is None:
                values = [Value(-next(numbers)) for _ in state.shapes]
                for value, shape in zip(values, state.shapes, strict=True):
                    given[value] = torch.zeros(shape, dtype=getattr(torch, state.dtype))
                    memory[value] = value.number
                new = tuple(values) if state.is_tuple else values[0]
            args, kwargs = replaced((call.args, call.kwargs), state.path, new)
            calls[i] = call = call._replace(args=args, kwargs=kwargs)
    return replace(backward, interval=backward.interval._replace(calls=tuple(calls), given=given, memory=memory))


def _before_detach(backward: Backward) -> dict[Value, Value]:
    """Return the tensors of before an interval that it takes out of the graph, by what `detach` returns."""
    interval = backward.interval
    return {
        result: value
        for call in interval.calls
        if getattr(call.function, "__name__", "") == "detach"
        for value in call.reads()
        if value in interval.given and value not in interval.leaves
        for _, result in call.results
    }


def _arguments(
    backward: Backward, only: int | None = None
) -> Iterator[tuple[tuple[Key, tuple[Step, ...]], tuple[Value, ...], Any]]:
    """Yield the arguments of calls of modules: place, tensors, and the argument itself."""
    keys = keys_of(backward)
    for i, call in enumerate(backward.interval.calls):
        if not isinstance(call.function, torch.nn.Module) or only not in (None, i):
            continue
        places: list[tuple[tuple[Step, ...], Any]] = [((("item", 0), ("item", k)), x) for k, x in enumerate(call.args)]
        places += [((("item", 1), ("item", name)), x) for name, x in call.kwargs.items()]
        for path, x in places:
            is_tuple = isinstance(x, tuple) and not isinstance(x, Value) and all(isinstance(y, Value) for y in x)
            yield (keys[id(call)], path), (x,) if isinstance(x, Value) else x if is_tuple else (), x
