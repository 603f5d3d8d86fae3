"""The collectives of a program for GPUs, and what runs while they transfer."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from jaxtrain.cost.gpu.launches import NO_KERNEL, PRODUCTS, Program, is_collective, launch_kind
from jaxtrain.program.hlo import Computation, Instruction


@dataclass(frozen=True)
class Transfer:
    """Launches of one collective.

    Attributes:
      instruction: The instruction that starts it.
      kind: The collective, such as all-gather.
      dtypes: Dtypes of its results in HLO's names.
      result_bytes: Bytes of its results on one device.
      whole_bytes: Bytes of its results or of its operands, whichever are more: the whole arrays of a gather or scatter.
      times: How often it runs in one run of the program.
      launches: Launches between its start and its end; 0 for a synchronous one.
      products: Those of them that are products.
    """

    instruction: Instruction
    kind: str
    dtypes: tuple[str, ...]
    result_bytes: float
    whole_bytes: float
    times: int
    launches: int
    products: int


class Overlap(NamedTuple):
    """How much of some collectives products run beside, from 0 to 1.

    Attributes:
      by_count: Share of the collectives.
      by_bytes: Share of the bytes of their whole arrays.
    """

    by_count: float
    by_bytes: float


def overlap(collectives: Iterable[Transfer], kinds: tuple[str, ...] = ("all-gather", "reduce-scatter")) -> Overlap:
    """Return the share of the collectives of these kinds that have a product beside them; 1 without any.

    Args:
      collectives: Collectives of a program.
      kinds: Kinds of collectives, by default those of parameters and gradients on the mesh axis fsdp.
    """
    counted = [transfer for transfer in collectives if transfer.kind in kinds]

    def share(sizes: list[float]) -> float:
        beside = sum(size for size, transfer in zip(sizes, counted, strict=True) if transfer.products)
        return beside / sum(sizes) if sizes else 1.0

    return Overlap(
        share([float(transfer.times) for transfer in counted]),
        share([transfer.times * transfer.whole_bytes for transfer in counted]),
    )


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
            inner = collective_of(program, start)
            beside = _between(computation, start, end)
            results = inner.transferred
            result_bytes = sum(array.size_bytes for array in results)
            yield Transfer(
                start,
                launch_kind(inner),
                tuple(array.dtype for array in results),
                result_bytes,
                max(result_bytes, _operand_bytes(computation, start)),
                program.runs[name],
                len(beside),
                sum(launch_kind(x) in PRODUCTS for x in beside),
            )


def _collectives(program: Program, computation: Computation) -> Iterator[tuple[Instruction, Instruction | None]]:
    """Yield each collective with the instruction that waits for it; None for a synchronous one."""
    for x in computation.instructions.values():
        if x.opcode.endswith("-start") and is_collective(collective_of(program, x)):
            done = (user for user, _ in computation.users[x.name] if user.opcode.endswith("-done"))
            yield x, next(done, None)
        elif is_collective(x):
            yield x, None


def _operand_bytes(computation: Computation, start: Instruction) -> float:
    operands = (computation.instructions[name] for name in start.operand_names if name in computation.instructions)
    return sum(array.size_bytes for operand in operands for array in operand.results)


def collective_of(program: Program, x: Instruction) -> Instruction:
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
