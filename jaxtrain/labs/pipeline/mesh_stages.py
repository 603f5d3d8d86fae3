"""The stages of a pipeline on a mesh: the mesh axis pipeline divides every array of stages, [p, …]."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.distributed.mesh import FSDP, PIPELINE, ROWS, ROWS_OF_HEAD
from jaxtrain.distributed.row_groups import MeshGroups
from jaxtrain.distributed.sharding import Rules
from jaxtrain.errors import UserError
from jaxtrain.labs.loss_scales.per_layer_scale import scales_blocks
from jaxtrain.labs.pipeline.pipeline_stages import Stages
from jaxtrain.labs.pipeline.pipelined_gradient import RowDivision, pipelined_gradient
from jaxtrain.passes import Groups
from jaxtrain.step import StepParts
from jaxtrain.step.gradient import Gradient


def pipelined(
    parts: StepParts, mesh: Mesh, rules: Rules | None, constrain: Callable[..., Any]
) -> Callable[..., Gradient]:
    """Return how the gradient of a window is computed on a mesh with the axis pipeline, `StepParts.window`.

    Args:
      parts: The parts of the step for one device.
      mesh: The mesh.
      rules: The sharding rules of the parameters.
      constrain: Adds the sharding constraints of the mesh, with rows along `row_axes`.

    Raises:
      UserError: A pipeline cannot run the step.
    """
    require_pipelined(parts, rules, mesh.shape[PIPELINE])
    groups = _groups_of_head(mesh, rules, parts.options.gradient_sums)
    of_head = None if groups is None else RowDivision(partial(constrain, row_axes=ROWS_OF_HEAD), groups)
    return partial(pipelined_gradient, stages=MeshStages(mesh, parts.options.pipeline_chunks), of_head=of_head)


def require_pipelined(parts: StepParts, rules: Rules | None, size: int) -> None:
    """Raise `UserError` for a step that a pipeline cannot run."""
    if rules is None:
        raise UserError(
            f"mesh axis pipeline={size} divides no layers without sharding rules: give rules such as "
            "{'layers/.*': P('pipeline')} for parameters [layers, …]"
        )
    if callable(parts.options.accumulate):
        raise UserError("accumulate is a schedule, whose micro-batches cannot fill a pipeline: use a number")
    if parts.loss.hooks:
        raise UserError(f"hooks {list(parts.loss.hooks)} are not applied in a pipeline: use other axes, or no hooks")
    if parts.options.reshard_after != "forward":
        raise UserError("a pipeline gathers parameters of fsdp in every tick: use reshard_after='forward'")
    if (fp8 := parts.loss.policy.fp8) is not None and fp8.is_delayed:
        raise UserError("delayed scaling of fp8 is not supported in a pipeline: use precision='fp8', or other axes")
    if scales_blocks(parts.scaler):
        raise UserError("per_layer_loss_scale is not supported in a pipeline: use other axes, or dynamic_loss_scale()")
    if parts.loss.unroll:
        raise UserError("unroll removes the loop over layers, which a pipeline divides: use unroll=False")


def _groups_of_head(mesh: Mesh, rules: Rules | None, gradient_sums: str) -> Groups | None:
    """Return the groups of rows of what follows the layers; None if the stages do not divide it.

    They do not if fsdp divides the sums of a group: its rows would be on other devices.
    """
    if gradient_sums != "whole" and mesh.shape.get(FSDP, 1) > 1:
        return None
    return MeshGroups(mesh, tuple(axis for axis in ROWS_OF_HEAD if mesh.shape.get(axis, 1) > 1), rules)


class MeshStages(Stages):
    """The stages along the mesh axis pipeline. Other axes divide the rest of each array, as the compiler propagates."""

    def __init__(self, mesh: Mesh, chunks: int) -> None:
        super().__init__(mesh.shape[PIPELINE], chunks)
        self._mesh = mesh

    def map(self, fn: Callable[..., Any], in_axes: Any = 0) -> Callable[..., Any]:
        """As `Stages.map`."""
        return jax.vmap(fn, in_axes=in_axes, spmd_axis_name=PIPELINE)

    def split(self, x: jax.Array) -> jax.Array:
        """As `Stages.split`."""
        return self._constrain(super().split(x), 1)

    def join(self, x: jax.Array) -> jax.Array:
        """As `Stages.join`."""
        return self._constrain(super().join(self._constrain(x, 1)), 0)

    def zeros(self, shape: tuple[int, ...], dtype: Any, axis: int = 0) -> jax.Array:
        """As `Stages.zeros`."""
        return self._constrain(super().zeros(shape, dtype), axis)

    def shift(self, x: jax.Array, by: int) -> jax.Array:
        """As `Stages.shift`."""
        # The last stage sends nothing to the first, except for the next chunk.
        ends = range(self.size) if self.chunks > 1 else range(max(-by, 0), self.size - max(by, 0))
        pairs = [(i, (i + by) % self.size) for i in ends]
        return self._per_stage(partial(lax.ppermute, axis_name=PIPELINE, perm=pairs), P(PIPELINE))(x)

    def pick(self, x: jax.Array, index: jax.Array) -> jax.Array:
        """As `Stages.pick`."""
        return self._per_stage(_element, P(None, PIPELINE), P(PIPELINE))(x, index)

    def pick_shared(self, x: jax.Array, index: jax.Array) -> jax.Array:
        """As `Stages.pick_shared`."""
        return self._per_stage(lambda x, i: _element(x, i)[None], P(), P(PIPELINE))(x, index)

    def add(self, x: jax.Array, index: jax.Array, values: jax.Array) -> jax.Array:
        """As `Stages.add`."""

        def added(x: jax.Array, index: jax.Array, values: jax.Array) -> jax.Array:
            new = lax.dynamic_index_in_dim(x, index[0], 0) + values[None]
            return lax.dynamic_update_slice_in_dim(x, new, index[0], 0)

        specs = P(None, PIPELINE), P(PIPELINE), P(PIPELINE)
        return self._per_stage(added, *specs, out=P(None, PIPELINE))(x, index, values)

    def divide(self, x: jax.Array, axis: int | None) -> jax.Array:
        """As `Stages.divide`: each device along pipeline has a part of the rows of each device that divides rows."""
        if axis is None:
            return self.last(x)

        def divided(values: jax.Array) -> jax.Array:
            # Each stage receives a part from all; that of the last one is used.
            parts = lax.all_to_all(values[0], PIPELINE, axis, axis, tiled=True)
            size = parts.shape[axis] // self.size
            return lax.slice_in_dim(parts, parts.shape[axis] - size, None, axis=axis)

        before = [None] * axis
        return self._on_rows(divided, P(PIPELINE, *before, ROWS), P(*before, ROWS_OF_HEAD))(x)

    def collect(self, x: jax.Array, axis: int | None) -> jax.Array:
        """As `Stages.collect`."""
        if axis is None:
            return self._constrain(super().collect(x, axis), 0)
        before = [None] * axis
        gather = partial(lax.all_gather, axis_name=PIPELINE, axis=axis, tiled=True)
        collected = self._on_rows(lambda x: gather(x)[None], P(*before, ROWS_OF_HEAD), P(PIPELINE, *before, ROWS))
        return collected(x)

    def _on_rows(self, fn: Callable[..., jax.Array], spec: P, out: P) -> Callable[..., jax.Array]:
        options: dict[str, Any] = {"axis_names": frozenset(ROWS_OF_HEAD), "check_vma": False}
        return jax.shard_map(fn, mesh=self._mesh, in_specs=(spec,), out_specs=out, **options)

    def _per_stage(self, fn: Callable[..., jax.Array], *specs: P, out: P | None = None) -> Callable[..., jax.Array]:
        options: dict[str, Any] = {"axis_names": frozenset({PIPELINE}), "check_vma": False}
        return jax.shard_map(fn, mesh=self._mesh, in_specs=specs, out_specs=out or P(PIPELINE), **options)

    def _constrain(self, x: jax.Array, axis: int) -> jax.Array:
        spec = P(*(PIPELINE if i == axis else None if i < axis else P.UNCONSTRAINED for i in range(x.ndim)))
        return lax.with_sharding_constraint(x, NamedSharding(self._mesh, spec))


def _element(x: jax.Array, index: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(x, index[0], 0, keepdims=False)
