"""What a script computes between a batch and `backward`: calls of PyTorch's functions and of modules, in order.

The calls are those of the script itself. What a module or a function of PyTorch calls in turn is part of that call.
"""

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from jaxtrain.torch_import import Line

Step = tuple[str, Any]
"""A step into a structure: ("item", key) or ("attribute", name)."""


class Value(NamedTuple):
    """A tensor of a recording, by number; negative ones are no tensors of the script."""

    number: int

    @property
    def is_number(self) -> bool:
        """Whether it was a Python number in the script, which differs from update to update."""
        return -ALIAS < self.number < 0


ALIAS = 10**6
"""Numbers below the negative of this one are tensors that are read under another number as well."""


class Origin(enum.Flag):
    """What a tensor's values depend on."""

    MODEL = enum.auto()
    """Parameters, buffers, or what modules return."""
    SHAPE = enum.auto()
    """The shape of such a tensor, as those of `zeros_like`."""
    BATCH = enum.auto()
    """A batch of a DataLoader, or what is called between it and `backward`."""

    OTHER = 0


OF_BATCH = Origin.MODEL | Origin.SHAPE | Origin.BATCH
"""A program of these calls begins with the batches of a DataLoader."""


class Ambient(NamedTuple):
    """What decides how PyTorch computes a call, besides its arguments.

    Attributes:
      grad: Whether gradients are recorded.
      autocast: The dtype and the device type of the autocast region around the call; None outside.
    """

    grad: bool
    autocast: tuple[torch.dtype, str] | None


class Call(NamedTuple):
    """One call.

    Attributes:
      function: The function, or the module.
      args: Its positional arguments, with `Value` in place of tensors.
      kwargs: Its keyword arguments, likewise.
      results: The tensors of its result that were not known before, and where they are in it.
      writes: The tensors that it changes in place.
      ambient: What it is computed under.
      line: The innermost line of the script that is executed.
      random: State of PyTorch's generator before the call; None for one that draws nothing.
      origin: What its results depend on.
      own: The parameters and buffers of a module.
      evaluated: Identities of the modules in evaluation mode, of a module and its parts.
      is_repeated: Whether the program makes a call again that an update before has made, for the same result.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[tuple[tuple[Step, ...], Value], ...]
    writes: tuple[Value, ...]
    ambient: Ambient
    line: Line
    random: torch.Tensor | None
    origin: Origin
    own: tuple[Value, ...] = ()
    evaluated: frozenset[int] = frozenset()
    is_repeated: bool = False

    def reads(self) -> Iterator[Value]:
        """Yield the tensors among the arguments."""
        yield from values_in((self.args, self.kwargs))

    @property
    def sets_data(self) -> bool:
        """Whether it is `x.data = y`."""
        return _is_attribute(self.function, "__set__", "data")

    @property
    def reads_data(self) -> bool:
        """Whether it is `x.data`."""
        return _is_attribute(self.function, "__get__", "data")


def _is_attribute(function: Any, method: str, name: str) -> bool:
    is_method = getattr(function, "__name__", "") == method
    return is_method and getattr(getattr(function, "__self__", None), "__name__", "") == name


class Program(NamedTuple):
    """The calls that a loss depends on.

    Attributes:
      calls: The calls, in their order.
      loss: The tensor that `backward` was called on.
      roots: The tensors that the calls read and none of them made.
      kept: Other tensors that the calls make, which a later program reads.
      parts: The losses that the loss is the sum of, if `backward` was called on each.
      leaves: The roots that require a gradient and are no parameters.
    """

    calls: tuple[Call, ...]
    loss: Value
    roots: tuple[Value, ...]
    kept: tuple[Value, ...] = ()
    parts: tuple[Value, ...] = ()
    leaves: frozenset[Value] = frozenset()


class Interval(NamedTuple):
    """What a script called between two calls of `backward`.

    Attributes:
      calls: The calls, in their order.
      loss: The tensor that `backward` was called on.
      memory: From a tensor to the memory that it is in.
      given: What the tensors were that are no parameters and were not computed by the model in this interval, when
        the model or another followed call first read them.
      identities: Identities of the tensors that exist when it ends.
      sizes: Sizes of the tensors that it made.
      carried: The tensors that were there before it, and that the model computed.
      parts: As of `Program`.
      leaves: The tensors that require a gradient, are no parameters, and were not computed.
    """

    calls: tuple[Call, ...]
    loss: Value
    memory: Mapping[Value, int]
    given: Mapping[Value, torch.Tensor]
    identities: Mapping[Value, int]
    sizes: Mapping[Value, tuple[int, ...]]
    carried: frozenset[Value]
    parts: tuple[Value, ...] = ()
    leaves: frozenset[Value] = frozenset()

    def program(self, follows: Callable[[Call], bool], kept: Sequence[Value] = ()) -> Program:
        """Return the calls that the loss depends on.

        Args:
          follows: Whether a call may be in the program; the results of others are its roots.
          kept: Other tensors that it makes.
        """
        wanted = {self.loss, *kept}
        places, found = {self.memory[value] for value in wanted}, list[Call]()
        for call in reversed(self.calls):
            makes = not wanted.isdisjoint(value for _, value in call.results)
            # A call that changes the memory of a needed tensor is needed.
            if (makes or any(self.memory[value] in places for value in call.writes)) and follows(call):
                found.append(call)
                wanted.update(call.reads())
                places.update(self.memory[value] for value in (*call.reads(), *call.own))
        found.reverse()
        made = {value for call in found for _, value in call.results}
        read = dict.fromkeys(value for call in found for value in call.reads())
        if self.loss not in made:
            read[self.loss] = None
        roots = tuple(value for value in read if value not in made)
        return Program(tuple(found), self.loss, roots, tuple(kept), self.parts, self.leaves.intersection(roots))


def separate(call: Call) -> list[Call]:
    """Return a call of lists of tensors, as `torch._foreach_add_`, as calls of one tensor after another."""
    name = getattr(call.function, "__name__", "")
    function = getattr(torch.Tensor, name.removeprefix(_FOREACH), None)
    if not name.startswith(_FOREACH) or function is None:
        return [call]
    found = []
    for i in range(len(call.args[0])):
        args = tuple(x[i] if isinstance(x, list | tuple) and not isinstance(x, Value) else x for x in call.args)
        results = tuple((path[1:], value) for path, value in call.results if path[:1] == (("item", i),))
        writes = tuple(value for value in call.writes if value == args[0])
        found.append(call._replace(function=function, args=args, results=results, writes=writes))
    return found


_FOREACH = "_foreach_"
"""Prefix of PyTorch's functions of lists of tensors."""


def values_in(argument: Any) -> Iterator[Value]:
    """Yield the tensors in an argument."""
    if isinstance(argument, Value):
        yield argument
    elif isinstance(argument, Mapping):
        yield from values_in(tuple(argument.values()))
    elif isinstance(argument, slice):
        yield from values_in((argument.start, argument.stop, argument.step))
    elif isinstance(argument, tuple | list):
        for item in argument:
            yield from values_in(item)


def mapped(argument: Any, to: Callable[[Value], Value]) -> Any:
    """Return an argument with other tensors, which are asked for in the order of `values_in`."""
    if isinstance(argument, Value):
        return to(argument)
    if isinstance(argument, Mapping):
        return {key: mapped(item, to) for key, item in argument.items()}
    if isinstance(argument, slice):
        return slice(*(mapped(x, to) for x in (argument.start, argument.stop, argument.step)))
    if isinstance(argument, tuple | list):
        items = [mapped(item, to) for item in argument]
        return items if isinstance(argument, list) else tuple(items)
    return argument


def with_values(argument: Any, of: Callable[[torch.Tensor], Value]) -> Any:
    """Return an argument with `of(tensor)` in place of each tensor; named tuples are tuples."""
    if isinstance(argument, torch.Tensor):
        return of(argument)
    if isinstance(argument, slice):
        return slice(*(with_values(x, of) for x in (argument.start, argument.stop, argument.step)))
    if isinstance(argument, tuple | list):
        items = [with_values(item, of) for item in argument]
        return items if isinstance(argument, list) else tuple(items)
    if isinstance(argument, Mapping):
        return {key: with_values(item, of) for key, item in argument.items()}
    return argument


def tensors_in(result: Any, path: tuple[Step, ...] = ()) -> Iterator[tuple[tuple[Step, ...], torch.Tensor]]:
    """Yield the tensors of a result, in containers and in attributes, with their places."""
    if isinstance(result, torch.Tensor):
        yield path, result
    elif isinstance(result, Mapping):
        for key, item in result.items():
            yield from tensors_in(item, (*path, ("item", key)))
    elif isinstance(result, tuple | list):
        for i, item in enumerate(result):
            yield from tensors_in(item, (*path, ("item", i)))
    elif hasattr(result, "__dict__") and not isinstance(result, type | torch.nn.Module) and len(path) < _DEPTH:
        for name, item in vars(result).items():
            yield from tensors_in(item, (*path, ("attribute", name)))


_DEPTH = 3
"""Levels of a result that are searched for tensors in attributes."""


def at(result: Any, path: Sequence[Step]) -> Any:
    """Return what is at a place of a result."""
    for kind, key in path:
        result = result[key] if kind == "item" else getattr(result, key)
    return result
