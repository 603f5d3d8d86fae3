"""Attributes that `forward` carries from one call to the next, such as a hidden state or a counter.

A graph has no other state than buffers. While a module is traced, the tensors of such attributes are buffers, and their
Python numbers are `Number`s of such tensors; after the call the buffers receive what the attributes have become.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from jaxtrain.errors import UserError
from jaxtrain.torch_import.capture.module.copying import Memory, own_tensors
from jaxtrain.torch_import.capture.values.numbers import Number
from jaxtrain.torch_import.refusals import refusal
from jaxtrain.torch_internals import FakeTensor, FakeTensorMode, pytree

CARRYING = "@carried"
"""Name of the part that has the buffers. No attribute has it."""


class Leaf(NamedTuple):
    """A tensor or a number of an attribute.

    Attributes:
      name: Its path in the module, as "rnn.hidden.0".
      shape: Its shape; that of a number is ().
      dtype: Its dtype.
      kind: `int` or `float` for a Python number, else `torch.Tensor`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: type


class Attribute(NamedTuple):
    """An attribute that is carried.

    Attributes:
      path: Its path in the module, as "rnn.hidden".
      structure: Structure of its value.
      leaves: The tensors and numbers in it.
      source: The line that assigns it.
    """

    path: str
    structure: pytree.TreeSpec
    leaves: tuple[Leaf, ...]
    source: str

    def part_of(self, module: torch.nn.Module) -> dict[str, Any]:
        """Return the attributes of the part that has it."""
        return vars(module.get_submodule(self.path.rpartition(".")[0]))

    @property
    def name(self) -> str:
        """Its name in that part."""
        return self.path.rpartition(".")[2]


class CarriedError(UserError):
    """Of a module that carries attributes which its capture did not.

    Attributes:
      attributes: These attributes.
    """

    def __init__(self, attributes: Sequence[Attribute]) -> None:
        first = attributes[0]
        error = refusal(
            f"forward changes the attribute {first.path!r}, which it depends on",
            "register it as a buffer",
            first.source,
        )
        super().__init__(str(error))
        self.attributes = tuple(attributes)


def attribute_of(path: str, start: Any, after: Any, source: str) -> Attribute | None:
    """Return an attribute that can be carried; None for one that has other values than tensors and numbers.

    Args:
      path: Its path.
      start: Its value before the first call.
      after: Its value after a call.
      source: The line that assigns it.
    """
    given, structure = pytree.tree_flatten_with_path(start)
    found, becomes = pytree.tree_flatten(after)
    if structure != becomes or not given:
        return None
    leaves = [_leaf(_name(path, keys), x, y) for (keys, x), y in zip(given, found, strict=True)]
    return Attribute(path, structure, tuple(leaves), source) if all(leaves) else None  # type: ignore[arg-type]


def _name(path: str, keys: Sequence[Any]) -> str:
    return ".".join((path, *(str(getattr(key, _KEYS[type(key)])) for key in keys)))


_KEYS = {pytree.SequenceKey: "idx", pytree.MappingKey: "key", pytree.GetAttrKey: "name"}


def _leaf(name: str, start: Any, after: Any) -> Leaf | None:
    if isinstance(start, torch.Tensor):
        is_plain = not isinstance(start, FakeTensor) and start.layout is torch.strided
        same = isinstance(after, torch.Tensor) and after.shape == start.shape
        return Leaf(name, tuple(start.shape), start.dtype, torch.Tensor) if is_plain and same else None
    if type(start) not in (int, float):
        return None
    if isinstance(after, Number):
        after = after.kind(0)
    if isinstance(after, torch.Tensor):
        return Leaf(name, (), after.dtype, float) if after.is_floating_point() and not after.ndim else None
    if type(after) not in (int, float):
        return None
    kind = float if float in (type(start), type(after)) else int
    return Leaf(name, (), torch.get_default_dtype() if kind is float else torch.int64, kind)


def started(module: torch.nn.Module, attributes: Sequence[Attribute]) -> dict[str, torch.Tensor]:
    """Return the values that a module's attributes have, by the names of their leaves."""
    values = {}
    for attribute in attributes:
        found = pytree.tree_leaves(attribute.part_of(module)[attribute.name])
        for leaf, x in zip(attribute.leaves, found, strict=True):
            wide = torch.float64 if leaf.kind is float else leaf.dtype
            values[leaf.name] = x.detach() if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=wide)
    return values


def start(module: torch.nn.Module, attributes: Sequence[Attribute], values: Mapping[str, torch.Tensor]) -> None:
    """Give a module's attributes values, by the names of their leaves."""
    for attribute in attributes:
        new = [
            leaf.kind(values[leaf.name].item()) if leaf.kind in (int, float) else values[leaf.name].to(leaf.dtype)
            for leaf in attribute.leaves
        ]
        attribute.part_of(module)[attribute.name] = pytree.tree_unflatten(new, attribute.structure)


class Carrying(torch.nn.Module):
    """The buffers of attributes, by the numbers of their leaves.

    Args:
      attributes: The attributes.
      mode: Mode of the fake tensors.
      dtype: Dtype that floating-point ones are converted to; None for none. A number is float32 at least.
    """

    def __init__(self, attributes: Sequence[Attribute], mode: FakeTensorMode, dtype: str | None) -> None:
        super().__init__()
        self.attributes = attributes
        self.leaves = [leaf for attribute in attributes for leaf in attribute.leaves]
        self.undetached = set[str]()
        with mode:
            for i, leaf in enumerate(self.leaves):
                self.register_buffer(str(i), torch.empty(leaf.shape, dtype=_converted(leaf, dtype)))

    @contextlib.contextmanager
    def during(self, module: torch.nn.Module) -> Iterator[None]:
        """Give a module the buffers in the place of its attributes while entered, and write these to them on exit."""
        buffers = iter(self._buffers[str(i)] for i, _ in enumerate(self.leaves))
        before = [attribute.part_of(module)[attribute.name] for attribute in self.attributes]
        for attribute in self.attributes:
            given = [_given(next(buffers), leaf) for leaf in attribute.leaves]
            attribute.part_of(module)[attribute.name] = pytree.tree_unflatten(given, attribute.structure)
        try:
            yield
            self._write(module)
        finally:
            for attribute, value in zip(self.attributes, before, strict=True):
                attribute.part_of(module)[attribute.name] = value

    def _write(self, module: torch.nn.Module) -> None:
        """Write the values of a module's attributes to the buffers."""
        memory, numbers = Memory(own_tensors(module)), iter(range(len(self.leaves)))
        new: list[tuple[torch.Tensor, Any]] = []
        for attribute in self.attributes:
            found, structure = pytree.tree_flatten(attribute.part_of(module).get(attribute.name))
            if structure != attribute.structure:
                raise _replaced(attribute, "another structure")
            for leaf, x in zip(attribute.leaves, found, strict=True):
                buffer = self._buffers[str(next(numbers))]
                assert buffer is not None
                new.append((buffer, self._value(attribute, leaf, buffer, x, memory)))
        # All are read before one is written: they may have changed places.
        for buffer, value in new:
            buffer.copy_(value)

    def _value(self, attribute: Attribute, leaf: Leaf, buffer: torch.Tensor, x: Any, memory: Memory) -> torch.Tensor:
        if isinstance(x, Number):
            x = x.tensor
        if type(x) in (int, float):
            return torch.full_like(buffer, x)
        if not isinstance(x, torch.Tensor):
            raise _replaced(attribute, f"a {type(x).__name__}")
        if x.shape != buffer.shape or (leaf.kind is torch.Tensor and x.dtype != buffer.dtype):
            raise _replaced(attribute, "another shape or dtype")
        if (owner := memory.owner(x)) is not None:
            raise refusal(
                f"the attribute {attribute.path!r} is in the memory of {owner!r} after a call",
                "clone it, as by detach().clone()",
                attribute.source,
            )
        if x.requires_grad:
            self.undetached.add(leaf.name)
        return x.detach().clone()

    def refuse_undetached(self, state: Collection[str]) -> None:
        """Refuse attributes in a state whose gradient would go on into earlier calls."""
        for attribute in self.attributes:
            for leaf in attribute.leaves:
                if leaf.name in self.undetached and leaf.name in state:
                    raise refusal(
                        f"the attribute {attribute.path!r} is carried from call to call with its gradient, for which "
                        "the second backward() raises an error",
                        f"assign its values alone, as self.{attribute.name} = x.detach()",
                        attribute.source,
                    )


def _given(buffer: Any, leaf: Leaf) -> Any:
    """Return a buffer as `forward` sees it: a copy, which backward passes may need when the buffer is written."""
    return buffer.clone() if leaf.kind is torch.Tensor else Number.of(buffer.clone(), leaf.kind)


def _converted(leaf: Leaf, dtype: str | None) -> torch.dtype:
    if dtype is None or not leaf.dtype.is_floating_point:
        return leaf.dtype
    to: torch.dtype = getattr(torch, dtype)
    return to if leaf.kind is torch.Tensor or to.itemsize >= 4 else torch.float32


def _replaced(attribute: Attribute, by: str) -> UserError:
    return refusal(
        f"the attribute {attribute.path!r} is replaced by {by} after a call",
        "keep its shape and dtype",
        attribute.source,
    )
