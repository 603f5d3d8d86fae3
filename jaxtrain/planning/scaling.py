"""Memory and communication of a training step per device, on meshes larger than the machine.

The step is compiled for virtual CPU devices and never run. The figures are those of the compiled program of one device,
with its sharded shapes and its collectives. The number of rows per device is constant, so the batch grows with the mesh
(weak scaling).
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax

from jaxtrain.cost import Ceilings, Communication, communication, count_flops, estimate_seconds
from jaxtrain.distributed import AXES, DATA, PIPELINE, data_parallel_size, make_mesh, parse_mesh, run_mesh_sizes
from jaxtrain.errors import UserError
from jaxtrain.labs.pipeline import Schedule
from jaxtrain.paths import partition
from jaxtrain.planning.candidate import abstract_state, peak_bytes, trace_step
from jaxtrain.planning.gathered_params import gathered_bytes
from jaxtrain.planning.gradient_sums import GradientSums, gradient_sums
from jaxtrain.run import Recipe, abstract_batch
from jaxtrain.runner import training_step

MAX_DEVICES = 1024
"""Number of devices of the largest mesh that `plan` compiles for."""
_DOUBLINGS, _DOUBLINGS_WITHOUT_LIMIT = 12, 4
# The program is not run, and memory and collectives do not depend on LLVM's optimizations.
_WITHOUT_CODE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of one device, in bytes.

    Attributes:
      parameters: Parameters and running statistics.
      optimizer: Optimizer state and counters.
      batch: The batch.
      temporaries: Temporary arrays, including gradients.
      gradients: Gradients in float32, as the step keeps them.
      peak: Peak memory of a step.
    """

    parameters: int
    optimizer: int
    batch: int
    temporaries: int
    gradients: int
    peak: int


@dataclass(frozen=True)
class DeviceShare:
    """The share of one device in a step of a recipe on a mesh.

    Attributes:
      recipe: The recipe.
      mesh: Sizes of the mesh by axis.
      memory: Its memory.
      communication: The bytes that it sends.
      sums: The bytes of its gradients within a window.
      gathered_bytes: The bytes of the parameters that it keeps for a window with `reshard_after="window"`.
      flops: Its FLOPs.
      seconds: Time of its arithmetic, estimated by a roofline.
      compile_s: Time of the compilation, in seconds.
    """

    recipe: Recipe
    mesh: Mapping[str, int]
    memory: DeviceMemory
    communication: Communication
    sums: GradientSums
    gathered_bytes: int
    flops: float
    seconds: float
    compile_s: float

    @property
    def devices(self) -> int:
        """Number of devices of the mesh."""
        return math.prod(self.mesh.values())

    @property
    def rows(self) -> int:
        """Number of rows of a micro-batch on one device."""
        return self.recipe.batch_size // self.recipe.accumulate // data_parallel_size(self.mesh)


class Context(NamedTuple):
    """A context length, and the memory of one device for rows of that many tokens."""

    length: int
    memory: DeviceMemory


def virtual_devices(count: int) -> Sequence[Any]:
    """Return `count` virtual CPU devices to compile for.

    JAX fixes their number at the first use of a device, so call this function before.

    Raises:
      UserError: JAX already runs with fewer devices.
    """
    with contextlib.suppress(RuntimeError):  # JAX has started, perhaps with enough devices
        jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise UserError(
            f"JAX has {len(devices)} CPU devices in this process and the mesh needs {count}: plan before the first "
            f"computation, or set XLA_FLAGS=--xla_force_host_platform_device_count={count}"
        )
    return devices[:count]


def check_mesh_size(spec: str) -> None:
    """Validate a mesh.

    Raises:
      UserError: The mesh is invalid or larger than `MAX_DEVICES`.
    """
    if (product := math.prod(parse_mesh(spec).values())) > MAX_DEVICES:
        raise UserError(f"mesh {spec!r} has {product:,} devices: use at most {MAX_DEVICES:,}")


def doubled_meshes(spec: str, most: int = MAX_DEVICES) -> list[dict[str, int]]:
    """Return meshes of 1, 2, 4, … `most` devices that include `spec` and grow along its first axis.

    The other axes have their sizes; in meshes that are too small, the last axes are filled first.

    >>> [",".join(f"{axis}={n}" for axis, n in shape.items() if n > 1) for shape in doubled_meshes("data=2,fsdp=4", 16)]
    ['', 'fsdp=2', 'fsdp=4', 'data=2,fsdp=4', 'data=4,fsdp=4']
    """
    sizes = parse_mesh(spec)
    first = first_axis(spec)
    others = {axis: n for axis, n in sizes.items() if axis != first}
    product, powers = math.prod(others.values()), [2**i for i in range(most.bit_length())]
    counts = {math.prod(sizes.values()), *powers, *(product * n for n in powers)}
    shapes = [_shape(n, first, others) for n in sorted(counts) if n <= most]
    return [shape for shape in shapes if shape is not None]


def _shape(count: int, first: str, others: Mapping[str, int]) -> dict[str, int] | None:
    """Return a mesh of `count` devices, or None if there is none of this form."""
    shape: dict[str, int] = {}
    rest = count
    for axis in reversed([*others]):
        shape[axis] = math.gcd(rest, others[axis])
        rest //= shape[axis]
    whole = all(shape[axis] == n for axis, n in others.items())
    return {axis: shape.get(axis, rest) for axis in AXES} if whole or rest == 1 else None


def first_axis(spec: str) -> str:
    """Return the first axis in the text of a mesh.

    >>> first_axis("fsdp=4,data=2")
    'fsdp'
    """
    return spec.partition("=")[0].strip()


def recipe_on_mesh(recipe: Recipe, shape: Mapping[str, int]) -> Recipe:
    """Return the recipe on another mesh, with the same number of rows per device.

    >>> from jaxtrain.recipes import RECIPES
    >>> small = dataclasses.replace(RECIPES["gpt-stdlib"], mesh="data=2,fsdp=4")  # of 16 rows
    >>> large = recipe_on_mesh(small, parse_mesh("data=64,fsdp=4"))
    >>> large.mesh, large.batch_size
    ('data=64,fsdp=4', 512)
    """
    rows = recipe.batch_size // data_parallel_size(run_mesh_sizes(recipe.mesh))
    return dataclasses.replace(recipe, mesh=format_mesh(shape), batch_size=rows * data_parallel_size(shape))


def format_mesh(shape: Mapping[str, int]) -> str:
    """Return a mesh as the text that `parse_mesh` reads, without axes of size 1."""
    return ",".join(f"{axis}={n}" for axis, n in shape.items() if n > 1) or f"{DATA}=1"


class Scaling:
    """Predictions of a recipe with a mesh, on that mesh and on others.

    Args:
      recipe: The recipe.
      devices: The virtual devices to compile for.
      device: The throughput of a device, for estimates of time.
    """

    def __init__(self, recipe: Recipe, devices: Sequence[Any], device: Ceilings) -> None:
        self._recipe, self._devices, self._device = recipe, devices, device
        self._done: dict[str, DeviceShare] = {}

    def share(self, shape: Mapping[str, int]) -> DeviceShare:
        """Return the share of one device on a mesh.

        Raises:
          UserError: The settings are invalid on this mesh.
        """
        recipe = recipe_on_mesh(self._recipe, shape)
        if recipe.mesh not in self._done:
            self._done[str(recipe.mesh)] = self._compile(recipe, shape)
        return self._done[str(recipe.mesh)]

    def contexts(self, shape: Mapping[str, int], memory: int | None) -> Iterator[Context]:
        """Yield the context lengths of a recipe with a `seq_len`: its own, twice, four times as long, and so on.

        Args:
          shape: The mesh, on which every device keeps its number of rows.
          memory: Memory of a device in bytes; the last length yielded is the first that does not fit. None for the
            lengths up to eight times the recipe's.

        Yields:
          The lengths; fewer if the recipe rejects one.
        """
        recipe = recipe_on_mesh(self._recipe, shape)
        for doublings in range(_DOUBLINGS_WITHOUT_LIMIT if memory is None else _DOUBLINGS):
            length = recipe.seq_len << doublings  # type: ignore[attr-defined]
            longer: Any = {"seq_len": length}
            try:
                found, *_ = self._program(dataclasses.replace(recipe, **longer), shape)
            except UserError:
                return
            yield Context(length, found)
            if memory is not None and found.peak > memory:
                return

    def _compile(self, recipe: Recipe, shape: Mapping[str, int]) -> DeviceShare:
        begin = time.perf_counter()
        memory, sent, sums, gathered = self._program(recipe, shape)
        # Axes that do not shard rows shard the arithmetic of each row.
        flops, roofline = (x / (math.prod(shape.values()) // data_parallel_size(shape)) for x in self._unsharded_cost)
        # In the bubble a device waits for others.
        roofline /= 1 - Schedule(shape[PIPELINE], recipe.pipeline_chunks, recipe.accumulate).bubble
        elapsed = time.perf_counter() - begin
        return DeviceShare(recipe, shape, memory, sent, sums, gathered, flops, roofline, elapsed)

    def _program(
        self, recipe: Recipe, shape: Mapping[str, int]
    ) -> tuple[DeviceMemory, Communication, GradientSums, int]:
        """Compile a step and return its memory, its communication, its gradients and its gathered parameters."""
        task, mesh = recipe.task(), make_mesh(recipe.mesh, self._devices[: math.prod(shape.values())])
        step, state, window, lowered = trace_step(recipe, task, mesh)
        program = lowered.compile(_WITHOUT_CODE)
        sums = gradient_sums(partition(state.params, step.parts.options.frozen)[0])
        memory = _memory(state, sums.kept(recipe), window, program)
        gathered = gathered_bytes(step, state, window, recipe.accumulate)
        return memory, communication(program.as_text(), mesh.shape), sums, gathered

    @cached_property
    def _unsharded_cost(self) -> tuple[int, float]:
        """FLOPs and seconds of a device that computes its rows alone."""
        alone = dataclasses.replace(recipe_on_mesh(self._recipe, parse_mesh("data=1")), mesh=None)
        task = alone.task()
        step = training_step(alone, task)
        jaxpr = jax.make_jaxpr(step.pure)(abstract_state(step, task), abstract_batch(alone, task)).jaxpr
        return count_flops(jaxpr), estimate_seconds(jaxpr, self._device)


def _memory(state: Any, gradients: int, window: Any, program: Any) -> DeviceMemory:
    whole, peak = _bytes(state), peak_bytes(program)
    parameters, batch = _bytes((state.params, state.model_state)), _bytes(window)
    return DeviceMemory(
        parameters=parameters,
        optimizer=whole - parameters,
        batch=batch,
        temporaries=peak - whole - batch,
        gradients=gradients,
        peak=peak,
    )


def _bytes(tree: Any) -> int:
    """Return the bytes of a pytree on one device."""
    return sum(math.prod(_shard(x)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _shard(x: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    return tuple(x.sharding.shard_shape(x.shape))
