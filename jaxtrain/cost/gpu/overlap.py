"""The collectives of a program for GPUs, and what runs while they transfer."""

from collections.abc import Iterator
from dataclasses import dataclass

from jaxtrain.cost.gpu.launches import NO_KERNEL, PRODUCTS, Program, is_collective, launch_kind
from jaxtrain.cost.hlo import Computation, Instruction


@dataclass(frozen=True)
class Transfer:
    """Launches of one collective.

    Attributes:
      instruction: The instruction that starts it.
      kind: The collective, such as all-gather.
      dtypes: Dtypes of its results in HLO's names.
      result_bytes: Bytes of its results on one device.
      times: How often it runs in one run of the program.
      launches: Launches between its start and its end; 0 for a synchronous one.
      products: Those of them that are products.
    """

    instruction: Instruction
    kind: str
    dtypes: tuple[str, ...]
    result_bytes: float
    times: int
    launches: int
    products: int


def transfers(program: Program) -> Iterator[Transfer]:
    """Yield the collectives of a program in the order of the schedule."""
    wrapped = {
        called
        for c in program.computations.values()
        for x in c.instructions.values()
        if x.opcode == "async-start"
        for called in x.called
    }
    for name in sorted(program.scheduled - wrapped):
        computation = program.computations[name]
        for start, end in _collectives(program, computation):
            inner = _inner(program, start)
            beside = _between(computation, start, end)
            results = inner.transferred
            yield Transfer(
                start,
                launch_kind(inner),
                tuple(array.dtype for array in results),
                sum(array.size_bytes for array in results),
                program.runs[name],
                len(beside),
                sum(launch_kind(x) in PRODUCTS for x in beside),
            )


def _collectives(program: Program, computation: Computation) -> Iterator[tuple[Instruction, Instruction | None]]:
    """Yield each collective with the instruction that waits for it; None for a synchronous one."""
    for x in computation.instructions.values():
        if x.opcode.endswith("-start") and is_collective(_inner(program, x)):
            done = (user for user, _ in computation.users[x.name] if user.opcode.endswith("-done"))
            yield x, next(done, None)
        elif is_collective(x):
            yield x, None


def _inner(program: Program, x: Instruction) -> Instruction:
    """Return the collective that an `async-start` wraps; other instructions as they are."""
    if x.opcode != "async-start":
        return x
    (called,) = x.called
    return program.computations[called].instructions[program.computations[called].root]


def _between(computation: Computation, start: Instruction, end: Instruction | None) -> list[Instruction]:
    if end is None or '"is_sync":true' in start.attributes:
        return []
    scheduled = list(computation.instructions.values())
    inside = scheduled[scheduled.index(start) + 1 : scheduled.index(end)]
    return [x for x in inside if x.opcode not in NO_KERNEL and not x.opcode.endswith(("-done", "-start"))]
