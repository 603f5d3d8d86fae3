"""The cost of a training step of a recipe, from its program compiled for abstract arrays."""

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jaxtrain.cost import Ceilings, GpuProgram, GpuTarget, count_flops, estimate_seconds
from jaxtrain.cpu.workspace import cpu_workspace
from jaxtrain.distributed import make_mesh, parse_mesh, run_devices, run_mesh, shard
from jaxtrain.planning.gpu import gpu_program, window_shapes
from jaxtrain.run import Recipe, Task
from jaxtrain.run import abstract_batch as abstract_batch
from jaxtrain.runner import check_settings, training_step
from jaxtrain.step import TrainState, TrainStep


@dataclass(frozen=True)
class Candidate:
    """The cost of a step of a recipe, from its compiled program.

    Attributes:
      recipe: The recipe.
      peak_bytes: Peak memory of a step on one device, in bytes.
      state_bytes: Part of it that the state takes, between steps too.
      flops: FLOPs of a step, including recomputation.
      seconds: Time of a step estimated by a roofline, for comparison between candidates only.
      compile_s: Time of the compilation, in seconds.
      program: The program, if it was compiled for a GPU that this machine does not have.
    """

    recipe: Recipe
    peak_bytes: int
    state_bytes: int
    flops: int
    seconds: float
    compile_s: float
    program: GpuProgram | None = None

    @property
    def micro_batch(self) -> int:
        """Number of examples of a micro-batch."""
        return self.recipe.batch_size // self.recipe.accumulate


def format_settings(recipe: Recipe) -> str:
    """Return the settings of a recipe that a plan chooses, as text.

    >>> from jaxtrain.recipes import RECIPES
    >>> format_settings(RECIPES["gpt-stdlib"])
    'micro-batch 16 × 1, remat none, fp32'
    """
    micro_batch, k = recipe.batch_size // recipe.accumulate, recipe.accumulate
    sums = "" if recipe.gradient_sums == "whole" else f", {recipe.gradient_sums} gradient sums"
    kept = "" if recipe.reshard_after == "forward" else f", reshard after {recipe.reshard_after}"
    return f"micro-batch {micro_batch} × {k}, remat {recipe.remat}, {recipe.precision}{sums}{kept}"


def compile_candidate(recipe: Recipe, task: Task, device: Ceilings, devices: Sequence[Any] | None = None) -> Candidate:
    """Compile the training step of a recipe and return its costs.

    Raises:
      UserError: The settings are invalid.
    """
    begin = time.perf_counter()
    step, state, _, lowered = trace_step(recipe, task, planned_mesh(recipe, devices))
    # Timing kernels would allocate their operands, and does not change the memory of the program.
    is_cpu = all(device.platform == "cpu" for device in devices or run_devices(recipe.mesh))
    program = lowered.compile() if is_cpu else lowered.compile({"xla_gpu_autotune_level": 0})
    elapsed = time.perf_counter() - begin
    jaxpr = jax.make_jaxpr(step.pure)(state, abstract_batch(recipe, task)).jaxpr
    return Candidate(
        recipe,
        peak_bytes=peak_bytes(program),
        # The state is donated, and is all that is aliased.
        state_bytes=int(program.memory_analysis().alias_size_in_bytes),
        flops=count_flops(jaxpr),
        seconds=estimate_seconds(jaxpr, device),
        compile_s=elapsed,
    )


def compile_for_target(recipe: Recipe, task: Task, target: GpuTarget) -> Candidate:
    """Compile the training step of a recipe for a GPU that this machine does not have, and return its costs.

    Raises:
      UserError: The settings are invalid.
    """
    begin = time.perf_counter()
    check_settings(recipe)
    step, batch = training_step(recipe, task), abstract_batch(recipe, task)
    initial = task.shapes()
    program = gpu_program(
        step,
        initial.params,
        batch,
        target,
        mesh=recipe.mesh,
        rules=task.sharding,
        model_state=initial.model_state,
    )
    # Those of the model: without recomputation, and of attention as if it were not causal.
    plain = training_step(dataclasses.replace(recipe, remat="none"), task)
    jaxpr = jax.make_jaxpr(plain.pure)(abstract_state(plain, task), batch).jaxpr
    return Candidate(
        recipe,
        peak_bytes=program.peak_bytes,
        state_bytes=program.alias_bytes,
        flops=count_flops(jaxpr) // max(1, math.prod(program.mesh.values())),
        seconds=program.seconds,
        compile_s=time.perf_counter() - begin,
        program=program,
    )


class Traced(NamedTuple):
    """A training step traced for shapes.

    Attributes:
      step: The step.
      state: Shapes of its state.
      window: Shapes of its window of micro-batches.
      lowered: The program, a `jax.stages.Lowered`.
    """

    step: TrainStep
    state: TrainState
    window: dict[str, jax.ShapeDtypeStruct]
    lowered: Any


def trace_step(recipe: Recipe, task: Task, mesh: Mesh | None) -> Traced:
    """Trace the training step of a recipe on a mesh.

    Raises:
      UserError: The settings are invalid.
    """
    check_settings(recipe)
    step, window = training_step(recipe, task), abstract_batch(recipe, task)
    if mesh is not None:
        step, window = shard(step, mesh, task.sharding), window_shapes(window, mesh, recipe.accumulate)
    state = abstract_state(step, task)
    return Traced(step, state, window, step.jitted.lower(state, window))


def planned_mesh(recipe: Recipe, devices: Sequence[Any] | None) -> Mesh | None:
    """Return the mesh of a recipe on the first of these devices, by default on those of a run."""
    if devices is None or recipe.mesh is None:
        return run_mesh(recipe.mesh)
    return make_mesh(recipe.mesh, devices[: math.prod(parse_mesh(recipe.mesh).values())])


def abstract_state(step: TrainStep, task: Task) -> TrainState:
    """Return the shapes of the initial state of a run."""
    return step.shapes(lambda: task.create().params, model_state=lambda: task.create().model_state)


def peak_bytes(program: Any) -> int:
    """Return the peak memory of a `jax.stages.Compiled` on one device in bytes, including its arguments."""
    analysis = program.memory_analysis()
    planned = (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )
    return int(planned) + cpu_workspace(program.as_text())
