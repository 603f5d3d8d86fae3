"""Groups of rows on a mesh, one for each device that divides rows, whose gradients are added once a window."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.distributed.mesh import DATA, DCN, EXPERT, FSDP, PIPELINE, ROWS
from jaxtrain.distributed.sharding import Rules, automatic_spec, divide_over, mesh_axes, param_shardings, replicate_over
from jaxtrain.passes import Groups


def row_groups(mesh: Mesh, rules: Rules | None, gradient_sums: str) -> Groups | None:
    """Return the groups of rows whose gradients are added once a window; None for one group.

    Args:
      mesh: The mesh.
      rules: `PartitionSpec`s of the parameters by path.
      gradient_sums: "whole" for a group of each device that has its own rows; "sharded" for groups that fsdp does not
        divide: it shards the sums, and adds its devices' gradients in every micro-batch.
    """
    dividing = ROWS if gradient_sums == "whole" else (DCN, DATA, EXPERT)
    axes = tuple(axis for axis in dividing if mesh.shape.get(axis, 1) > 1)
    return MeshGroups(mesh, axes, rules) if axes else None


def lookup_groups(mesh: Mesh, rules: Rules | None, accumulate: Any) -> Groups | None:
    """Return the groups of rows for the gradients of tables in a window of one micro-batch; None for one group.

    Along fsdp, the compiler reduces the gradient of a lookup and that of a tied head separately, and adds what each
    device has. Along the other axes, which would reduce both once more, their sum is reduced.

    Args:
      mesh: The mesh.
      rules: `PartitionSpec`s of the parameters by path.
      accumulate: Micro-batches per window. In a window of several, all gradients are added by groups.
    """
    shards = mesh.shape.get(FSDP, 1) > 1 and mesh.shape.get(PIPELINE, 1) == 1
    return row_groups(mesh, rules, "sharded") if shards and accumulate == 1 else None


class MeshGroups(Groups):
    """The groups of the devices along some axes of a mesh."""

    def __init__(self, mesh: Mesh, axes: tuple[str, ...], rules: Rules | None) -> None:
        super().__init__(axes, tuple(mesh.shape[axis] for axis in axes))
        self._mesh, self._rules = mesh, rules
        self.scatters = FSDP in axes

    def of_sums(self, sums: jax.Array) -> "MeshGroups":
        """As `Groups.of_sums`: each device of expert has its own experts, whose gradients are not added over expert."""
        return self if len(sums) == self.size else self._without_expert

    @property
    def _without_expert(self) -> "MeshGroups":
        return MeshGroups(self._mesh, tuple(axis for axis in self.axes if axis != EXPERT), self._rules)

    def zeros(self, params: Any) -> Any:
        """As `Groups.zeros`."""
        if EXPERT not in self.axes:
            return super().zeros(params)

        def of_param(x: Any, sharding: NamedSharding) -> jax.Array:
            has_experts = EXPERT in mesh_axes(sharding.spec)
            groups, like = (self._without_expert, sharding) if has_experts else (self, None)
            return groups.shard(jnp.zeros((groups.size, *x.shape), x.dtype), like)

        return jax.tree.map(of_param, params, param_shardings(params, self._mesh, self._rules))

    def shard(self, x: jax.Array, like: NamedSharding | None = None) -> jax.Array:
        """As `Groups.shard`."""
        others = [P.UNCONSTRAINED] * (x.ndim - 1) if like is None else replicate_over(like, self.axes).spec
        return self._constrain(x, P(self.axes, *others))

    def each(self, compute: Callable[..., jax.Array], rows: tuple[int, ...]) -> Callable[..., jax.Array]:
        """As `Groups.each`."""
        specs = tuple(P(*[None] * axis, self.axes) for axis in rows)
        return self._map(lambda *arrays: compute(*arrays)[None], specs)

    def place(self, gradient: jax.Array) -> jax.Array:
        """As `Groups.place`: along fsdp, every device has a part, so that none receives the whole gradient."""
        spec = automatic_spec(gradient.shape, self._mesh) if FSDP in self.axes else P()
        if not self.axes:
            return gradient[None]

        def placed(part: jax.Array) -> jax.Array:
            whole = part
            if spec:
                axis = len(spec) - 1
                start = lax.axis_index(FSDP) * part.shape[axis]
                zeros = jnp.zeros_like(part, shape=gradient.shape)
                whole = lax.dynamic_update_slice_in_dim(zeros, part, start, axis)
            others = [axis for axis in self.axes if not spec or axis != FSDP]
            is_first = jnp.array([lax.axis_index(axis) == 0 for axis in others], bool).all()
            return jnp.where(is_first, whole, jnp.zeros_like(whole))[None]

        return self._map(placed, (spec,))(gradient)

    def add(self, sums: Any) -> Any:
        """As `Groups.add`, from the innermost axis to the outermost.

        Each device receives its part of fsdp, and those of data add it. With dcn, each device of data receives a part,
        dcn adds these over the network, and data gathers them.
        """
        if self.axes in ((DATA,), (DCN,)):
            return super().add(sums)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), sums)
        return jax.tree.map(lambda x, sharding: self.add_to(sharding, x), sums, self.shardings(shapes))

    def shardings(self, params: Any) -> Any:
        """As `Groups.shardings`."""
        return param_shardings(params, self._mesh, self._rules)

    def add_to(self, sharding: NamedSharding, sums: jax.Array) -> jax.Array:
        """As `Groups.add_to`, in the order of `add`."""
        return self.of_sums(sums)._add(sums, sharding)

    def _add(self, x: jax.Array, sharding: NamedSharding) -> jax.Array:
        divided = divide_over(sharding, x.shape[1:], DATA) if DCN in self.axes else sharding
        x = self._constrain(x.reshape(*self.sizes, *x.shape[1:]), P(*self.axes, *[P.UNCONSTRAINED] * (x.ndim - 1)))
        others = [*self.axes]
        # From the innermost axis to the outermost, but fsdp first: the others then add its parts.
        for axis in sorted(self.axes, key=lambda axis: (axis == FSDP, self.axes.index(axis)), reverse=True):
            i = others.index(axis)
            del others[i]
            x = self._constrain(x.sum(i), P(*others, *(divided if axis in (DCN, DATA) else sharding).spec))
        return lax.with_sharding_constraint(x, sharding)

    def _constrain(self, x: jax.Array, spec: P) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(self._mesh, spec))

    def _map(self, compute: Callable[..., jax.Array], specs: tuple[P, ...]) -> Callable[..., jax.Array]:
        # Unchecked: a convolution's transpose does not know on which devices its kernel differs.
        # Along pipeline too, which divides the stages that the caller maps over.
        options: dict[str, Any] = {"axis_names": frozenset({*self.axes, PIPELINE}), "check_vma": False}
        return jax.shard_map(compute, mesh=self._mesh, in_specs=specs, out_specs=P(self.axes), **options)
