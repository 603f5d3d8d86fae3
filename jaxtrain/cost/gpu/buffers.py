"""The arrays that are alive when a scheduled program needs the most memory.

The compiler reports only the size of the peak. Its schedule is in the program's text, so what is alive at each
instruction follows: an array lives from the instruction that computes it to the last one that uses it. An array that
updates an operand in place, as loops do, is that operand, and the result of a fusion takes the place of an operand of
the same size that nothing uses afterwards. The sum differs from the compiler's figure by what it knows better.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jaxtrain.cost.gpu.launches import Program, result_bytes
from jaxtrain.program.hlo import Array, Computation, Instruction, SourceLines

# Instructions whose result is their operand, or a part of it.
_ALIASES = {"bitcast", "opt-barrier", "get-tuple-element", "tuple", "while"}


@dataclass(frozen=True)
class Buffer:
    """Arrays of the same shape in the GPU's memory, computed by the same line.

    Attributes:
      shape: Text of their type, such as bf16[16384,50304].
      size_bytes: Size of one of them.
      count: How many there are.
      op_name: Scopes and the primitive that computes the first of them.
      line: Source line as file:line; empty if it is unknown.
    """

    shape: str
    size_bytes: float
    count: int
    op_name: str
    line: str

    @property
    def total_bytes(self) -> float:
        """Size of all of them."""
        return self.count * self.size_bytes


@dataclass(frozen=True)
class _Peak:
    """The most memory that a computation needs besides its parameters, and the results that are then alive."""

    size_bytes: float
    alive: tuple[tuple[Instruction, int, float], ...]


def peak_buffers(program: Program, lines: SourceLines, most: int = 10) -> tuple[float, list[Buffer]]:
    """Return the bytes of temporaries alive at the peak of a program, and the largest of them.

    Args:
      program: The program.
      lines: Source lines of its instructions.
      most: Number of buffers to return.
    """
    peak = _peak(program, program.entry)
    groups: dict[tuple[str, float, str], list[str]] = {}
    for x, i, size in peak.alive:
        key = _text(x.results[i]), size, lines.locate(x.attributes)[0]
        groups.setdefault(key, []).append(x.op_name)
    buffers = [Buffer(shape, size, len(names), names[0], line) for (shape, size, line), names in groups.items()]
    return peak.size_bytes, sorted(buffers, key=lambda buffer: -buffer.total_bytes)[:most]


def _peak(program: Program, name: str) -> _Peak:
    computation = program.computations[name]
    order = {x: i for i, x in enumerate(computation.instructions)}
    parts = _parts(program, computation)
    last: dict[str, int] = {}
    for x in computation.instructions.values():
        for operand in x.operand_names:
            for owner in parts.get(operand, ()):
                last[owner] = order[x.name]
    # Results of the program are its donated arguments; those of a loop's body are the body's parameters.
    returned = set(parts.get(computation.root, ()))
    best, alive = _Peak(0.0, ()), dict[str, float]()
    for i, x in enumerate(computation.instructions.values()):
        created = {owner: _owned_bytes(x, owner) for owner in _owners(x, parts) if owner not in returned}
        if x.opcode == "fusion":
            _reuse(alive, created, [owner for owner in alive if last.get(owner) == i])
        alive.update(created)
        bodies = [_peak(program, called) for called in _bodies(program, x)]
        inner = max(bodies, key=lambda peak: peak.size_bytes, default=_Peak(0.0, ()))
        total = sum(alive.values()) + inner.size_bytes
        if total > best.size_bytes:
            own = tuple((*_result(computation, owner), size) for owner, size in alive.items())
            best = _Peak(total, own + inner.alive)
        alive = {owner: size for owner, size in alive.items() if last.get(owner, order[owner.split("#")[0]]) > i}
    return best


def _reuse(alive: dict[str, float], created: dict[str, float], ending: list[str]) -> None:
    """Free an operand of each result of the same size that is used for the last time: the result takes its place."""
    for size in created.values():
        taken = next((owner for owner in ending if alive[owner] == size), None)
        if taken is not None:
            ending.remove(taken)
            del alive[taken]


def _bodies(program: Program, x: Instruction) -> list[str]:
    return x.called if x.opcode in ("while", "conditional", "call") else []


def _parts(program: Program, computation: Computation) -> Mapping[str, tuple[str, ...]]:
    """Return the buffers of each value: an array has one, a tuple those of its elements, a parameter none."""
    parts: dict[str, tuple[str, ...]] = {}
    for x in computation.instructions.values():
        if x.opcode in ("parameter", "constant"):
            parts[x.name] = ("",) * len(x.results)
        elif x.opcode == "get-tuple-element":
            owners = parts[x.operand_names[0]]
            parts[x.name] = owners[x.index : x.index + 1] if len(x.results) == 1 else owners
        elif x.opcode in _ALIASES:
            parts[x.name] = tuple(owner for o in x.operand_names for owner in parts[o])
        else:
            parts[x.name] = tuple(_results(program, computation, x, parts))
    return parts


def _results(
    program: Program, computation: Computation, x: Instruction, parts: Mapping[str, tuple[str, ...]]
) -> Iterator[str]:
    """Yield the buffer of each result of a launch: that of an operand which it updates in place, or its own."""
    updated = _updated(program, x)
    for i in range(len(x.results)):
        operand = updated.get(i)
        if operand is None:
            yield f"{x.name}#{i}"
        else:
            yield (parts.get(x.operand_names[operand]) or (f"{x.name}#{i}",))[0]


def _updated(program: Program, x: Instruction) -> dict[int, int]:
    """Return the operand that each result updates in place, by the index of the result."""
    if x.opcode == "dynamic-update-slice":
        return {0: 0}
    if x.opcode != "fusion" or not x.called or x.called[0] not in program.computations:
        return {}
    fused = program.computations[x.called[0]]
    root = fused.instructions[fused.root]
    roots = [fused.instructions[name] for name in root.operand_names] if root.opcode == "tuple" else [root]
    found = {}
    for i, result in enumerate(roots):
        source = _through_bitcasts(fused, result)
        if source.opcode in ("dynamic-update-slice", "scatter"):
            source = _through_bitcasts(fused, fused.instructions[source.operand_names[0]])
            if source.opcode == "parameter":
                found[i] = int(source.operands)
    return found


def _through_bitcasts(fused: Computation, x: Instruction) -> Instruction:
    while x.opcode == "bitcast":
        x = fused.instructions[x.operand_names[0]]
    return x


def _owners(x: Instruction, parts: Mapping[str, tuple[str, ...]]) -> list[str]:
    return [owner for owner in parts[x.name] if owner.split("#")[0] == x.name]


def _result(computation: Computation, owner: str) -> tuple[Instruction, int]:
    name, i = owner.split("#")
    return computation.instructions[name], int(i)


def _text(array: Array) -> str:
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def _owned_bytes(x: Instruction, owner: str) -> float:
    results = x.results
    if len(results) == 1:
        return result_bytes(x)
    return results[int(owner.split("#")[1])].size_bytes
