"""Kinds and source lines of the operations of a compiled program, read from its text."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.profile.kinds import kind_of_opcodes

# Instructions that contain others, whose time is counted instead.
_CONTAINERS = {"while", "conditional", "call"}
_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (?:\([^=]*?\)|\S+) ([\w-]+)\(")
_CALLS = re.compile(r"\bcalls=%?([\w.-]+)")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_SOURCE = re.compile(r'source_file="([^"]+)" source_line=(\d+)')
_TABLE = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)$")
_NUMBER = re.compile(r"(\w+)=(\d+)")
# Libraries; an operation is attributed to the line that called them.
LIBRARIES = re.compile(r"/site-packages/(jax|jaxlib|flax|optax)/")
# Functions whose matrix products and elementwise operations count as attention.
ATTENTION = {"attention", "dot_product_attention", "scaled_dot_product_attention"}


@dataclass(frozen=True)
class Operation:
    """An operation of a compiled program.

    Attributes:
      kind: One of `jaxtrain.profile.kinds.KINDS`.
      line: Source line as file:line; empty if it is unknown.
    """

    kind: str
    line: str


def operations(hlo: str) -> dict[str, Operation]:
    """Return the operations of a compiled program by name, without instructions that only contain others.

    Args:
      hlo: The program, as returned by `jax.stages.Compiled.as_text()`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> hlo = jax.jit(lambda a: jnp.tanh(a @ a)).lower(jnp.ones((64, 64))).compile().as_text()
      >>> sorted({operation.kind for operation in operations(hlo).values()})
      ['elementwise', 'matmul']
    """
    frames = _Frames(hlo)
    bodies: dict[str, set[str]] = {}
    found: list[tuple[str, str, str]] = []
    inside = ""
    for text in hlo.splitlines():
        if header := _HEADER.match(text):
            inside = header[1]
            bodies[inside] = set()
        elif instruction := _INSTRUCTION.match(text):
            bodies[inside].add(instruction[2])
            found.append((instruction[1], instruction[2], text))
    return {
        name: _operation(opcode, text, bodies, frames)
        for name, opcode, text in found
        if opcode not in _CONTAINERS | {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}
    }


def _operation(opcode: str, text: str, bodies: Mapping[str, set[str]], frames: "_Frames") -> Operation:
    called, target = _CALLS.search(text), _TARGET.search(text)
    fused = bodies.get(called[1], set()) if called else set()
    kind = kind_of_opcodes({opcode, *fused}, target[1] if target else "")
    line, functions = frames.locate(text)
    attention = kind in ("matmul", "elementwise") and not ATTENTION.isdisjoint(functions)
    return Operation("attention" if attention else kind, line)


class _Frames:
    """The tables of stack frames at the start of a program's text."""

    def __init__(self, hlo: str) -> None:
        self._tables: dict[str, dict[int, str]] = {}
        table: dict[int, str] = {}
        for text in hlo.splitlines():
            if heading := _TABLE.match(text):
                table = self._tables.setdefault(heading[1], {})
            elif text.endswith("{") and _HEADER.match(text):
                break
            elif text[:1].isdecimal():
                number, _, rest = text.partition(" ")
                table[int(number)] = rest.strip('"')

    def locate(self, instruction: str) -> tuple[str, list[str]]:
        """Return file:line of the innermost frame outside of libraries, and the functions of all frames."""
        frame = _FRAME.search(instruction)
        if frame is None:
            source = _SOURCE.search(instruction)
            return (f"{Path(source[1]).name}:{source[2]}" if source else ""), []
        line, innermost, functions, number = "", "", [], int(frame[1])
        while number:
            entry = self._entry("StackFrames", number)
            location = self._entry("FileLocations", entry["file_location_id"])
            functions.append(self._tables["FunctionNames"][location["function_name_id"]])
            file = self._tables["FileNames"][location["file_name_id"]]
            place = f"{short_path(file)}:{location['line']}"
            innermost = innermost or place
            line = line or ("" if LIBRARIES.search(file) else place)
            number = entry["parent_frame_id"] - 1
        return line or innermost, functions

    def _entry(self, table: str, number: int) -> dict[str, int]:
        return {name: int(value) for name, value in _NUMBER.findall(self._tables[table][number])}


def short_path(path: str) -> str:
    """Return the name of a file with its folder."""
    return "/".join(Path(path).parts[-2:])
