"""Kinds and source lines of the operations of a compiled program, read from its text."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from jaxtrain.cost import SourceLines
from jaxtrain.profile.kinds import kind_of_opcodes

# Instructions that contain others, whose time is counted instead.
_CONTAINERS = {"while", "conditional", "call"}
_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (?:\([^=]*?\)|\S+) ([\w-]+)\(")
_CALLS = re.compile(r"\bcalls=%?([\w.-]+)")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
# Functions whose matrix products and elementwise operations count as attention.
ATTENTION = {"attention", "dot_product_attention", "formula", "_forward_rows", "_backward_rows"}


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
    frames = SourceLines(hlo)
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


def _operation(opcode: str, text: str, bodies: Mapping[str, set[str]], frames: SourceLines) -> Operation:
    called, target = _CALLS.search(text), _TARGET.search(text)
    fused = bodies.get(called[1], set()) if called else set()
    kind = kind_of_opcodes({opcode, *fused}, target[1] if target else "")
    line, functions = frames.locate(text)
    attention = kind in ("matmul", "elementwise") and not ATTENTION.isdisjoint(functions)
    return Operation("attention" if attention else kind, line)
