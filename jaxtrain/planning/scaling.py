"""What a training step takes of every device on meshes larger than the machine: memory, and bytes sent to others.

The step is compiled for as many virtual devices of the CPU as the mesh has, and never run. So what is told is what is
in the compiled program of one device: shapes as they are divided, and every collective. As the mesh grows every device
keeps the rows that it has, and the batch grows with it (weak scaling).
"""

import contextlib
import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from jaxtrain.cost import Ceilings, Communication, communication, equation_flops, estimate_seconds
from jaxtrain.distributed import AXES, data_parallel_size, make_mesh, parse_mesh, run_mesh_sizes
from jaxtrain.errors import UserError
from jaxtrain.planning.plan import abstract_batch, abstract_state, peak_bytes, trace_step
from jaxtrain.recipes import Recipe
from jaxtrain.runner import training_step
from jaxtrain.tasks import build

MAX_DEVICES = 1024
"""Number of devices of the largest mesh that `plan` compiles for."""
# Memory and collectives are settled before LLVM is asked for code, which nobody will run.
_WITHOUT_CODE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device: of `parameters` (and running statistics), optimizer state (and counters), batch; of
    `temporaries`, `gradients` among them; and the most held at once."""

    parameters: int
    optimizer: int
    batch: int
    temporaries: int
    gradients: int
    peak: int


@dataclass(frozen=True)
class DeviceShare:
    """A recipe on a mesh, as one device has it. `estimate_seconds` of arithmetic, by the roofline of a device."""

    recipe: Recipe
    mesh: Mapping[str, int]
    memory: DeviceMemory
    communication: Communication
    flops: float
    seconds: float
    compile_s: float

    @property
    def devices(self) -> int:
        """How many the mesh has."""
        return math.prod(self.mesh.values())

    @property
    def rows(self) -> int:
        """Of a micro-batch, those of one device."""
        return self.recipe.batch_size // self.recipe.accumulate // data_parallel_size(self.mesh)


def virtual_devices(count: int) -> Sequence[Any]:
    """So many devices of the CPU, to compile for. Their number is settled when JAX first asks for a device: call it
    before. Raises `UserError` where there are fewer by now."""
    with contextlib.suppress(RuntimeError):  # it is settled: there may be as many
        jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise UserError(
            f"JAX has {len(devices)} CPU devices in this process and {count} are to be compiled for: ask before its "
            f"first computation, or set XLA_FLAGS=--xla_force_host_platform_device_count={count}"
        )
    return devices[:count]


def check_mesh_size(spec: str) -> None:
    """Raise `UserError` for an invalid mesh, or one larger than `MAX_DEVICES`."""
    if (product := math.prod(parse_mesh(spec).values())) > MAX_DEVICES:
        raise UserError(f"mesh {spec!r} is of {product:,} devices: plan knows up to {MAX_DEVICES:,}")


def doubled_meshes(spec: str, most: int = MAX_DEVICES) -> list[dict[str, int]]:
    """The meshes of 1, 2, 4 … `most` devices on the way through `spec`, whose first axis grows.

    The others have their sizes, in meshes too small for them as much of it as there is, from the last on.

    >>> [",".join(f"{axis}={n}" for axis, n in shape.items() if n > 1) for shape in doubled_meshes("data=2,fsdp=4", 16)]
    ['', 'fsdp=2', 'fsdp=4', 'data=2,fsdp=4', 'data=4,fsdp=4']
    """
    asked = parse_mesh(spec)
    first = first_axis(spec)
    others = {axis: n for axis, n in asked.items() if axis != first}
    kept, powers = math.prod(others.values()), [2**i for i in range(most.bit_length())]
    counts = {math.prod(asked.values()), *powers, *(kept * n for n in powers)}
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
    """The axis that a mesh names first.

    >>> first_axis("fsdp=4,data=2")
    'fsdp'
    """
    return spec.partition("=")[0].strip()


def recipe_on_mesh(recipe: Recipe, shape: Mapping[str, int]) -> Recipe:
    """`recipe` on another mesh than its own, with as many rows for every device as on its own.

    >>> from jaxtrain.recipes import RECIPES
    >>> small = dataclasses.replace(RECIPES["gpt-stdlib"], mesh="data=2,fsdp=4")  # of 16 rows
    >>> large = recipe_on_mesh(small, parse_mesh("data=64,fsdp=4"))
    >>> large.mesh, large.batch_size
    ('data=64,fsdp=4', 512)
    """
    rows = recipe.batch_size // data_parallel_size(run_mesh_sizes(recipe.mesh))
    return dataclasses.replace(recipe, mesh=format_mesh(shape), batch_size=rows * data_parallel_size(shape))


def format_mesh(shape: Mapping[str, int]) -> str:
    """A mesh as `parse_mesh` reads it; its axes of size 1 are left out."""
    return ",".join(f"{axis}={n}" for axis, n in shape.items() if n > 1) or f"{AXES[0]}=1"


class Scaling:
    """The shares of a recipe that has a mesh, on that and on others; time is that of `device`."""

    def __init__(self, recipe: Recipe, devices: Sequence[Any], device: Ceilings) -> None:
        self._recipe, self._devices, self._device = recipe, devices, device
        self._done: dict[str, DeviceShare] = {}

    def share(self, shape: Mapping[str, int]) -> DeviceShare:
        """Return the share of one device on a mesh. Raises `UserError` if the settings are invalid on it."""
        recipe = recipe_on_mesh(self._recipe, shape)
        if recipe.mesh not in self._done:
            self._done[str(recipe.mesh)] = self._compiled(recipe, shape)
        return self._done[str(recipe.mesh)]

    def _compiled(self, recipe: Recipe, shape: Mapping[str, int]) -> DeviceShare:
        begin = time.perf_counter()
        task, mesh = build(recipe), make_mesh(recipe.mesh, self._devices[: math.prod(shape.values())])
        _, state, window, lowered = trace_step(recipe, task, mesh)
        program = lowered.compile(_WITHOUT_CODE)
        # What divides no rows divides their arithmetic.
        flops, roofline = (x / (mesh.size // data_parallel_size(shape)) for x in self._of_rows)
        return DeviceShare(
            recipe,
            shape,
            _memory(state, window, program),
            communication(program.as_text(), mesh.shape),
            flops,
            roofline,
            time.perf_counter() - begin,
        )

    @cached_property
    def _of_rows(self) -> tuple[int, float]:
        """FLOPs and seconds of one device that computes everything for its rows."""
        alone = dataclasses.replace(recipe_on_mesh(self._recipe, parse_mesh("data=1")), mesh=None)
        task = build(alone)
        step = training_step(alone, task.loss_fn)
        jaxpr = jax.make_jaxpr(step.pure)(abstract_state(step, task), abstract_batch(alone, task)).jaxpr
        return sum(map(equation_flops, jaxpr.eqns)), estimate_seconds(jaxpr, self._device)


def _memory(state: Any, window: Any, program: Any) -> DeviceMemory:
    whole, peak = _bytes(state), peak_bytes(program)
    parameters, batch = _bytes((state.params, state.model_state)), _bytes(window)
    return DeviceMemory(
        parameters=parameters,
        optimizer=whole - parameters,
        batch=batch,
        temporaries=peak - whole - batch,
        gradients=sum(4 * math.prod(_shard(x)) for x in jax.tree.leaves(state.params)),
        peak=peak,
    )


def _bytes(tree: Any) -> int:
    """Of one device."""
    return sum(math.prod(_shard(x)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _shard(x: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    return tuple(x.sharding.shard_shape(x.shape))
