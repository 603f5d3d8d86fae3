"""How a step scales along an axis of a mesh, up to 16,384 GPUs: programs up to 512 GPUs, and closed forms beyond.

Weak scaling keeps the rows of a GPU, so that the batch grows with the mesh; strong scaling keeps the batch.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from jaxtrain.cost import Communication
from jaxtrain.distributed import DATA, FSDP, ROWS, SEQUENCE, TENSOR, data_parallel_size
from jaxtrain.errors import UserError
from jaxtrain.planning.candidate import Candidate
from jaxtrain.planning.scale.closed_forms import ClosedForms
from jaxtrain.planning.scale.mesh_costs import MeshCost, MeshCosts

MOST_GPUS, MOST_COMPILED = 16_384, 512
"""Number of GPUs of the largest mesh, and of the largest one that is compiled if a smaller one will do."""
PAYS = 1.5
"""An axis pays as long as twice the GPUs compute at least this many times as fast."""
MODEL_AXES = (SEQUENCE, TENSOR)
"""Axes that divide the sequences and the layers of any language model."""


class Settings(NamedTuple):
    """Rows of a micro-batch on a GPU that shares none, number of micro-batches, rematerialization, gradient sums."""

    rows: int
    accumulate: int
    remat: str
    gradient_sums: str = "whole"


@dataclass(frozen=True)
class Growth:
    """Meshes that grow along an axis by doublings.

    Attributes:
      axis: The axis.
      scaling: Whether the rows of a GPU are fixed, or the batch.
      costs: The cost on each mesh.
      ends: Why the meshes end where they end.
    """

    axis: str
    scaling: Literal["weak", "strong"]
    costs: Sequence[MeshCost]
    ends: str

    @property
    def verdict(self) -> str:
        """A sentence about where the axis stops paying."""
        for cost, doubled in pairwise(self.costs):
            gain = (doubled.units_per_s / cost.units_per_s) ** (1 / math.log2(doubled.gpus / cost.gpus))
            if gain < PAYS:
                place = f"{self._place(cost)} is where {self.axis} stops paying"
                return f"{place} with the {self.fixed} fixed: twice the GPUs are {gain:.2f} × as fast"
        if not self.costs:
            return f"{self.axis}: {self.ends}"
        return f"{self.axis} pays up to {self._place(self.costs[-1])} with the {self.fixed} fixed: {self.ends}"

    @property
    def fixed(self) -> str:
        """What does not grow with the mesh."""
        return "rows of a GPU" if self.scaling == "weak" else "batch"

    def _place(self, cost: MeshCost) -> str:
        return f"{self.axis}={cost.mesh[self.axis]} ({cost.gpus:,} GPUs)"


class WeakPrograms(NamedTuple):
    """Programs along an axis with the same rows on every GPU, by the size of the axis, and what they show.

    `forms` is None, and `why` says why, if the programs do not follow the closed forms.
    """

    candidates: Mapping[int, Candidate]
    forms: ClosedForms | None
    why: str


def weak_programs(costs: MeshCosts, mesh: Mapping[str, int], axis: str, settings: Settings) -> WeakPrograms:
    """Compile for three sizes of an axis, and fit the closed forms.

    Raises:
      UserError: The settings are invalid on one of the meshes.
    """
    chosen = compiled_sizes(mesh, axis, costs.target.gpus_per_node)
    candidates = {size: costs.compile({**mesh, axis: size}, *settings) for size in chosen}
    programs: list[tuple[Mapping[str, int], Communication]] = []
    for candidate in candidates.values():
        assert candidate.program is not None
        programs.append((candidate.program.mesh, candidate.program.communication))
    if len(programs) < 3:
        return WeakPrograms(
            candidates, None, f"no three sizes of {axis} up to {MOST_GPUS:,} GPUs to check the bytes on"
        )
    try:
        return WeakPrograms(candidates, ClosedForms.fit(axis, programs), "")
    except UserError as error:
        return WeakPrograms(candidates, None, str(error))


def grow_weakly(
    costs: MeshCosts, mesh: Mapping[str, int], axis: str, settings: Settings, found: WeakPrograms
) -> Growth:
    """Return the costs of meshes with the same rows on every GPU."""
    compiled = sorted(found.candidates)
    memory = _MemoryForm(costs, mesh, axis, found)
    rows = [costs.cost(costs.compile(mesh, *settings), mesh, None)] if mesh[axis] == 1 else []
    for size in sizes(mesh, axis):
        if size < compiled[0]:
            continue
        larger, nearest = {**mesh, axis: size}, max(x for x in compiled if x <= size)
        if found.forms is None and size not in compiled:
            continue
        if (undivided := costs.undivided({**mesh, axis: compiled[-1]}, larger)) is not None and size > compiled[-1]:
            return Growth(axis, "weak", rows, f"{axis}={size} does not divide {undivided}")
        rows.append(costs.cost(found.candidates[nearest], larger, found.forms, memory.between(nearest, size)))
    return Growth(axis, "weak", rows, found.why or f"the largest mesh of at most {MOST_GPUS:,} GPUs")


def grow_strongly(
    costs: MeshCosts, mesh: Mapping[str, int], axis: str, settings: Settings, found: WeakPrograms
) -> Growth:
    """Return the costs of meshes with the same batch: fewer micro-batches, and then fewer rows on each GPU."""
    of_gpu, largest = settings.rows * settings.accumulate, max(found.candidates)
    memory = _MemoryForm(costs, mesh, axis, found)
    done: list[MeshCost] = []
    for size in (x for x in sizes(mesh, axis, least=1) if x >= mesh[axis]):
        rows, remainder = divmod(of_gpu * mesh[axis], size)
        larger, compiled = {**mesh, axis: size}, min(size, largest)
        if remainder or not rows:
            return Growth(axis, "strong", done, f"{axis}={size} leaves less than a row of the batch for each GPU")
        if size > largest and found.forms is None:
            return Growth(axis, "strong", done, found.why)
        if size > largest and (undivided := costs.undivided({**mesh, axis: largest}, larger)) is not None:
            return Growth(axis, "strong", done, f"{axis}={size} does not divide {undivided}")
        micro_batch = min(rows, settings.rows)
        own = settings._replace(rows=micro_batch, accumulate=rows // micro_batch)
        candidate = costs.compile({**mesh, axis: compiled}, *own)
        share = rows / of_gpu
        forms = None if found.forms is None else found.forms.scaled(share)
        done.append(costs.cost(candidate, larger, forms, int(share * memory.between(compiled, size))))
    return Growth(axis, "strong", done, f"the largest mesh of at most {MOST_GPUS:,} GPUs")


def grow_model_axis(costs: MeshCosts, mesh: Mapping[str, int], axis: str, settings: Settings) -> Growth:
    """Return the costs of meshes that grow along an axis that divides layers or sequences; the batch is the same."""
    done: list[MeshCost] = []
    for size in (x for x in sizes(mesh, axis, least=1) if mesh[axis] <= x <= costs.target.gpus_per_node):
        larger = {**mesh, axis: size}
        if done and (undivided := costs.undivided(mesh, larger)) is not None and _shards_less(costs, mesh, larger):
            return Growth(axis, "strong", done, f"{axis}={size} does not divide {undivided}")
        try:
            done.append(cost_on(costs, larger, settings))
        except UserError as error:
            return Growth(axis, "strong", done, str(error))
        if len(done) > 1 and done[-1].units_per_s < PAYS * done[-2].units_per_s:
            break
    return Growth(axis, "strong", done, f"beyond it, {axis} leaves a node")


def cost_on(costs: MeshCosts, mesh: Mapping[str, int], settings: Settings) -> MeshCost:
    """Return the cost on a mesh; beyond `MOST_COMPILED` GPUs by the program of one with fewer of the outermost rows.

    Raises:
      UserError: The settings are invalid on this mesh.
    """
    gpus = math.prod(mesh.values())
    outermost = next((axis for axis in ROWS if mesh[axis] > 1), None)
    compiled = dict(mesh)
    while outermost is not None and gpus > MOST_COMPILED and compiled[outermost] % 2 == 0 and compiled[outermost] > 2:
        compiled[outermost] //= 2
        gpus //= 2
    if costs.undivided(compiled, mesh) is not None:
        compiled = dict(mesh)
    return costs.cost(costs.compile(compiled, *settings), mesh, None)


def sizes(mesh: Mapping[str, int], axis: str, least: int = 2) -> list[int]:
    """Return the sizes of an axis by doublings, among them its own, up to `MOST_GPUS` GPUs in all.

    >>> sizes({"data": 3, "fsdp": 1024}, "data")
    [3, 6, 12]
    """
    others = math.prod(mesh.values()) // mesh[axis]
    odd = mesh[axis] // (mesh[axis] & -mesh[axis])
    powers = (odd << i for i in range(MOST_GPUS.bit_length()))
    return [size for size in powers if size >= least and others * size <= MOST_GPUS]


def compiled_sizes(mesh: Mapping[str, int], axis: str, gpus_per_node: int = 8) -> list[int]:
    """Return the sizes of an axis to compile for: with 8, 64 and 512 GPUs in all, or the next ones.

    >>> compiled_sizes({"fsdp": 64}, "fsdp"), compiled_sizes({"data": 1, "fsdp": 64}, "data")
    ([8, 64, 512], [2, 4, 8])
    """
    others = math.prod(mesh.values()) // mesh[axis]
    possible = sizes(mesh, axis)
    first = next((i for i, size in enumerate(possible) if others * size >= gpus_per_node), 0)
    within = [i for i, size in enumerate(possible) if others * size <= MOST_COMPILED]
    last = min(max([first + 2, *within]), len(possible) - 1)
    return [possible[i] for i in sorted({first, (first + last) // 2, last})]


class _MemoryForm:
    """Memory other than the state by the size of an axis: a constant, what the axis divides, and what grows with it.

    What every device gathers from all others, such as the tokens of a batch, grows: by its bytes at least, and by what
    the programs need more than constant and divided memory.
    """

    def __init__(self, costs: MeshCosts, mesh: Mapping[str, int], axis: str, found: WeakPrograms) -> None:
        points = sorted(found.candidates)
        rest = [found.candidates[x].peak_bytes - costs.state_bytes({**mesh, axis: x}) for x in points]
        self._grown = 0.0
        if found.forms is not None and (gathered := found.forms.gathered) > 0:
            terms = np.array([[1.0, 1 / x, x] for x in points])
            fitted = np.linalg.lstsq(terms, np.array(rest), rcond=None)[0][2]
            self._grown = max(float(fitted), gathered / found.candidates[points[0]].recipe.accumulate)
        (x, y), (at_x, at_y) = points[-2:], rest[-2:]
        self._divided = max(0.0, (at_x - at_y + self._grown * (y - x)) / (1 / x - 1 / y))
        self._points, self._rest = points, rest

    def between(self, size: int, larger: int) -> int:
        """Return the growth of memory from one size to a larger one."""
        return int(self._at(larger) - self._at(size))

    def _at(self, size: int) -> float:
        last = self._points[-1]
        if size <= last:
            return float(np.interp(-1 / size, [-1 / x for x in self._points], self._rest))
        return self._rest[-1] + self._divided * (1 / size - 1 / last) + self._grown * (size - last)


def _shards_less(costs: MeshCosts, mesh: Mapping[str, int], larger: Mapping[str, int]) -> bool:
    """Return whether a GPU of the larger mesh has as much of the state as one of the smaller."""
    return costs.state_bytes(larger) >= costs.state_bytes(mesh)


def growths(costs: MeshCosts, mesh: Mapping[str, int], settings: Settings) -> Iterator[Growth]:
    """Yield the growth of a mesh along its row axes with fixed rows and fixed batch, and along its other axes."""
    for axis in row_axes(mesh):
        try:
            found = weak_programs(costs, mesh, axis, settings)
        except UserError as error:
            yield Growth(axis, "weak", [], str(error))
            continue
        yield grow_weakly(costs, mesh, axis, settings, found)
        yield grow_strongly(costs, mesh, axis, settings, found)
    for axis in (axis for axis in MODEL_AXES if axis == SEQUENCE or axis in costs.sharding_axes):
        yield grow_model_axis(costs, mesh, axis, settings)


def row_axes(mesh: Mapping[str, int]) -> list[str]:
    """Return the axes that rows can grow along, the mesh's own first, and of others data and fsdp.

    >>> from jaxtrain.distributed import parse_mesh
    >>> row_axes(parse_mesh("fsdp=8"))
    ['fsdp', 'data']
    """
    possible = [axis for axis in ROWS if mesh[axis] > 1 or axis in (DATA, FSDP)]
    return sorted(possible, key=lambda axis: mesh[axis] == 1)


def settings_on(batch_size: int, accumulate: int, remat: str, gradient_sums: str, mesh: Mapping[str, int]) -> Settings:
    """Return the settings of a recipe on a mesh.

    Raises:
      UserError: The rows cannot be divided.
    """
    shares = accumulate * data_parallel_size(mesh)
    if batch_size % shares:
        raise UserError(
            f"batch_size {batch_size} is not divisible by accumulate {accumulate} × the {shares // accumulate} GPUs "
            f"that rows are sharded over: use a multiple of {shares}"
        )
    return Settings(batch_size // shares, accumulate, remat, gradient_sums)
