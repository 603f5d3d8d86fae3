"""The cost of a training step on meshes of absent GPUs: of the program compiled for the mesh, or extrapolated from one.

Extrapolated means that the program of a smaller mesh runs with the collectives of the larger one: their bytes by the
closed forms, their time by the links that the larger groups cross. Shards of the state are exact at every size.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import AbstractMesh

from jaxtrain.cost import GpuTarget, Traffic, group_along
from jaxtrain.distributed import FSDP, data_parallel_size, param_shardings, parse_mesh, state_shardings
from jaxtrain.errors import UserError
from jaxtrain.fields import brief
from jaxtrain.paths import path_name
from jaxtrain.planning.candidate import Candidate, abstract_state, compile_for_target
from jaxtrain.planning.scale.closed_forms import ClosedForms
from jaxtrain.planning.scaling import format_mesh
from jaxtrain.run import Recipe
from jaxtrain.runner import training_step


@dataclass(frozen=True)
class MeshCost:
    """The predicted cost of a training step on one GPU of a mesh.

    Attributes:
      mesh: Sizes of the mesh by axis.
      rows: Rows of a micro-batch on a GPU that shares no rows.
      accumulate: Number of micro-batches per update.
      remat: Rematerialization.
      gradient_sums: What a GPU keeps of the gradients between micro-batches.
      batch_size: Rows of an update.
      program: The mesh that the program was compiled for.
      peak_bytes: Memory of a GPU.
      nvlink_bytes: Bytes that a GPU sends to others of its node.
      network_bytes: Bytes that a GPU sends to other nodes.
      compute_s: Time of computation.
      communication_s: Time of communication, with and without computation beside it.
      exposed_s: Time that computation waits for communication.
      units_per_s: Units of the task, such as tokens, per second on all GPUs.
      mfu: FLOPs of the model per second over the peak rate, `Ceilings.of_precision`.
      compile_s: Time of the compilation.
    """

    mesh: Mapping[str, int]
    rows: int
    accumulate: int
    remat: str
    gradient_sums: str
    batch_size: int
    program: Mapping[str, int]
    peak_bytes: int
    nvlink_bytes: float
    network_bytes: float
    compute_s: float
    communication_s: float
    exposed_s: float
    units_per_s: float
    mfu: float
    compile_s: float

    @property
    def gpus(self) -> int:
        """Number of GPUs of the mesh."""
        return math.prod(self.mesh.values())

    @property
    def seconds(self) -> float:
        """Time of a step."""
        return self.compute_s + self.exposed_s

    @property
    def exposed_share(self) -> float:
        """Share of the step that computation waits for communication."""
        return self.exposed_s / self.seconds

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        meshes = {"mesh": format_mesh(self.mesh), "program": format_mesh(self.program)}
        derived = {"gpus": self.gpus, "step_s": self.seconds, "exposed_share": self.exposed_share}
        return {**dataclasses.asdict(self), **meshes, **derived, "extrapolated": dict(self.mesh) != dict(self.program)}


class MeshCosts:
    """Programs of a recipe on meshes of a GPU.

    Args:
      recipe: The recipe; its mesh and batch size are replaced.
      target: The GPU.
      on_compile: Called with each recipe before it is compiled.
    """

    def __init__(self, recipe: Recipe, target: GpuTarget, on_compile: Callable[[Recipe], None]) -> None:
        self.target = target
        self._recipe, self._on_compile = recipe, on_compile
        self._done: dict[Recipe, Candidate] = {}

    @cached_property
    def task(self) -> Any:
        """The task of the recipe."""
        return self._recipe.task()

    @cached_property
    def _state(self) -> Any:
        return abstract_state(training_step(self._recipe, self.task), self.task)

    def compile(
        self, mesh: Mapping[str, int], rows: int, accumulate: int, remat: str, gradient_sums: Any = "whole"
    ) -> Candidate:
        """Compile the step for a mesh, with `rows` of a micro-batch on each GPU that shares none.

        Raises:
          UserError: The settings are invalid on this mesh, or the compiler fails.
        """
        recipe = dataclasses.replace(
            self._recipe,
            mesh=format_mesh(mesh),
            batch_size=rows * accumulate * data_parallel_size(mesh),
            accumulate=accumulate,
            remat=remat,
            gradient_sums=gradient_sums,
        )
        if recipe not in self._done:
            self._on_compile(recipe)
            try:
                self._done[recipe] = compile_for_target(recipe, self.task, self.target)
            except jax.errors.JaxRuntimeError as error:
                reason = brief(str(error).partition("\n")[0])
                raise UserError(f"XLA cannot compile the step for {recipe.mesh} ({reason}): use another mesh") from None
        return self._done[recipe]

    @cached_property
    def sharding_axes(self) -> set[str]:
        """The mesh axes that the parameters are sharded over."""
        shardings = param_shardings(self._state.params, _abstract(parse_mesh(f"{FSDP}=1")), self.task.sharding)
        entries = [entry for sharding in jax.tree.leaves(shardings) for entry in sharding.spec]
        return {axis for entry in entries for axis in ((entry,) if isinstance(entry, str) else entry or ())}

    def state_bytes(self, mesh: Mapping[str, int]) -> int:
        """Return the bytes of the state on one GPU."""
        shardings = state_shardings(self._state, _abstract(mesh), self.task.sharding)
        pairs = zip(jax.tree.leaves(self._state), jax.tree.leaves(shardings), strict=True)
        return sum(math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize for x, s in pairs)

    def undivided(self, mesh: Mapping[str, int], larger: Mapping[str, int]) -> str | None:
        """Return the first parameter that `larger` shards over fewer of its axes than `mesh`; None if there is none."""
        before, after = (param_shardings(self._state.params, _abstract(m), self.task.sharding) for m in (mesh, larger))
        named = jax.tree_util.tree_leaves_with_path(self._state.params)
        for (path, x), a, b in zip(named, jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
            if a.spec != b.spec:
                return f"{path_name(path)} {list(x.shape)}"
        return None

    def cost(self, candidate: Candidate, mesh: Mapping[str, int], forms: ClosedForms | None, rest: int = 0) -> MeshCost:
        """Return the cost of a step on a mesh by the program of a candidate.

        Args:
          candidate: The candidate, compiled for the mesh or for one that differs from it in the size of one axis.
          mesh: The mesh.
          forms: The closed forms for that axis; None if parameters and gradients are all that is sent along it.
          rest: Bytes by which memory without the state grows between the two meshes.
        """
        program, recipe = candidate.program, candidate.recipe
        assert program is not None
        own, links = program.mesh, program.target.links
        rows = recipe.batch_size // recipe.accumulate // data_parallel_size(own)

        def on_mesh(traffic: Traffic) -> Traffic:
            grown = next((axis for axis in mesh if mesh[axis] != own[axis]), None)
            if grown is None:
                return traffic
            form = forms if forms is not None and forms.axis == grown else ClosedForms(grown, {})
            return form.at(traffic, own, mesh[grown])

        def price(traffic: Traffic) -> float:
            group = group_along(mesh, traffic.axes, links.gpus_per_node)
            return links.seconds(traffic.kind, on_mesh(traffic).sent, group)

        sent = [on_mesh(traffic) for traffic in program.communication.traffic]
        network = sum(links.over_network(traffic, mesh) for traffic in sent)
        compute = program.product_seconds + program.traffic_seconds
        exposed = program.timeline.exposed_seconds(price)
        batch_size = rows * recipe.accumulate * data_parallel_size(mesh)
        peak_rate = self.target.ceilings.of_precision(recipe.precision)
        return MeshCost(
            mesh=dict(mesh),
            rows=rows,
            accumulate=recipe.accumulate,
            remat=recipe.remat,
            gradient_sums=recipe.gradient_sums,
            batch_size=batch_size,
            program=dict(own),
            peak_bytes=candidate.peak_bytes + self.state_bytes(mesh) - self.state_bytes(own) + rest,
            nvlink_bytes=sum(traffic.sent for traffic in sent) - network,
            network_bytes=network,
            compute_s=compute,
            communication_s=program.timeline.communication_seconds(price),
            exposed_s=exposed,
            units_per_s=batch_size * self.task.units_per_row / (compute + exposed),
            mfu=candidate.flops / (compute + exposed) / peak_rate,
            compile_s=candidate.compile_s,
        )


def _abstract(mesh: Mapping[str, int]) -> Any:
    return AbstractMesh(tuple(mesh.values()), tuple(mesh))
