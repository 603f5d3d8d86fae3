"""The data that a script evaluates its model on: a DataLoader that it reads and does not train on."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from jaxtrain.errors import UserError
from jaxtrain.port.calls import Program
from jaxtrain.port.training import Training


def validation_of(training: Training) -> int | None:
    """Return the number of the DataLoader that a script evaluates on; None without one.

    It was made before the first update, and its batches are like those that the script trains on, but for their rows.
    """
    recording, loader = training.recording, training.loader
    if loader is None or training.turns:
        return None
    like = _like(recording.batches[loader])
    for number, batch in recording.batches.items():
        found = recording.loaders[number]
        if number != loader and found.is_early and _like(batch) == like and _length(found.loader) is not None:
            return number
    return None


def _length(loader: Any) -> int | None:
    """Return the number of rows of a DataLoader; None for one that is a stream."""
    try:
        return len(loader.dataset)
    except (TypeError, AttributeError):
        return None


def _like(batch: Any) -> Any:
    """Return what batches share that differ in their rows."""
    if isinstance(batch, torch.Tensor):
        return tuple(batch.shape[1:]), batch.dtype
    if isinstance(batch, Mapping):
        return {key: _like(x) for key, x in batch.items()}
    return [*map(_like, batch)] if isinstance(batch, tuple | list) else type(batch)


def last_batch(training: Training, number: int) -> dict[str, torch.Tensor] | None:
    """Return a batch like the last one of an evaluation, which has the batch size of training.

    Args:
      training: What the script is.
      number: Number of the DataLoader that it evaluates on.

    Returns:
      The batch; None if the script trains on one of so many rows.

    Raises:
      UserError: The program has a number that may be the rows of a batch.
    """
    batches = [inputs.batch_of(backward) for backward, inputs in training.programs]
    rest = (_length(training.recording.loaders[number].loader) or 0) % training.rows
    if not rest or any(len(x) == rest for batch in batches for x in batch.values()):
        return None
    numbers = {*_numbers(training.programs[0][0].program)}
    if len(batches) == 1 and not numbers.isdisjoint((training.rows, 1 / training.rows)):
        raise UserError(f"the loss has the number {training.rows}, which may be the rows of a batch")
    return {name: x.index_select(0, torch.arange(rest)) for name, x in batches[0].items()}


def _numbers(program: Program) -> Iterator[Any]:
    """Yield the numbers that the calls of a program are given."""
    rest: list[Any] = [x for call in program.calls for x in (call.args, call.kwargs)]
    while rest:
        x = rest.pop()
        if isinstance(x, Mapping):
            rest += x.values()
        elif isinstance(x, tuple | list):
            rest += x
        elif isinstance(x, slice):
            rest += (x.start, x.stop, x.step)
        elif type(x) in (int, float):
            yield x
