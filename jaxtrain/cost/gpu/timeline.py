"""The time of a program in which the GPU computes and communicates at once.

Launches run one after another in the order of the schedule. A collective starts where the program starts it, once those
before it are through, and computation goes on until the instruction that waits for it. What it waits is the time of
communication that is exposed. That communication takes multiprocessors and memory bandwidth from the computation beside
it is not considered.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from jaxtrain.cost.communication import Traffic, traffic_of
from jaxtrain.cost.gpu.launches import Program, is_collective
from jaxtrain.cost.gpu.overlap import collective_of
from jaxtrain.program.hlo import Instruction

Price = Callable[[Traffic], float]
"""The seconds that one collective takes."""


class _Run(NamedTuple):
    seconds: float


class _Start(NamedTuple):
    name: str
    traffic: tuple[Traffic, ...]
    waits: bool


class _Wait(NamedTuple):
    name: str


class _Loop(NamedTuple):
    body: str
    times: int


_Step = _Run | _Start | _Wait | _Loop


@dataclass(frozen=True)
class Timeline:
    """What the GPU does, in order.

    Attributes:
      steps: The steps of each computation.
      entry: Name of the first one.
    """

    steps: Mapping[str, tuple[_Step, ...]]
    entry: str

    @classmethod
    def of(cls, program: Program, seconds: Mapping[Instruction, float], mesh: Mapping[str, int]) -> "Timeline":
        """Read a program.

        Args:
          program: The program.
          seconds: Time of one launch of each instruction that computes.
          mesh: Sizes of the mesh by axis.
        """
        sent = traffic_of(program.computations, mesh)
        return cls({name: tuple(_steps(program, name, seconds, sent)) for name in program.scheduled}, program.entry)

    def seconds(self, price: Price) -> float:
        """Return the time of a run, given that of each collective."""
        return self._walk(self.entry, 0.0, price)[0]

    def exposed_seconds(self, price: Price) -> float:
        """Return the time of a run in which the GPU waits for communication."""
        return self.seconds(price) - self.seconds(lambda _: 0.0)

    def communication_seconds(self, price: Price) -> float:
        """Return the time of all collectives, one after another."""
        return self._total(self.entry, lambda step: sum(map(price, step.traffic)) if isinstance(step, _Start) else 0.0)

    def _total(self, name: str, value: Callable[[_Step], float]) -> float:
        return sum(
            step.times * self._total(step.body, value) if isinstance(step, _Loop) else value(step)
            for step in self.steps[name]
        )

    def _walk(self, name: str, lag: float, price: Price) -> tuple[float, float]:
        """Return the time of a computation, and for how long collectives then go on; `lag` is that at its start."""
        now, free, ends = 0.0, lag, dict[str, float]()
        for step in self.steps[name]:
            match step:
                case _Run(seconds):
                    now += seconds
                case _Start(started, traffic, waits):
                    free = ends[started] = max(now, free) + sum(map(price, traffic))
                    now = free if waits else now
                case _Wait(started):
                    now = max(now, ends[started])
                case _Loop(body, times):
                    elapsed, lag = self._repeat(body, times, max(0.0, free - now), price)
                    now += elapsed
                    free = now + lag
        return now, max(0.0, free - now)

    def _repeat(self, body: str, times: int, lag: float, price: Price) -> tuple[float, float]:
        elapsed = 0.0
        for i in range(times):
            of_one, after = self._walk(body, lag, price)
            if math.isclose(after, lag, rel_tol=1e-9, abs_tol=1e-12):
                return elapsed + (times - i) * of_one, after
            elapsed, lag = elapsed + of_one, after
        return elapsed, lag


def _steps(
    program: Program,
    name: str,
    seconds: Mapping[Instruction, float],
    sent: Callable[[str, Instruction], tuple[Traffic, ...]],
) -> Iterator[_Step]:
    started: set[str] = set()
    waiting = 0.0  # of launches in a row
    for x in program.computations[name].instructions.values():
        step: _Step | None = None
        if x.opcode == "while":
            yield _Run(waiting)
            waiting = 0.0
            yield from (_Loop(body, x.most_trips or 1) for body in x.body)
        elif x.opcode in ("conditional", "call"):
            yield _Run(waiting)
            waiting = 0.0
            yield from (_Loop(called, 1) for called in x.called)
        elif x.opcode.endswith("-done") and (of := started & {*x.operand_names}):
            step = _Wait(of.pop())
        elif is_collective(collective_of(program, x)) and not x.opcode.endswith(("-done", "-update")):
            inner = collective_of(program, x)
            where = name if inner is x else x.called[0]
            is_started = x.opcode.endswith("-start") and '"is_sync":true' not in x.attributes
            started |= {x.name} if is_started else set()
            step = _Start(x.name, sent(where, inner), not is_started)
        else:
            waiting += seconds.get(x, 0.0)
        if step is not None:
            yield _Run(waiting)
            waiting = 0.0
            yield step
    yield _Run(waiting)
