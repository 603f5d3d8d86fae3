"""Batches from examples: named, stacked and checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtrain.data.columns import Columns
from jaxtrain.data.conversion import as_array, is_tensor, stack
from jaxtrain.data.sources import Batch, Collate, Source
from jaxtrain.errors import UserError


@dataclass(frozen=True)
class Collator:
    """Makes a batch from examples: stacks them by name, or applies the user's function.

    Args:
      collate: Function of the list of examples, as they are, that returns a batch; None stacks the arrays of each name.
      batch_keys: Names for the values of examples or batches that are tuples or lists.

    Example:
      >>> Collator(batch_keys=("x", "y"))([(1.0, 2), (3.0, 4)], numbers=[0, 1])
      {'x': array([1., 3.], dtype=float32), 'y': array([2, 4], dtype=int32)}
      >>> Collator(collate=lambda texts: {"length": [len(text) for text in texts]})(["a", "bc"], numbers=[0, 1])
      {'length': array([1, 2], dtype=int32)}
    """

    collate: Collate | None = None
    batch_keys: Sequence[str] | None = None

    def __call__(self, examples: Sequence[Any], numbers: Sequence[int]) -> Batch:
        """Return the batch of the examples; `numbers` are theirs, for error messages.

        Raises:
          UserError: The examples cannot be named, have different names or shapes, or a value is not an array.
        """
        if self.collate is not None:
            batch = self.batch(self.collate(list(examples)), f"the batch of example {numbers[0]}")
            check_rows(batch, len(examples), "the batch that collate returned")
            return batch
        named: Sequence[Mapping[str, Any]] = examples
        if {*map(type, examples)} != {dict}:
            named = [self._named(example, f"example {i}") for example, i in zip(examples, numbers, strict=True)]
        names = _named_values(named[0], f"example {numbers[0]}").keys()
        for example, number in zip(named, numbers, strict=True):
            if example.keys() != names:
                raise UserError(_difference(named[0], numbers[0], example, number))
        return {name: stack([example[name] for example in named], name, numbers) for name in names}

    def read(self, source: Source, numbers: Sequence[int]) -> Batch:
        """Return the batch of the examples of a source that have the given numbers; each is read once.

        Raises:
          UserError: As for a call.
        """
        if isinstance(source, Columns) and self.collate is None:
            return source.batch(numbers)
        distinct = list(dict.fromkeys(numbers))
        # PyTorch's protocol for reading many examples at once.
        read_all = getattr(source, "__getitems__", None)
        examples = read_all(distinct) if read_all else [source[number] for number in distinct]
        if len(distinct) < len(numbers):
            by_number = dict(zip(distinct, examples, strict=True))
            examples = [by_number[number] for number in numbers]
        return self(examples, numbers)

    def batch(self, values: Any, where: str) -> Batch:
        """Return a batch that was already collated, as arrays.

        Raises:
          UserError: Its values cannot be named, or are not arrays.
        """
        named = _named_values(self._named(values, where), where)
        return {name: as_array(value, name, where) for name, value in named.items()}

    def _named(self, values: Any, where: str) -> Mapping[str, Any]:
        if isinstance(values, Mapping):
            return values
        keys = self.batch_keys
        if keys is not None and len(keys) == 1 and (is_tensor(values) or hasattr(values, "dtype")):
            return {keys[0]: values}
        if not isinstance(values, tuple | list):
            raise UserError(f"{where} is of type {type(values).__name__}: use a dict, or a tuple with batch_keys")
        if keys is None:
            raise UserError(
                f"{where} is a {type(values).__name__} of {len(values)} values: name them with batch_keys, such as"
                f" batch_keys={tuple('xyzabc'[: len(values)])}, or use a dict"
            )
        if len(keys) != len(values):
            raise UserError(
                f"{where} has {len(values)} values, but batch_keys has {len(keys)} names: {', '.join(keys)}"
            )
        return dict(zip(keys, values, strict=True))


def check_rows(batch: Batch, rows: int, where: str) -> None:
    """Check that every array of a batch has the expected number of rows.

    Args:
      batch: The batch.
      rows: The expected number.
      where: What the batch is, for the error message.

    Raises:
      UserError: An array has another number of rows.

    Example:
      >>> check_rows({"x": as_array([1, 2], "x", "the batch")}, 3, "batch 0")
      Traceback (most recent call last):
      jaxtrain.errors.UserError: batch 0 has 2 rows of 'x', not 3: return one row per example
    """
    for name, array in batch.items():
        found = array.shape[0] if array.ndim else 0
        if found != rows:
            raise UserError(f"{where} has {found} rows of {name!r}, not {rows}: return one row per example")


def _named_values(values: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    if not values:
        raise UserError(f"{where} is empty: give it at least one array")
    return values


def _difference(first: Mapping[str, Any], first_number: int, other: Mapping[str, Any], number: int) -> str:
    missing = [name for name in first if name not in other]
    name, lacking, having = (
        (missing[0], number, first_number)
        if missing
        else (next(name for name in other if name not in first), first_number, number)
    )
    return f"example {lacking} has no {name!r}, which example {having} has: give every example the same names"
