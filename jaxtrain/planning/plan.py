"""Which micro-batch, rematerialisation and precision a recipe has room for, before anything is allocated.

A candidate's training step is compiled for abstract arrays; XLA's memory analysis then says what it will hold at its
peak. The batch of an update is the same for all. Of one rematerialisation the largest micro-batch that fits is the
fastest, and it is found by bisection, since memory grows with it; another rematerialisation is only of use where it
makes room for a larger one.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxtrain.cost import Ceilings, ceilings, equation_flops, estimate_seconds, format_bytes
from jaxtrain.cpu.workspace import cpu_workspace
from jaxtrain.distributed import make_mesh, parse_mesh, run_mesh, shard, window_sharding
from jaxtrain.errors import RunFailed, UserError
from jaxtrain.recipes import Recipe
from jaxtrain.runner import check_settings, training_step
from jaxtrain.step import TrainState, TrainStep, split_batch
from jaxtrain.tasks import Task, build

REMATS = ("none", "dots", "full")
"""From the fastest to the smallest."""


@dataclass(frozen=True)
class Candidate:
    """A recipe compiled. Bytes on one device: `peak_bytes` is the most that its step holds at once, of which
    `state_bytes` are there between steps too; `flops` of a step, with what it computes again; `seconds`, estimated
    (`jaxtrain.cost.roofline`), good for comparing candidates."""

    recipe: Recipe
    peak_bytes: int
    state_bytes: int
    flops: int
    seconds: float
    compile_s: float

    @property
    def micro_batch(self) -> int:
        """Examples."""
        return self.recipe.batch_size // self.recipe.accumulate


@dataclass(frozen=True)
class Plan:
    """Candidates compiled, the recipe's own first; and the one to take. `batch_norm`: whether the model has statistics
    of a micro-batch, so that another size of it trains otherwise."""

    memory: int
    candidates: Sequence[Candidate]
    chosen: Candidate
    batch_norm: bool

    def fits(self, candidate: Candidate) -> bool:
        """Whether there is room for it."""
        return candidate.peak_bytes <= self.memory


def plan(
    recipe: Recipe,
    memory: int,
    say: Callable[[Recipe], None],
    *,
    precisions: Sequence[str] | None = None,
    devices: Sequence[Any] | None = None,
) -> Plan:
    """The candidates for `recipe` in `memory` bytes, each told to `say` before it is compiled.

    The fastest that fits in the recipe's own precision is chosen; in another, which changes numbers, only if none does.
    `precisions`: those to compile; by default the recipe's own and, where products are faster in it or nothing fits,
    bf16. `devices`: those to compile for, of which a mesh takes the first; by default the ones that a run would have.
    Raises `UserError` for a recipe that makes no step, `RunFailed` where nothing fits.
    """
    check_settings(recipe)
    task = build(recipe)
    if (state := _least_bytes(recipe, task, devices)) > memory:
        raise RunFailed(
            f"nothing fits {format_bytes(memory)}: parameters and optimizer state alone take {format_bytes(state)}: "
            "make the model smaller, or give it more memory"
        )
    search = _Search(recipe, task, memory, say, devices)
    own = search.compile(recipe)
    for precision in precisions or (recipe.precision, *_others(recipe)):
        if precision != recipe.precision and precisions is None and search.fitting() and not _faster(precision):
            continue
        search.fill(precision)
    fitting = search.fitting()
    if not fitting:
        least = min(search.done.values(), key=lambda c: c.peak_bytes)
        raise RunFailed(
            f"nothing fits {format_bytes(memory)}: the least found is {format_bytes(least.peak_bytes)}, "
            f"{format_bytes(least.state_bytes)} of it the state, with {format_settings(least.recipe)}: "
            "make the model smaller, or give it more memory"
        )
    same_numbers = [c for c in fitting if c.recipe.precision == own.recipe.precision]
    chosen = min(same_numbers or fitting, key=lambda c: c.seconds)
    return Plan(memory, list(search.done.values()), chosen, batch_norm=jax.eval_shape(task.init)[1] is not None)


class Traced(NamedTuple):
    """A recipe's training step, traced for shapes: the step, its state and its window of micro-batches, and the program
    as `jax.stages.Lowered`."""

    step: TrainStep
    state: TrainState
    window: dict[str, jax.ShapeDtypeStruct]
    lowered: Any


def trace_step(recipe: Recipe, task: Task, mesh: Mesh | None) -> Traced:
    """The step of `recipe`, on `mesh`. Raises `UserError` for settings that make none."""
    check_settings(recipe)
    step, window = training_step(recipe, task.loss_fn), abstract_batch(recipe, task)
    if mesh is not None:
        step, window = shard(step, mesh, task.sharding), _window(window, mesh, recipe.accumulate)
    state = abstract_state(step, task)
    return Traced(step, state, window, step.jitted.lower(state, window))


def compile_candidate(recipe: Recipe, task: Task, device: Ceilings, devices: Sequence[Any] | None = None) -> Candidate:
    """The candidate that `recipe` is. Raises `UserError` for settings that make no step."""
    begin = time.perf_counter()
    step, state, _, lowered = trace_step(recipe, task, _mesh(recipe, devices))
    program = lowered.compile()
    elapsed = time.perf_counter() - begin
    jaxpr = jax.make_jaxpr(step.pure)(state, abstract_batch(recipe, task)).jaxpr
    return Candidate(
        recipe,
        peak_bytes=peak_bytes(program),
        # Donated, it is all that comes out where it went in.
        state_bytes=int(program.memory_analysis().alias_size_in_bytes),
        flops=sum(map(equation_flops, jaxpr.eqns)),
        seconds=estimate_seconds(jaxpr, device),
        compile_s=elapsed,
    )


def _mesh(recipe: Recipe, devices: Sequence[Any] | None) -> Mesh | None:
    if devices is None or recipe.mesh is None:
        return run_mesh(recipe.mesh)
    return make_mesh(recipe.mesh, devices[: math.prod(parse_mesh(recipe.mesh).values())])


def _least_bytes(recipe: Recipe, task: Task, devices: Sequence[Any] | None) -> int:
    """What any candidate holds of each device: its share of the state."""
    mesh = _mesh(recipe, devices)
    leaves = jax.tree.leaves(abstract_state(training_step(recipe, task.loss_fn), task))
    return sum(x.size * x.dtype.itemsize for x in leaves) // (1 if mesh is None else mesh.size)


def abstract_state(step: TrainStep, task: Task) -> TrainState:
    """The first state of a run, as shapes."""
    return step.shapes(lambda: task.init()[0], model_state=lambda: task.init()[1])


def abstract_batch(recipe: Recipe, task: Task) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch of the task's examples, as shapes."""
    row = {name: np.asarray(x) for name, x in task.train[0].items()}
    return {name: jax.ShapeDtypeStruct((recipe.batch_size, *x.shape), x.dtype) for name, x in row.items()}


def _window(batch: Any, mesh: Mesh, accumulate: int) -> Any:
    """The batch as `jaxtrain.distributed.place_batch` would place it."""
    sharding, shapes = window_sharding(mesh, accumulate), jax.eval_shape(lambda x: split_batch(x, accumulate), batch)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)


def peak_bytes(program: Any) -> int:
    """What a compiled program (`jax.stages.Compiled`) holds of a device while it runs, its arguments included."""
    analysis = program.memory_analysis()
    planned = (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )
    return int(planned) + cpu_workspace(program.as_text())


def candidate_rows(found: Plan) -> Iterator[dict[str, Any]]:
    """A row a candidate; `relative_time` is 1 for the recipe's own."""
    own = found.candidates[0]
    for candidate in found.candidates:
        yield {
            "micro_batch": candidate.micro_batch,
            "accumulate": candidate.recipe.accumulate,
            "remat": candidate.recipe.remat,
            "precision": candidate.recipe.precision,
            "peak_bytes": candidate.peak_bytes,
            "state_bytes": candidate.state_bytes,
            "flops": candidate.flops,
            "relative_time": candidate.seconds / own.seconds,
            "compile_s": candidate.compile_s,
            "fits": found.fits(candidate),
            "chosen": candidate is found.chosen,
        }


def choice_notes(found: Plan) -> list[str]:
    """What the table does not say of the choice."""
    own, chosen = found.candidates[0], found.chosen
    said = []
    if found.batch_norm and chosen.recipe.accumulate != own.recipe.accumulate:
        said.append(
            f"BatchNorm's statistics are of a micro-batch: of {chosen.micro_batch} examples now, "
            f"of {own.micro_batch} before"
        )
    if chosen.recipe.precision != own.recipe.precision:
        said.append(f"nothing fits in {own.recipe.precision}: {chosen.recipe.precision} rounds otherwise")
    faster = [c for c in found.candidates if found.fits(c) and c.seconds < 0.9 * chosen.seconds]
    if faster:
        best = min(faster, key=lambda c: c.seconds)
        said.append(
            f"{format_settings(best.recipe)} fits too and takes {best.seconds / chosen.seconds:.2f} times as long; "
            "it rounds otherwise"
        )
    return said


def format_settings(recipe: Recipe) -> str:
    """What a plan chooses of a recipe.

    >>> from jaxtrain.recipes import RECIPES
    >>> format_settings(RECIPES["gpt-stdlib"])
    'micro-batch 16 × 1, remat none, fp32'
    """
    micro_batch, k = recipe.batch_size // recipe.accumulate, recipe.accumulate
    return f"micro-batch {micro_batch} × {k}, remat {recipe.remat}, {recipe.precision}"


class _Search:
    """What was compiled so far, by its settings."""

    def __init__(
        self,
        recipe: Recipe,
        task: Task,
        memory: int,
        say: Callable[[Recipe], None],
        devices: Sequence[Any] | None,
    ) -> None:
        self.done: dict[Recipe, Candidate] = {}
        self._recipe, self._task, self._memory, self._say, self._devices = recipe, task, memory, say, devices
        self._ceilings = ceilings(jax.local_devices()[0])

    def compile(self, recipe: Recipe) -> Candidate:
        if recipe not in self.done:
            self._say(recipe)
            self.done[recipe] = compile_candidate(recipe, self._task, self._ceilings, self._devices)
        return self.done[recipe]

    def fitting(self) -> list[Candidate]:
        return [c for c in self.done.values() if c.peak_bytes <= self._memory]

    def fill(self, precision: str) -> None:
        """Compile what may be the fastest that fits in `precision`."""
        size = self._recipe.batch_size
        windows = [k for k in range(1, size + 1) if size % k == 0]
        for remat in dict.fromkeys(("none", self._recipe.remat, *REMATS)):
            settings: dict[str, Any] = {"precision": precision, "remat": remat}
            recipe = dataclasses.replace(self._recipe, **settings)
            fewest = self._fewest(recipe, windows)
            # Another rematerialisation is worth its time only for a larger micro-batch than this one has.
            windows = [k for k in windows if fewest is None or k < fewest]
            if not windows:
                return

    def _fewest(self, recipe: Recipe, windows: Sequence[int]) -> int | None:
        """The fewest micro-batches to a window with which `recipe` fits; None if there is no such number."""

        def fits(k: int) -> bool:
            return self.compile(dataclasses.replace(recipe, accumulate=k)).peak_bytes <= self._memory

        try:
            if fits(windows[0]):
                return windows[0]
        except UserError:
            return None  # a policy that would keep nothing of this model
        windows = self._large_enough(recipe, windows)
        if len(windows) == 1 or not fits(windows[-1]):
            return None
        low, high = 0, len(windows) - 1  # the first does not fit, the last does
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(windows[middle]) else (middle, high)
        return windows[high]

    def _large_enough(self, recipe: Recipe, windows: Sequence[int]) -> Sequence[int]:
        """Without those that make micro-batches too small for the mesh or the model: BatchNorm wants two values."""
        while len(windows) > 1:
            try:
                self.compile(dataclasses.replace(recipe, accumulate=windows[-1]))
            except UserError:
                windows = windows[:-1]
            else:
                break
        return windows


def _others(recipe: Recipe) -> tuple[str, ...]:
    return ("bf16",) if recipe.precision in ("fp32", "tf32") else ()


def _faster(precision: str) -> bool:
    device = ceilings(jax.local_devices()[0])
    return precision == "bf16" and device.half > device.tf32
