"""A program compiled for a GPU: what it launches, moves and holds, and how long it should take."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from jaxtrain.cost.communication import Communication, Traffic, communication
from jaxtrain.cost.data_sheets import Ceilings
from jaxtrain.cost.gpu.buffers import Buffer, peak_buffers
from jaxtrain.cost.gpu.launches import Launch, Program, is_collective
from jaxtrain.cost.gpu.links import group_along
from jaxtrain.cost.gpu.overlap import Overlap, Transfer, overlap, transfers
from jaxtrain.cost.gpu.product_calls import Product, products
from jaxtrain.cost.gpu.target import COMPILER_OPTIONS, GpuTarget, compilation_for_gpus
from jaxtrain.cost.gpu.timeline import Timeline
from jaxtrain.program.hlo import Instruction, SourceLines

SHARE_OF_PEAK = 0.75
"""Share of the peak rate that a predicted product reaches."""


class Origin(NamedTuple):
    """Launches of the same kind from the same scopes of the traced function.

    Attributes:
      kind: What is launched.
      op_name: The scopes and the primitive, without numbers.
      times: Number of launches.
      moved: Bytes that all of them read and write.
    """

    kind: str
    op_name: str
    times: int
    moved: float


@dataclass(frozen=True)
class GpuProgram:
    """A program compiled for one GPU, or the share of one GPU in a program for several.

    Attributes:
      target: The GPU.
      hlo: Text of the program.
      mesh: Sizes of the mesh by axis; empty for one GPU.
      argument_bytes: Bytes of the arguments.
      output_bytes: Bytes of the results.
      alias_bytes: Bytes of the results that are donated arguments.
      temporary_bytes: Bytes of everything else that is allocated while it runs.
      compiler_options: XLA's options that its step gives to `jax.jit`.
    """

    target: GpuTarget
    hlo: str
    mesh: Mapping[str, int]
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    compiler_options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, compiled: Any, target: GpuTarget, mesh: Mapping[str, int] | None = None) -> "GpuProgram":
        """Read a `jax.stages.Compiled`.

        Args:
          compiled: The program.
          target: The GPU that it is compiled for.
          mesh: Sizes of the mesh by axis; None for one GPU.
        """
        memory = compiled.memory_analysis()
        return cls(
            target,
            compiled.as_text(),
            dict(mesh or {}),
            argument_bytes=int(memory.argument_size_in_bytes),
            output_bytes=int(memory.output_size_in_bytes),
            alias_bytes=int(memory.alias_size_in_bytes),
            temporary_bytes=int(memory.temp_size_in_bytes),
        )

    @property
    def peak_bytes(self) -> int:
        """The most memory that a run of the program needs."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temporary_bytes

    @cached_property
    def program(self) -> Program:
        """The text, parsed."""
        return Program.parse(self.hlo)

    @cached_property
    def launches(self) -> tuple[Launch, ...]:
        """All launches."""
        return self.program.launches

    @cached_property
    def products(self) -> tuple[Product, ...]:
        """All products, convolutions and attentions."""
        return tuple(products(self.program))

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """All collectives with what runs beside them."""
        return tuple(transfers(self.program))

    @property
    def overlap(self) -> Overlap:
        """Share of the gathers and scatters that have a product beside them."""
        return overlap(self.transfers)

    @cached_property
    def communication(self) -> Communication:
        """Bytes that a GPU sends, by collective and axes."""
        return communication(self.hlo, self.mesh)

    @property
    def launch_counts(self) -> Counter[str]:
        """Number of launches of each kind."""
        counted: Counter[str] = Counter()
        for launch in self.launches:
            counted[launch.kind] += launch.times
        return counted

    @property
    def moved_bytes(self) -> float:
        """Bytes that all launches read and write."""
        return sum(launch.moved_in_all for launch in self.launches)

    @property
    def flops(self) -> float:
        """FLOPs of all products, as executed: with rematerialization, and half of the scores of causal attention."""
        return sum(product.flops * product.times for product in self.products)

    @property
    def product_dtypes(self) -> Counter[str]:
        """Number of products by the dtypes of operands and result."""
        counted: Counter[str] = Counter()
        for product in self.products:
            counted[product.dtypes] += product.times
        return counted

    @property
    def host_waits(self) -> int:
        """Number of places where the host waits for the GPU: conditionals, loops of unknown length, host transfers."""
        waits = re.compile(r"conditional|infeed|outfeed|send|recv")
        return sum(
            waits.fullmatch(x.opcode) is not None or (x.opcode == "while" and x.trips is None)
            for name in self.program.scheduled
            for x in self.program.computations[name].instructions.values()
        )

    def origins(self) -> list[Origin]:
        """Return the launches by kind and origin, most bytes first."""
        times: Counter[tuple[str, str]] = Counter()
        moved: Counter[tuple[str, str]] = Counter()
        for launch in self.launches:
            key = launch.kind, re.sub(r"\d+", "#", launch.instruction.op_name)
            times[key] += launch.times
            moved[key] += launch.moved_in_all  # type: ignore[assignment]  # a Counter of floats
        return [Origin(*key, times[key], size) for key, size in moved.most_common()]

    def largest_buffers(self, most: int = 10) -> list[Buffer]:
        """Return the largest temporaries that are alive at the peak, with their source lines."""
        return peak_buffers(self.program, SourceLines(self.hlo), most)[1]

    @property
    def product_seconds(self) -> float:
        """Predicted time of the products, each at `SHARE_OF_PEAK` or at the bandwidth."""
        return sum(product.times * self._seconds_of(product) for product in self.products)

    @property
    def traffic_seconds(self) -> float:
        """Predicted time of all other launches at the bandwidth, without collectives."""
        return sum(launch.times * seconds for launch, seconds in self._other_launches())

    @cached_property
    def timeline(self) -> Timeline:
        """What the GPU computes, and which collectives run beside it."""
        seconds = {launch.instruction: time for launch, time in self._other_launches()}
        seconds |= {product.instruction: self._seconds_of(product) for product in self.products}
        for product, x in self._fused_products():
            seconds[x] = seconds.get(x, 0.0) + self._seconds_of(product)
        return Timeline.of(self.program, seconds, self.mesh)

    @property
    def exposed_seconds(self) -> float:
        """Predicted time that the GPU waits for communication."""
        return self.timeline.exposed_seconds(self.collective_seconds) if self.mesh else 0.0

    def collective_seconds(self, traffic: Traffic) -> float:
        """Return the predicted time of one collective."""
        links = self.target.links
        return links.seconds(traffic.kind, traffic.sent, group_along(self.mesh, traffic.axes, links.gpus_per_node))

    @property
    def seconds(self) -> float:
        """Predicted time of a run."""
        return self.product_seconds + self.traffic_seconds + self.exposed_seconds

    def _seconds_of(self, product: Product) -> float:
        moved, ceilings = self._moved.get(product.instruction, 0.0), self.target.ceilings
        return max(product.flops / (SHARE_OF_PEAK * peak_rate(product, ceilings)), moved / ceilings.bandwidth)

    def _other_launches(self) -> Iterator[tuple[Launch, float]]:
        """Yield the launches that are neither products nor collectives, with the time of one."""
        products = {product.instruction for product in self.products}
        for launch in self.launches:
            if launch.instruction not in products and not is_collective(launch.instruction):
                yield launch, launch.moved / self.target.ceilings.bandwidth

    def _fused_products(self) -> Iterator[tuple[Product, Instruction]]:
        """Yield the products inside of fusions, with the fusion."""
        inside = {product.instruction: product for product in self.products if product.by == "fusion"}
        for name in self.program.scheduled if inside else ():
            for x in self.program.computations[name].instructions.values():
                for called in x.called if x.opcode == "fusion" else ():
                    for of_fusion in self.program.computations[called].instructions.values():
                        if of_fusion in inside:
                            yield inside[of_fusion], x

    @cached_property
    def _moved(self) -> dict[Instruction, float]:
        return {launch.instruction: launch.moved for launch in self.launches}


def peak_rate(product: Product, ceilings: Ceilings) -> float:
    """Return the peak rate of a GPU for a product, in FLOP/s."""
    if product.operands[0] in ("bf16", "f16"):
        return ceilings.half
    if product.operands[0].startswith("f8"):
        return ceilings.eight_bit
    return ceilings.fp32 if product.full_precision or product.operands[0] == "f64" else ceilings.tf32


def compile_for_gpu(lowered: Any, target: GpuTarget, mesh: Mapping[str, int] | None = None) -> GpuProgram:
    """Compile a program for a GPU that this machine does not have.

    Args:
      lowered: A `jax.stages.Lowered` for devices of `gpu_devices`, or a function without arguments that returns one.
      target: The GPU.
      mesh: Sizes of the mesh by axis; None for one GPU.

    Returns:
      The program.
    """
    with compilation_for_gpus():
        compiled = (lowered() if callable(lowered) else lowered).compile(compiler_options=COMPILER_OPTIONS)
    return GpuProgram.read(compiled, target, mesh)
