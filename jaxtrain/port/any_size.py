"""The source of a model for batches of any size, as of texts of many lengths.

The source of a model has the sizes of its example in it. Here the sources for examples of several sizes are compared.
Where one has another number than the others, this is in all of them a size of an argument of its function, a product
of two of them, or one with a term or a factor, and is written so. Sources that differ in anything else have no common
one.
"""

import ast
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from string import ascii_lowercase
from typing import Any, NamedTuple

import torch

from jaxtrain.port.batch_shapes import Shapes

Batch = Mapping[str, torch.Tensor]


class Axes(NamedTuple):
    """The axes of batches whose sizes differ.

    Attributes:
      places: Arrays and axes that have a size, by the letter that stands for it.
      numbers: The sizes that were seen, by letter.
    """

    places: Mapping[str, Sequence[tuple[str, int]]]
    numbers: Mapping[str, Sequence[int]]

    def shapes(self, batch: Batch, ranges: Mapping[str, tuple[int, int]]) -> Shapes:
        """Return the shapes of batches like one, with sizes of these ranges."""
        letters = {place: letter for letter, places in self.places.items() for place in places}
        sizes = {name: tuple(letters.get((name, i), n) for i, n in enumerate(x.shape)) for name, x in batch.items()}
        return Shapes(sizes, ranges)

    def resized(self, batch: Batch, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Return a batch with other sizes, whose values are repeated or left out."""
        found = dict(batch)
        for letter, places in self.places.items():
            for name, axis in places:
                index = torch.arange(sizes[letter]) % found[name].shape[axis]
                found[name] = found[name].index_select(axis, index)
        return found


def axes_of(batches: Sequence[Batch]) -> Axes | None:
    """Return the axes in which batches differ; None if they differ in more than sizes, or in those of the rows alone.

    A DataLoader whose rows alone differ has two sizes of batches, each of which has a model.
    """
    first = batches[0]
    if any({name: x.ndim for name, x in batch.items()} != {n: x.ndim for n, x in first.items()} for batch in batches):
        return None
    found: dict[tuple[int, ...], list[tuple[str, int]]] = {}
    for name, x in first.items():
        for axis in range(x.ndim):
            numbers = tuple(batch[name].shape[axis] for batch in batches)
            if len({*numbers}) > 1:
                found.setdefault(numbers, []).append((name, axis))
    if not found or all(axis == 0 for places in found.values() for _, axis in places):
        return None
    if len(found) > len(ascii_lowercase):
        return None
    places = dict(zip(ascii_lowercase, found.values(), strict=False))
    return Axes(places, dict(zip(ascii_lowercase, found, strict=False)))


def sample_sizes(axes: Axes) -> Iterator[list[dict[str, int]]]:
    """Yield what sizes the sources are compared for, each with what is taken if PyTorch's module refuses it.

    A size of 1 is none of them: PyTorch broadcasts it.
    """
    numbers = [*axes.numbers.items()]
    low = {letter: min(seen) for letter, seen in numbers}
    high = {letter: max(seen) for letter, seen in numbers}
    yield [{letter: min(2 + i, low[letter]) for i, letter in enumerate(low)}, low]
    more = (1.0, 0.5, 0.25, 0.0)  # what a table of positions may have
    yield [{letter: high[letter] + int(high[letter] * x) + i for i, letter in enumerate(high)} for x in more]
    yield [{letter: (low[letter] + high[letter]) // 2 + i for i, letter in enumerate(low)}]


def common_source(texts: Sequence[str]) -> str | None:
    """Return the source of a model for the sizes of several examples; None if there is none.

    Args:
      texts: The source for each example. The sizes of arguments are those that docstrings have.

    Example:
      >>> texts = [f"def f(x):\\n    'F: x [{n}] -> []'\\n    return x + {n}\\n" for n in (3, 5)]
      >>> print(common_source(texts).splitlines()[-1].strip())
      return x + x.shape[0]
    """
    found: list[tuple[ast.Constant, str]] = []
    try:
        for nodes in zip(*(ast.parse(text).body for text in texts), strict=True):
            arguments = _arguments(nodes) if isinstance(nodes[0], ast.FunctionDef) else {}
            for constants in _differences(nodes):
                numbers = [int(ast.literal_eval(node)) for node in constants]
                found.append((constants[0], _expression(numbers, arguments)))
    except (_OtherError, ValueError):
        return None
    lines = texts[0].splitlines(keepends=True)
    for node, expression in sorted(found, key=lambda pair: (pair[0].lineno, pair[0].col_offset), reverse=True):
        line = lines[node.lineno - 1].encode()
        lines[node.lineno - 1] = (line[: node.col_offset] + expression.encode() + line[node.end_col_offset :]).decode()
    return "".join(lines)


class _OtherError(Exception):
    """Sources differ in more than sizes."""


def _differences(nodes: Sequence[Any]) -> Iterator[Sequence[ast.Constant]]:
    """Yield the numbers that differ between equal trees.

    Raises:
      _OtherError: They differ in anything else, but for docstrings.
    """
    first = nodes[0]
    if any(type(node) is not type(first) for node in nodes):
        raise _OtherError
    if isinstance(first, ast.Constant) and any(node.value != first.value for node in nodes):
        if any(type(node.value) not in (int, float) or node.value != int(node.value) for node in nodes):
            raise _OtherError
        yield nodes
    elif isinstance(first, ast.AST):
        for name in first._fields:
            values = [getattr(node, name) for node in nodes]
            if name == "body" and isinstance(first, ast.FunctionDef) and ast.get_docstring(first) is not None:
                values = [value[1:] for value in values]
            if not (isinstance(first, ast.Constant) and name == "value"):
                yield from _differences(values)
    elif isinstance(first, list):
        if any(len(node) != len(first) for node in nodes):
            raise _OtherError
        for items in zip(*nodes, strict=True):
            yield from _differences(items)
    elif any(node != first for node in nodes):
        raise _OtherError


_ARGUMENT = re.compile(r"(\w+)(?: \w+)? \[([\d, ]*)\]")
_MOST_TERM = 8
"""Largest term or factor of a size."""


def _arguments(functions: Sequence[ast.FunctionDef]) -> dict[str, tuple[int, ...]]:
    """Return the sizes of the arguments of a function in each source, by the expression for them."""
    names = [node for node in ast.walk(functions[0]) if isinstance(node, ast.Name)]
    stored = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    inner = {arg.arg for node in ast.walk(functions[0]) if node is not functions[0] for arg in _parameters(node)}
    own = {arg.arg for arg in _parameters(functions[0])} - stored - inner
    of_each = []
    for function in functions:
        text = " ".join((ast.get_docstring(function) or "").partition(" ->")[0].split())
        of_each.append(
            {name: [int(n) for n in sizes.split(",") if n.strip()] for name, sizes in _ARGUMENT.findall(text)}
        )
    return {
        f"{name}.shape[{axis}]": tuple(sizes[name][axis] for sizes in of_each)
        for name in of_each[0]
        if name in own and all(len(sizes.get(name, ())) == len(of_each[0][name]) for sizes in of_each)
        for axis in range(len(of_each[0][name]))
    }


def _parameters(node: ast.AST) -> list[ast.arg]:
    return node.args.args if isinstance(node, ast.FunctionDef | ast.Lambda) else []


def _expression(numbers: Sequence[int], arguments: Mapping[str, tuple[int, ...]]) -> str:
    """Return an expression for a number that differs between sources.

    Raises:
      _OtherError: There is none.
    """
    varying = {text: sizes for text, sizes in arguments.items() if len({*sizes}) > 1}
    for text, sizes in varying.items():
        if sizes == tuple(numbers):
            return text
    for text, sizes in varying.items():
        for term in (term for n in range(1, _MOST_TERM + 1) for term in (n, -n)):
            if all(size + term == number for size, number in zip(sizes, numbers, strict=True)):
                return f"({text} {'+' if term > 0 else '-'} {abs(term)})"
    for (one, first), (other, second) in itertools.combinations_with_replacement(varying.items(), 2):
        if all(x * y == number for x, y, number in zip(first, second, numbers, strict=True)):
            return f"({one} * {other})"
    for text, sizes in varying.items():
        factor, rest = divmod(numbers[0], sizes[0])
        if not rest and all(size * factor == number for size, number in zip(sizes, numbers, strict=True)):
            return f"({factor} * {text})"
    raise _OtherError
