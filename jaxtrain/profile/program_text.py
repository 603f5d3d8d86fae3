"""Kinds and source lines of the operations of a compiled program, read from its text."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtrain.profile.kinds import kind_of_opcodes
from jaxtrain.program.hlo import Computation, Instruction, SourceLines, parse_hlo

# Instructions that contain others, whose time is counted instead.
_CONTAINERS = {"while", "conditional", "call"}
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
    frames, (computations, _) = SourceLines(hlo), parse_hlo(hlo)
    return {
        x.name: _operation(x, computations, frames)
        for computation in computations.values()
        for x in computation.instructions.values()
        if x.opcode not in _CONTAINERS | {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}
    }


def _operation(x: Instruction, computations: Mapping[str, Computation], frames: SourceLines) -> Operation:
    fused = (y.opcode for name in x.fused for y in computations[name].instructions.values())
    kind = kind_of_opcodes({x.opcode, *fused}, x.target)
    line, functions = frames.locate(x.attributes)
    attention = kind in ("matmul", "elementwise") and not ATTENTION.isdisjoint(functions)
    return Operation("attention" if attention else kind, line)
