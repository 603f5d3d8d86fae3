"""The functions of a file: their names, what they take and return, types and docstrings."""

import builtins
import keyword
import textwrap
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from jaxtrain.torch_import.graph import Spec, dtype_of
from jaxtrain.torch_import.source.identifiers import RESERVED
from jaxtrain.torch_import.source.ruff_format import WIDTH


class Function(NamedTuple):
    """A written function.

    Attributes:
      name: Its name.
      flags: Which of "params", "buffers", "keys" and "train" it takes.
      inputs: The values that it takes besides, with their names in it.
      outputs: The values that it returns, before its new state.
      output_names: Their names in it; "" for those without.
      has_new_state: Whether it returns new state.
    """

    name: str
    flags: frozenset[str]
    inputs: dict[str, str]
    outputs: tuple[str, ...]
    output_names: tuple[str, ...]
    has_new_state: bool


class Functions:
    """The functions of a file, by text."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}  # name -> text
        self._written: dict[str, tuple[str, str]] = {}  # name -> class, text

    def add(self, name: str, owner: str, text: Callable[[str, str], str], doc: str = "") -> str:
        """Add a function unless its class has an equal one; return its name.

        Args:
          name: Its name, if no other function has it.
          owner: The class.
          text: From the name and a part of the docstring that equal functions need not share to the text.
          doc: That part.
        """
        is_taken = name in RESERVED or keyword.iskeyword(name) or hasattr(builtins, name)
        for candidate in (*([] if is_taken else [name]), *(f"{name}_{i}" for i in range(2, 1000))):
            written = (owner, text(candidate, ""))
            if self._written.setdefault(candidate, written) == written:
                self.texts.setdefault(candidate, text(candidate, doc))
                return candidate
        raise AssertionError("more names than functions")


def typed(name: str) -> str:
    """Return an argument with its type."""
    types = {"params": "Tensors", "buffers": "Tensors", "keys": "Keys", "train": "bool"}
    return f"{name}: {types.get(name, 'Array')}"


def result_type(types: Sequence[str]) -> str:
    """Return the type of a function's result."""
    return types[0] if len(types) == 1 else f"tuple[{', '.join(types)}]" if types else "None"


def shape_of(spec: Spec) -> str:
    """Return a shape as text, with the dtype unless it is floating-point.

    >>> shape_of(Spec((2, 3), "int64"))
    'int32 [2, 3]'
    """
    shape = str([*spec.shape])
    dtype = dtype_of(spec.dtype)
    return shape if jnp.issubdtype(dtype, jnp.floating) else f"{dtype} {shape}"


def docstring(summary: str, shapes: str) -> list[str]:
    """Return the lines of a function's docstring."""
    if not shapes or len(line := f'    """{summary}: {shapes}."""') <= WIDTH:
        return [line if shapes else f'    """{summary}."""']
    rest = textwrap.wrap(shapes, WIDTH, initial_indent="    ", subsequent_indent="    ", break_long_words=False)
    return [f'    """{summary}.', "", *rest, '    """']
