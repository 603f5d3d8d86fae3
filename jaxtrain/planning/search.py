"""Search for the micro-batch, rematerialization and precision of a recipe that fit into memory, without allocation.

The training step of each candidate is compiled for abstract arrays, and XLA's memory analysis gives its peak memory.
All candidates have the batch size of the recipe. With a given rematerialization, the largest micro-batch that fits is
the fastest; it is found by bisection, because memory grows with the micro-batch: that of one for the whole batch is
tried first, because it needs no gradient sums. Stronger rematerialization is useful only if it permits a larger
micro-batch.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxtrain.cost import GpuTarget, ceilings, format_bytes
from jaxtrain.distributed import FSDP, parse_mesh, shard
from jaxtrain.errors import RunFailed, UserError
from jaxtrain.paths import partition
from jaxtrain.planning.candidate import (
    Candidate,
    abstract_state,
    compile_candidate,
    compile_for_target,
    format_settings,
    planned_mesh,
)
from jaxtrain.planning.gathered_params import gathered_bytes, gathered_params_note
from jaxtrain.planning.gpu import window_shapes
from jaxtrain.planning.gradient_sums import GradientSums, gradient_sums, gradient_sums_note
from jaxtrain.planning.state_parts import StatePart, state_parts
from jaxtrain.run import Recipe, Task, abstract_batch, run_policy
from jaxtrain.runner import check_settings, fp8_products, training_step

REMATS = ("none", "dots", "full")
"""Settings of rematerialization, from the fastest to the one with the least memory."""


NO_SUMS = GradientSums(0, 0)
MOST_LAUNCHES = 15_000
"""Launches of a program with unrolled layers, beyond which it compiles for longer than a plan is worth."""


@dataclass(frozen=True)
class Plan:
    """The result of `plan`.

    Attributes:
      memory: The available memory of a device, in bytes.
      candidates: The compiled candidates, the recipe as given first.
      chosen: The fastest candidate that fits.
      batch_norm: Whether the model has BatchNorm, so that the size of micro-batches affects training.
      state: The parts of the state of the recipe as given, on one device.
      sums: The bytes of the gradients of a window on one device.
      gathered_bytes: The bytes of the parameters that a device keeps for a window with `reshard_after="window"`.
      fp8: Which kernels are in 8 bits in the recipe as given, and which are not; "" unless its precision has any.
    """

    memory: int
    candidates: Sequence[Candidate]
    chosen: Candidate
    batch_norm: bool
    state: Sequence[StatePart] = ()
    sums: GradientSums = NO_SUMS
    gathered_bytes: int = 0
    fp8: str = ""

    def fits(self, candidate: Candidate) -> bool:
        """Return whether a candidate fits into memory."""
        return candidate.peak_bytes <= self.memory


def plan(
    recipe: Recipe,
    memory: int,
    on_compile: Callable[[Recipe], None],
    *,
    precisions: Sequence[str] | None = None,
    devices: Sequence[Any] | None = None,
    target: GpuTarget | None = None,
) -> Plan:
    """Choose the fastest settings of a recipe that fit into memory.

    Another precision than the recipe's, which changes numbers, is chosen only if nothing fits in the recipe's own.

    Args:
      recipe: The recipe.
      memory: Memory of a device, in bytes.
      on_compile: Called with each candidate before it is compiled.
      precisions: The precisions to compile; by default that of the recipe, and bf16 if it is faster or nothing fits.
      devices: The devices to compile for, of which a mesh takes the first; by default those of a run.
      target: A GPU to compile for, which need not be here. Times are then predicted from its programs. Parameters
        that fsdp shards stay gathered for a window if they fit and that is faster. The loop over layers is unrolled if
        that is faster, and has few enough launches to compile in minutes.

    Returns:
      The candidates and the choice.

    Raises:
      UserError: The settings of the recipe are invalid.
      RunFailed: Nothing fits.
    """
    check_settings(recipe)
    task = recipe.task()
    if (least_bytes := _least_bytes(recipe, task, devices)) > memory:
        raise RunFailed(
            f"nothing fits {format_bytes(memory)}: parameters and optimizer state alone take "
            f"{format_bytes(least_bytes)}: "
            "make the model smaller, or give it more memory"
        )
    fp8 = _fp8(recipe, task)
    search = _Search(recipe, task, memory, on_compile, devices, target)
    own = search.compile(recipe)
    for precision in precisions or (recipe.precision, *_alternatives(recipe)):
        if precision != recipe.precision and precisions is None and search.fitting() and not _is_faster(precision):
            continue
        search.fill(precision)
    fitting = search.fitting()
    if not fitting and recipe.gradient_sums == "whole" and _is_on_fsdp(recipe):
        search.fill(recipe.precision, gradient_sums="sharded")
        fitting = search.fitting()
    if target is not None and fitting and _is_on_fsdp(recipe):
        search.compile(dataclasses.replace(_fastest(fitting, own).recipe, reshard_after="window"))
        fitting = search.fitting()
    if target is not None and fitting and _unrolled_launches(_fastest(fitting, own)) <= MOST_LAUNCHES:
        search.unroll(_fastest(fitting, own))
        fitting = search.fitting()
    if not fitting:
        least = min(search.done.values(), key=lambda c: c.peak_bytes)
        raise RunFailed(
            f"nothing fits {format_bytes(memory)}: the smallest candidate takes {format_bytes(least.peak_bytes)}, "
            f"{format_bytes(least.state_bytes)} of it for the state, with {format_settings(least.recipe)}: "
            "make the model smaller, or give it more memory"
        )
    state, sums, gathered = _state(recipe, task, devices)
    return Plan(
        memory,
        list(search.done.values()),
        _fastest(fitting, own),
        batch_norm=task.shapes().model_state is not None,
        state=state,
        sums=sums,
        gathered_bytes=gathered,
        fp8=fp8,
    )


def _is_on_fsdp(recipe: Recipe) -> bool:
    return recipe.mesh is not None and parse_mesh(recipe.mesh)[FSDP] > 1


def _fastest(fitting: Sequence[Candidate], own: Candidate) -> Candidate:
    same_numbers = [c for c in fitting if c.recipe.precision == own.recipe.precision]
    return min(same_numbers or fitting, key=lambda c: c.seconds)


def _least_bytes(recipe: Recipe, task: Task, devices: Sequence[Any] | None) -> int:
    """Return a lower bound of the memory of any candidate: the share of the state of one device."""
    mesh = planned_mesh(recipe, devices)
    leaves = jax.tree.leaves(abstract_state(training_step(recipe, task), task))
    return sum(x.size * x.dtype.itemsize for x in leaves) // (1 if mesh is None else mesh.size)


def _state(recipe: Recipe, task: Task, devices: Sequence[Any] | None) -> tuple[list[StatePart], GradientSums, int]:
    step, mesh = training_step(recipe, task), planned_mesh(recipe, devices)
    placed = step if mesh is None else shard(step, mesh, task.sharding)
    state = abstract_state(placed, task)
    sums, gathered = gradient_sums(partition(state.params, step.parts.options.frozen)[0]), 0
    if mesh is not None and mesh.shape[FSDP] > 1:
        window = window_shapes(abstract_batch(recipe, task), mesh, recipe.accumulate)
        gathered = gathered_bytes(placed, state, window, recipe.accumulate)
    return state_parts(state, step.parts.options.frozen), sums, gathered


def _fp8(recipe: Recipe, task: Task) -> str:
    if run_policy(recipe).fp8 is None:
        return ""
    state = abstract_state(training_step(recipe, task), task)
    return fp8_products(task, state, abstract_batch(recipe, task), recipe)["fp8"]


def candidate_rows(found: Plan) -> Iterator[dict[str, Any]]:
    """Yield a table row for each candidate; `relative_time` is relative to the recipe as given."""
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
    """Return notes about the choice that the table does not show."""
    own, chosen = found.candidates[0], found.chosen
    notes = [f"fp8: {found.fp8}"] if found.fp8 else []
    if found.batch_norm and chosen.recipe.accumulate != own.recipe.accumulate:
        notes.append(
            f"BatchNorm computes statistics per micro-batch: over {chosen.micro_batch} examples "
            f"instead of {own.micro_batch}"
        )
    if chosen.recipe.precision != own.recipe.precision:
        notes.append(f"nothing fits in {own.recipe.precision}: {chosen.recipe.precision} rounds differently")
    if (note := gradient_sums_note(chosen.recipe, found.sums)) is not None:
        notes.append(note)
    if (note := gathered_params_note(chosen.recipe, found.gathered_bytes)) is not None:
        notes.append(note)
    is_loop = chosen.program is not None and not chosen.recipe.unroll
    if is_loop and (launches := _unrolled_launches(chosen)) > MOST_LAUNCHES:
        notes.append(
            f"the loop over layers was not unrolled: the program would have {launches:,} launches and compile for many "
            "minutes; --unroll compiles it"
        )
    faster = [c for c in found.candidates if found.fits(c) and c.seconds < 0.9 * chosen.seconds]
    if faster:
        best = min(faster, key=lambda c: c.seconds)
        notes.append(
            f"{format_settings(best.recipe)} fits too and takes {best.seconds / chosen.seconds:.2f} times as long; "
            "it rounds differently"
        )
    return notes


def _unrolled_launches(candidate: Candidate) -> int:
    """Return the number of launches of a micro-batch, which a program with unrolled layers would contain."""
    assert candidate.program is not None
    return sum(launch.times for launch in candidate.program.launches) // candidate.recipe.accumulate


class _Search:
    """The candidates compiled so far, by recipe."""

    def __init__(
        self,
        recipe: Recipe,
        task: Task,
        memory: int,
        on_compile: Callable[[Recipe], None],
        devices: Sequence[Any] | None,
        target: GpuTarget | None,
    ) -> None:
        self.done: dict[Recipe, Candidate] = {}
        self._recipe, self._task, self._memory, self._devices, self._target = recipe, task, memory, devices, target
        self._on_compile = on_compile
        self._ceilings = ceilings(jax.local_devices()[0])

    def compile(self, recipe: Recipe) -> Candidate:
        if recipe not in self.done:
            self._on_compile(recipe)
            self.done[recipe] = self._compile(recipe)
        return self.done[recipe]

    def _compile(self, recipe: Recipe) -> Candidate:
        if self._target is None:
            return compile_candidate(recipe, self._task, self._ceilings, self._devices)
        return compile_for_target(recipe, self._task, self._target)

    def unroll(self, fastest: Candidate) -> None:
        """Compile a candidate with the loop over layers unrolled, with the least rematerialization that then fits."""
        weaker = REMATS.index(fastest.recipe.remat) if fastest.recipe.remat in REMATS else len(REMATS)
        for remat in dict.fromkeys((fastest.recipe.remat, *REMATS[weaker:])):
            try:
                unrolled = self.compile(dataclasses.replace(fastest.recipe, unroll=True, remat=remat))
            except UserError:
                continue  # a rematerialization policy without effect on this model
            if unrolled.peak_bytes <= self._memory:
                return

    def fitting(self) -> list[Candidate]:
        return [c for c in self.done.values() if c.peak_bytes <= self._memory]

    def fill(self, precision: str, **others: Any) -> None:
        """Compile the candidates that may be the fastest one that fits in `precision`, with other settings as given."""
        size = self._recipe.batch_size
        windows = [k for k in range(1, size + 1) if size % k == 0]
        for remat in dict.fromkeys(("none", self._recipe.remat, *REMATS)):
            settings: dict[str, Any] = {"precision": precision, "remat": remat, **others}
            recipe = dataclasses.replace(self._recipe, **settings)
            fewest = self._fewest(recipe, windows)
            # Stronger rematerialization pays off only with a larger micro-batch.
            windows = [k for k in windows if fewest is None or k < fewest]
            if not windows:
                return

    def _fewest(self, recipe: Recipe, windows: Sequence[int]) -> int | None:
        """Return the smallest number of micro-batches with which `recipe` fits; None if there is none."""

        def fits(k: int) -> bool:
            return self.compile(dataclasses.replace(recipe, accumulate=k)).peak_bytes <= self._memory

        try:
            if fits(windows[0]):
                return windows[0]
        except UserError:
            return None  # a rematerialization policy without effect on this model
        windows = self._large_enough(recipe, windows)
        if len(windows) == 1 or not fits(windows[-1]):
            return None
        low, high = 0, len(windows) - 1  # the first does not fit, the last does
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(windows[middle]) else (middle, high)
        return windows[high]

    def _large_enough(self, recipe: Recipe, windows: Sequence[int]) -> Sequence[int]:
        """Drop the numbers of micro-batches that make them too small for the mesh, or for BatchNorm."""
        while len(windows) > 1:
            try:
                self.compile(dataclasses.replace(recipe, accumulate=windows[-1]))
            except UserError:
                windows = windows[:-1]
            else:
                break
        return windows


def _alternatives(recipe: Recipe) -> tuple[str, ...]:
    return ("bf16",) if recipe.precision in ("fp32", "tf32") else ()


def _is_faster(precision: str) -> bool:
    device = ceilings(jax.local_devices()[0])
    return precision == "bf16" and device.half > device.tf32
