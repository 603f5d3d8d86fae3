"""The kernels and library calls that a program for a GPU launches, how often, and the bytes that they move.

A launch reads its operands and writes its results in the GPU's memory, other than the operations inside of a fusion.
Where it takes a slice of an operand, or updates a slice of an array in place, the slice counts, and where it adds rows
to an array, as the gradient of an embedding does, those rows. A loop counts as often as it runs, one of unknown length
as often as its scope says that it may (`jaxtrain.passes.at_most`), or once, and every branch of a conditional
counts.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from jaxtrain.program.hlo import Computation, Instruction, parse_hlo

# Instructions without a kernel; those with computations contain launches instead.
NO_KERNEL = {"parameter", "constant", "bitcast", "get-tuple-element", "tuple", "after-all", "opt-barrier"}
NO_KERNEL |= {"partition-id", "replica-id", "while", "conditional", "call"}
_CONTAINERS = {"while", "conditional", "call"}
# Bytes that a library reserves to work in, which appear as a result.
_WORKSPACE = re.compile(r", s8\[\d+\]\{0\}\)$")
# Reserves an array that is not filled.
_ALLOCATION = "AllocateBuffer"
_TRITON = '"__triton'
_LIBRARIES = {
    "__cublas": "cuBLAS product",
    "__cudnn$fmha": "cuDNN attention",
    "__cudnn$conv": "cuDNN convolution",
    "__triton": "Triton kernel",
    "__gpu$xla.gpu.triton": "Pallas kernel",
    "triton_kernel_call": "Pallas kernel",
}
_ATTENTION = re.compile(r"/fused_attention")
PRODUCTS = ("cuBLAS product", "cuDNN attention", "cuDNN convolution", "Pallas attention")
"""Kinds of launches that compute a product, a convolution or attention by a library or a kernel of its own."""
_COLLECTIVE = re.compile(r"all-gather|all-reduce|reduce-scatter|all-to-all|collective-\w+|ragged-all-to-all")


@dataclass(frozen=True)
class Launch:
    """Launches of one instruction.

    Attributes:
      instruction: The instruction.
      computation: Name of the computation that contains it.
      kind: What it launches, such as "cuBLAS product".
      times: How often it runs in one run of the program.
      moved: Bytes read and written in one launch.
    """

    instruction: Instruction
    computation: str
    kind: str
    times: int
    moved: float

    @property
    def moved_in_all(self) -> float:
        """Bytes read and written in one run of the program."""
        return self.times * self.moved


@dataclass(frozen=True)
class Program:
    """The text of a compiled program, parsed.

    Attributes:
      computations: The computations by name.
      entry: Name of the entry computation.
    """

    computations: Mapping[str, Computation]
    entry: str

    @classmethod
    def parse(cls, hlo: str) -> "Program":
        """Parse the text of a compiled program."""
        return cls(*parse_hlo(hlo))

    @cached_property
    def runs(self) -> Counter[str]:
        """How often each computation runs."""
        counted: Counter[str] = Counter()
        self._count(self.entry, 1, counted)
        return counted

    @cached_property
    def scheduled(self) -> set[str]:
        """Names of the computations whose instructions are launched one by one: all but the fused ones."""
        found: set[str] = set()
        self._find_scheduled(self.entry, found)
        return found

    @cached_property
    def launches(self) -> tuple[Launch, ...]:
        """All launches."""
        return tuple(self._launches())

    def _launches(self) -> Iterator[Launch]:
        for name in sorted(self.scheduled):
            for x in self.computations[name].instructions.values():
                if (
                    x.opcode not in NO_KERNEL
                    and x.target != _ALLOCATION
                    and not re.search("-(done|update)$|^async-start$", x.opcode)
                ):
                    yield Launch(x, name, launch_kind(x), self.runs[name], self._moved(name, x))

    def _count(self, name: str, times: int, counted: Counter[str]) -> None:
        counted[name] += times
        for x in self.computations[name].instructions.values():
            for called in x.called:
                if called in self.computations:
                    self._count(called, times * (x.most_trips or 1), counted)

    def _find_scheduled(self, name: str, found: set[str]) -> None:
        found.add(name)
        for x in self.computations[name].instructions.values():
            if x.opcode in _CONTAINERS or x.opcode == "async-start":
                # The condition of a loop of known length is not computed.
                for called in x.body if x.trips else x.called:
                    self._find_scheduled(called, found)

    def _moved(self, name: str, x: Instruction) -> float:
        computation = self.computations[name]
        operands = [computation.instructions[o] for o in x.operand_names if o in computation.instructions]
        if x.opcode == "dynamic-update-slice":
            return 2 * result_bytes(operands[1])
        if x.opcode in ("dynamic-slice", "slice", "gather"):
            return 2 * result_bytes(x)
        # A copy of a slice may run beside other launches.
        if x.opcode in ("fusion", "fusion-start") and x.called and x.called[0] in self.computations:
            return _moved_by_fusion(self.computations[x.called[0]])
        return result_bytes(x) + sum(map(result_bytes, operands))


def launch_kind(x: Instruction) -> str:
    """Return what an instruction launches: a library's call, a collective, or the kind of a fusion."""
    if x.opcode == "custom-call":
        kind = next((kind for start, kind in _LIBRARIES.items() if x.target.startswith(start)), x.target)
        return "Pallas attention" if kind == "Pallas kernel" and _ATTENTION.search(x.op_name) else kind
    if x.opcode == "fusion":
        return "Triton fusion" if _TRITON in x.attributes else "fusion"
    return x.opcode.removesuffix("-start")


def is_collective(x: Instruction) -> bool:
    """Return whether an instruction communicates, or starts to."""
    return bool(_COLLECTIVE.match(x.opcode)) and not x.opcode.endswith("-done")


def result_bytes(x: Instruction) -> float:
    """Return the bytes of an instruction's result, without a library's workspace."""
    arrays = x.results[:-1] if x.opcode == "custom-call" and _WORKSPACE.search(x.shape) else x.results
    return sum(array.size_bytes for array in arrays)


def _moved_by_fusion(fused: Computation) -> float:
    read = sum(_read(fused, x.name, result_bytes(x)) for x in fused.instructions.values() if x.opcode == "parameter")
    return read + _written(fused, fused.instructions[fused.root])


def _read(fused: Computation, value: str, whole: float) -> float:
    """Return the bytes that a fusion reads of a parameter: the slices, if it uses nothing else.

    A conversion within a fusion is computed for the elements that are used.
    """
    if value == fused.root:
        return whole
    array = fused.instructions[value].results[0]
    total = 0.0
    for user, i in fused.users.get(value, ()):
        if user.opcode in ("bitcast", "convert"):
            total += _read(fused, user.name, whole)
        elif user.opcode in ("dynamic-slice", "slice") and i == 0:
            total += _read(fused, user.name, result_bytes(user) * whole / array.size_bytes)
        elif user.opcode == "gather" and i == 0:
            total += result_bytes(user) * whole / array.size_bytes
        elif user.opcode == "scatter" and i == 0:
            total += result_bytes(fused.instructions[user.operand_names[-1]])
        elif user.opcode != "dynamic-update-slice" or i != 0:
            return whole
    return min(total, whole)


def _written(fused: Computation, root: Instruction) -> float:
    """Return the bytes that a fusion writes."""
    while root.opcode == "bitcast":
        root = fused.instructions[root.operand_names[0]]
    if root.opcode == "dynamic-update-slice":
        return result_bytes(fused.instructions[root.operand_names[1]])
    if root.opcode == "scatter" and fused.instructions[root.operand_names[0]].opcode == "parameter":
        return min(result_bytes(fused.instructions[root.operand_names[-1]]), result_bytes(root))
    if root.opcode == "tuple":
        return sum(_written(fused, fused.instructions[name]) for name in root.operand_names)
    return result_bytes(root)
