"""The text of a compiled program: its computations, their instructions, and the source lines they come from.

The text is what `jax.stages.Compiled.as_text()` returns. `jaxtrain.cost.communication` says why not the HLO proto.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from jaxtrain.program.loops import most_times

_HEADER = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([a-z][\w-]*)\(([^)]*)\)(.*)$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:body|condition|to_apply|calls|(?:true|false)_computation)=%?([\w.-]+)")
_BODY = re.compile(r"\bbody=%?([\w.-]+)")
_FUSED = re.compile(r"\bcalls=%?([\w.-]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations|called_computations)=\{(.*?)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_INDEX = re.compile(r", index=(\d+)")
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_SOURCE = re.compile(r'source_file="([^"]+)" source_line=(\d+)')
_TABLE = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)$")
_NUMBER = re.compile(r"(\w+)=(\d+)")
# Libraries, and decorators that they use; an operation is attributed to the line that called them.
LIBRARIES = re.compile(r"/site-packages/(jax|jaxlib|flax|optax)/|/python3\.\d+/contextlib\.py$")


@dataclass(frozen=True)
class Array:
    """An array in the type of an instruction.

    Attributes:
      dtype: HLO's name of the dtype, such as f32.
      shape: The shape.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> float:
        """Size in bytes."""
        return self.size * element_bytes(self.dtype)


@dataclass(frozen=True)
class Instruction:
    """An instruction of a computation.

    Attributes:
      name: Its name.
      shape: Text of its type.
      opcode: Its opcode.
      operands: Text of its operands.
      attributes: Text of what follows them.
    """

    name: str
    shape: str
    opcode: str
    operands: str
    attributes: str

    @cached_property
    def results(self) -> tuple[Array, ...]:
        """The arrays of the result; those of a tuple in order."""
        found = _ARRAY.findall(self.shape)
        if len(found) != self.shape.count("["):
            raise ValueError(f"{self.name} has a type of another format: {self.shape}")
        return tuple(Array(dtype, tuple(parse_numbers(shape))) for dtype, shape in found)

    @property
    def transferred(self) -> tuple[Array, ...]:
        """The arrays of the result of a collective, or of the one that it starts."""
        if self.opcode == "ragged-all-to-all-start":
            return (min(self.results[0], self.results[-1], key=lambda array: array.size_bytes),)
        # The first half are the operands.
        both = self.opcode in ("all-gather-start", "all-to-all-start", "reduce-scatter-start")
        return self.results[len(self.results) // 2 :] if both else self.results

    @cached_property
    def operand_names(self) -> tuple[str, ...]:
        """Names of the operands."""
        return tuple(re.findall(r"%([\w.-]+)", self.operands))

    @cached_property
    def called(self) -> list[str]:
        """Names of the computations that it calls."""
        branches = _BRANCHES.search(self.attributes)
        return re.findall(r"[\w.-]+", branches[1]) if branches else _CALLED.findall(self.attributes)

    @property
    def body(self) -> list[str]:
        """Name of the body of a loop, in a list."""
        return _BODY.findall(self.attributes)

    @property
    def fused(self) -> list[str]:
        """Name of the computation that a fusion or an asynchronous instruction consists of, in a list."""
        return _FUSED.findall(self.attributes)

    @property
    def trips(self) -> int | None:
        """The known number of iterations of a loop."""
        found = _TRIPS.search(self.attributes)
        return int(found[1]) if found else None

    @property
    def most_trips(self) -> int | None:
        """The largest number of iterations of a loop, if it is known or one of its scopes says it."""
        return most_times(self.op_name) if self.trips is None else self.trips

    @property
    def target(self) -> str:
        """Name of the function that a custom-call calls; empty for other instructions."""
        found = _TARGET.search(self.attributes)
        return found[1] if found else ""

    @property
    def op_name(self) -> str:
        """Scopes and the primitive that it was traced from."""
        found = _OP_NAME.search(self.attributes)
        return found[1] if found else ""

    @property
    def index(self) -> int:
        """Index of a get-tuple-element."""
        found = _INDEX.search(self.attributes)
        if found is None:
            raise ValueError(f"{self.name} is a {self.opcode} without an index")
        return int(found[1])


@dataclass(frozen=True)
class Computation:
    """A computation of a program.

    Attributes:
      instructions: The instructions by name, in the order in which they are scheduled.
      root: Name of the instruction whose result is returned.
    """

    instructions: dict[str, Instruction]
    root: str

    @cached_property
    def users(self) -> Mapping[str, list[tuple[Instruction, int]]]:
        """For each value, the instructions that use it, with the index of the operand."""
        found = defaultdict(list)
        for user in self.instructions.values():
            for i, operand in enumerate(user.operand_names):
                found[operand].append((user, i))
        return found

    def parameter(self, i: int) -> str:
        """Return the name of the i-th parameter."""
        of_opcode = (x for x in self.instructions.values() if x.opcode == "parameter")
        return next(x.name for x in of_opcode if x.operands == str(i))


def parse_hlo(hlo: str) -> tuple[dict[str, Computation], str]:
    """Return the computations of a program by name, and the name of the entry computation.

    Raises:
      ValueError: It is not the text of a compiled program.
    """
    bodies: dict[str, dict[str, Instruction]] = {}
    roots: dict[str, str] = {}
    entry = inside = ""
    for text in hlo.splitlines():
        if header := _HEADER.match(text):
            inside = header[2]
            bodies[inside] = {}
            entry = inside if header[1] else entry
        elif text.startswith("}"):
            inside = ""
        elif inside:
            found = _INSTRUCTION.match(text)
            if found is None:
                raise ValueError(f"not an instruction of a compiled program: {text.strip()[:200]}")
            root, name, *rest = found.groups()
            bodies[inside][name] = Instruction(name, *rest)
            if root:
                roots[inside] = name
    if not entry:
        raise ValueError("not the text of a compiled program: it has no ENTRY")
    return {name: Computation(body, roots.get(name, "")) for name, body in bodies.items()}, entry


class SourceLines:
    """The source lines of instructions, from the tables of stack frames at the start of a program's text."""

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


def parse_numbers(listed: str) -> list[int]:
    """Return the numbers of a list such as "2,3,4"."""
    return [int(n) for n in listed.split(",") if n]


def element_bytes(dtype: str) -> float:
    """Return the bytes of an element: 4 for "f32", 1 for "f8e4m3fn" and "pred", 0.5 for "s4"."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) / 8 if bits else {"pred": 1.0, "token": 0.0, "opaque": 0.0}[dtype]
