"""Choose a mesh for a recipe on a number of GPUs, by the predicted time of its programs.

Every candidate has the recipe's batch. The search begins with meshes that only divide rows, as they need no
communication within a layer, and moves a factor of two of the fastest one to another axis as long as that is faster.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from jaxtrain.cost import format_bytes
from jaxtrain.distributed import AXES, DATA, EXPERT, FSDP, SEQUENCE, TENSOR, data_parallel_size, parse_mesh
from jaxtrain.errors import RunFailed, UserError
from jaxtrain.planning.scale.growth import cost_on, settings_on
from jaxtrain.planning.scale.mesh_costs import MeshCost, MeshCosts
from jaxtrain.planning.scaling import format_mesh
from jaxtrain.run import Recipe

_LARGEST_MODEL_AXIS = 8
_AS_FAST = 1.02


@dataclass(frozen=True)
class Rejected:
    """A mesh that cannot be used.

    Attributes:
      mesh: Sizes of the mesh by axis.
      why: The reason.
    """

    mesh: Mapping[str, int]
    why: str


@dataclass(frozen=True)
class MeshChoice:
    """The meshes that were considered.

    Attributes:
      memory: Memory of a GPU in bytes.
      chosen: The first one of those that are about as fast as the fastest.
      costs: The cost on each mesh that fits, fastest first.
      rejected: The others.
    """

    memory: int
    chosen: MeshCost
    costs: Sequence[MeshCost]
    rejected: Sequence[Rejected]


def choose_mesh(costs: MeshCosts, recipe: Recipe, gpus: int, memory: int) -> MeshChoice:
    """Choose the fastest mesh that fits into memory.

    Args:
      costs: The programs.
      recipe: The recipe, with the batch of an update.
      gpus: Number of GPUs.
      memory: Memory of a GPU in bytes.

    Returns:
      The choice.

    Raises:
      RunFailed: Nothing fits.
    """
    search = _Search(costs, recipe, memory)
    axes = {DATA, FSDP, SEQUENCE} | (costs.sharding_axes & {EXPERT, TENSOR})
    for mesh in _row_meshes(gpus, costs.target.gpus_per_node):
        search.consider(mesh)
    moved: MeshCost | None = None
    while (best := search.best()) is not moved:
        moved = best
        start = [best.mesh] if best is not None else list(_row_meshes(gpus, costs.target.gpus_per_node))
        for mesh in (larger for one in start for larger in _moves(one, axes)):
            search.consider(mesh)
    if not search.done:
        why = "; ".join(f"{format_mesh(r.mesh)}: {r.why}" for r in search.rejected[:3])
        raise RunFailed(f"no mesh of {gpus:,} GPUs fits ({why}): use more nodes, or another batch size")
    assert best is not None
    return MeshChoice(memory, best, sorted(search.done, key=lambda cost: cost.seconds), search.rejected)


def fitting_cost(costs: MeshCosts, mesh: Mapping[str, int], recipe: Recipe, memory: int) -> MeshCost:
    """Return the cost on a mesh with the recipe's settings, or with rematerialization and smaller micro-batches.

    Raises:
      UserError: The settings are invalid on this mesh, or do not fit.
    """
    state = costs.state_bytes(mesh)
    if state > memory:
        raise UserError(f"the state alone takes {format_bytes(state)}")

    def cost_of(accumulate: int, remat: str, gradient_sums: str) -> MeshCost:
        return cost_on(costs, mesh, settings_on(recipe.batch_size, accumulate, remat, gradient_sums, mesh))

    cost = cost_of(recipe.accumulate, recipe.remat, recipe.gradient_sums)
    if cost.peak_bytes > memory and recipe.remat == "none":
        cost = cost_of(recipe.accumulate, "full", recipe.gradient_sums)
    sums = cost.gradient_sums
    while cost.peak_bytes > memory:
        if cost.rows == 1:
            raise UserError(f"one row takes {format_bytes(cost.peak_bytes)}")
        more = 2 * cost.accumulate
        while recipe.batch_size % (more * data_parallel_size(mesh)) and more < recipe.batch_size:
            more += 1
        found = cost_of(more, cost.remat, sums)
        # Sums of all rows of a GPU may need more memory than fewer rows save.
        if found.peak_bytes > memory and sums == "whole" and mesh[FSDP] > 1:
            sums = "sharded"
            found = cost_of(more, cost.remat, sums)
        cost = found
    return cost


class _Search:
    """The meshes considered so far."""

    def __init__(self, costs: MeshCosts, recipe: Recipe, memory: int) -> None:
        self.done: list[MeshCost] = []
        self.rejected: list[Rejected] = []
        self._costs, self._recipe, self._memory = costs, recipe, memory
        self._seen: set[str] = set()

    def best(self) -> MeshCost | None:
        fastest = min((cost.seconds for cost in self.done), default=0.0)
        return next((cost for cost in self.done if cost.seconds <= _AS_FAST * fastest), None)

    def consider(self, mesh: Mapping[str, int]) -> None:
        if format_mesh(mesh) in self._seen:
            return
        self._seen.add(format_mesh(mesh))
        recipe, best = self._recipe, self.best()
        # Meshes of as many GPUs need about the same rematerialization.
        recipe = recipe if best is None else dataclasses.replace(recipe, remat=best.remat)
        try:
            found = fitting_cost(self._costs, mesh, recipe, self._memory)
        except UserError as error:
            self.rejected.append(Rejected(mesh, str(error)))
        else:
            self.done.append(found)


def _row_meshes(gpus: int, gpus_per_node: int) -> Iterator[dict[str, int]]:
    """Yield meshes of data and fsdp: fsdp over all GPUs, over a node, over eight nodes, and over none."""
    whole = parse_mesh(f"{DATA}=1")
    for size in dict.fromkeys((gpus, gpus_per_node, 8 * gpus_per_node, 1)):
        if gpus % size == 0:
            yield {**whole, DATA: gpus // size, FSDP: size}


def _moves(mesh: Mapping[str, int], axes: Set[str]) -> Iterator[dict[str, int]]:
    """Yield the meshes with a factor of two moved from data or fsdp to another one of some axes."""
    for source in (DATA, FSDP):
        for axis in (axis for axis in AXES if axis in axes and axis != source):
            limit = math.inf if axis in (DATA, FSDP) else _LARGEST_MODEL_AXIS
            if mesh[source] % 2 == 0 and 2 * mesh[axis] <= limit:
                yield {**mesh, source: mesh[source] // 2, axis: 2 * mesh[axis]}
