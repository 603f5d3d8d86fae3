"""Shardings of parameters, and of the optimizer state, gradient sums and averages that follow them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.distributed.mesh import EXPERT, FSDP
from jaxtrain.errors import UserError
from jaxtrain.optim import Blockwise
from jaxtrain.paths import path_name
from jaxtrain.step import TrainState

Rules = Mapping[str, P]
"""Map from a regular expression for the full path of a parameter ("blocks/fc/kernel") to its `PartitionSpec`.

The first match applies. The rules of a model are in its file.
"""


def param_shardings(params: Any, mesh: Mesh, rules: Rules | None) -> Any:
    """Return a `NamedSharding` for every leaf of `params`.

    Args:
      params: Pytree of arrays or shapes.
      mesh: The mesh.
      rules: `PartitionSpec`s by path; None shards the longest axis of each parameter over fsdp.

    Returns:
      A pytree like `params`. Mesh axes that do not divide an axis of a parameter are left out.

    Raises:
      UserError: No rule matches a parameter, or its rule has more axes than the parameter.

    Example:
      >>> from jaxtrain.distributed.mesh import make_mesh
      >>> params = {"fc": {"kernel": jax.ShapeDtypeStruct((6, 8), "float32")}}
      >>> mesh = make_mesh("fsdp=1", jax.devices()[:1])
      >>> param_shardings(params, mesh, {".*/kernel": P("fsdp", "tensor")})["fc"]["kernel"].spec
      P('fsdp', 'tensor')
    """

    def sharding(path: Any, x: Any) -> NamedSharding:
        spec = automatic_spec(x.shape, mesh) if rules is None else _match_rule(path_name(path), x.shape, rules)
        return NamedSharding(mesh, fit_spec(spec, x.shape, mesh))

    return jax.tree_util.tree_map_with_path(sharding, params)


def automatic_spec(shape: tuple[int, ...], mesh: Mesh) -> P:
    """Shard the longest axis that is divisible by fsdp; of equal ones the last."""
    n = mesh.shape.get(FSDP, 1)
    divisible = [i for i, size in enumerate(shape) if size and size % n == 0]
    if not divisible:
        return P()
    longest = max(divisible, key=lambda i: (shape[i], i))
    return P(*[FSDP if i == longest else None for i in range(longest + 1)])


def fit_spec(spec: P, shape: tuple[int, ...], mesh: Mesh) -> P:
    """Remove from `spec` the axes that the mesh lacks or that do not divide the array's axis."""

    def fits(size: int, axes: Any) -> Any:
        kept: list[str] = []
        for axis in (axes,) if isinstance(axes, str) else axes or ():
            n = mesh.shape.get(axis, 1)
            if axis in mesh.shape and size % n == 0:
                kept.append(axis)
                size //= n
        return (kept[0] if len(kept) == 1 else tuple(kept)) if kept else None

    return P(*map(fits, shape, spec))


def divide_over(sharding: NamedSharding, shape: tuple[int, ...], axis: str) -> NamedSharding:
    """Return `sharding` of an array divided further over a mesh axis: along the longest of its parts that is divisible.

    Example:
      >>> from jaxtrain.distributed.mesh import make_mesh
      >>> mesh = make_mesh("data=1", jax.devices()[:1])
      >>> divide_over(NamedSharding(mesh, P(None, "tensor")), (6, 8), "fsdp").spec
      P(None, ('tensor', 'fsdp'))
    """
    n, parts = sharding.mesh.shape.get(axis, 1), sharding.shard_shape(shape)
    divisible = [i for i, size in enumerate(parts) if size and size % n == 0]
    if not divisible:
        return sharding
    longest = max(divisible, key=lambda i: (parts[i], i))
    spec = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
    present = spec[longest]
    spec[longest] = axis if present is None else ((present,) if isinstance(present, str) else tuple(present)) + (axis,)
    return NamedSharding(sharding.mesh, P(*spec))


def mesh_axes(spec: P) -> set[str]:
    """Return the mesh axes of a `PartitionSpec`.

    >>> sorted(mesh_axes(P("tensor", None, ("data", "fsdp"))))
    ['data', 'fsdp', 'tensor']
    """
    return {axis for axes in spec for axis in ((axes,) if isinstance(axes, str) else axes or ())}


def replicate_over(sharding: NamedSharding, replicated: Sequence[str]) -> NamedSharding:
    """Return `sharding` replicated over some axes of the mesh."""

    def rest(axes: Any) -> Any:
        if axes is P.UNCONSTRAINED:
            return axes
        return tuple(a for a in ((axes,) if isinstance(axes, str) else axes or ()) if a not in replicated) or None

    return NamedSharding(sharding.mesh, P(*map(rest, sharding.spec)))


def gather(params: Any, dtypes: Any, mesh: Mesh, rules: Rules | None) -> Any:
    """Gather the parameters that fsdp shards.

    Args:
      params: Pytree of arrays.
      dtypes: The dtypes to gather them in; None for those to leave as they are.
      mesh: The mesh.
      rules: `PartitionSpec`s of the parameters by path.

    Returns:
      A pytree like `params`, with None for parameters that are left as they are, or that fsdp does not shard.
    """

    def gathered(x: jax.Array, dtype: Any, sharding: NamedSharding) -> jax.Array | None:
        whole = replicate_over(sharding, (FSDP,))
        if dtype is None or whole.is_equivalent_to(sharding, x.ndim):
            return None
        # Converted before it is gathered: fewer bytes are sent.
        part = lax.with_sharding_constraint(x.astype(dtype), sharding)
        return lax.with_sharding_constraint(part, whole)

    return jax.tree.map(gathered, params, dtypes, param_shardings(params, mesh, rules))


def state_shardings(state: TrainState, mesh: Mesh, rules: Rules | None) -> TrainState:
    """Return a `NamedSharding` for every leaf of a state, or of its shapes.

    Gradient sums, moments, averages and compensations of parameters, recognized by a parameter's shape and a path that
    ends in its path, are sharded like the parameter; so are the codes of a moment in 8 bits, whose magnitudes fsdp
    divides. Everything else is replicated.
    """
    check_experts(state.params, mesh, rules)
    shardings = param_shardings(state.params, mesh, rules)
    params_by_path = {
        path_name(path): (x.shape, sharding)
        for (path, x), sharding in zip(
            jax.tree_util.tree_leaves_with_path(state.params), jax.tree.leaves(shardings), strict=True
        )
    }

    def sharding(path: Any, x: Any) -> Any:
        if isinstance(x, Blockwise):
            return Blockwise(sharding(path, x.codes), NamedSharding(mesh, automatic_spec(x.absmax.shape, mesh)))
        parts = path_name(path).split("/")
        for i in range(len(parts)):
            shape, found = params_by_path.get("/".join(parts[i:]), (None, None))
            if found is not None and shape == x.shape:
                return found
        return NamedSharding(mesh, P())

    whole = jax.tree.map(lambda _: NamedSharding(mesh, P()), state)
    like_params = {name: getattr(state, name) for name in ("opt_state", "window", "ema", "compensation")}
    kept = jax.tree_util.tree_map_with_path(sharding, like_params, is_leaf=lambda x: isinstance(x, Blockwise))
    return whole._replace(params=shardings, **kept)


def check_experts(params: Any, mesh: Mesh, rules: Rules | None) -> None:
    """Raise `UserError` if the mesh axis expert cannot divide the experts of these parameters, or they have none."""
    n = mesh.shape.get(EXPERT, 1)
    if n == 1:
        return
    counts: dict[str, int] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        name = path_name(path)
        for size, axes in zip(x.shape, _match_rule(name, x.shape, rules) if rules else (), strict=False):
            if EXPERT in mesh_axes(P(axes)):
                counts[name] = size
    if not counts:
        raise UserError(
            f"mesh axis {EXPERT}={n} divides the experts of a model, and no sharding rule of this model names it: "
            "use data or fsdp"
        )
    for name, count in counts.items():
        if count % n:
            raise UserError(
                f"mesh axis {EXPERT}={n} does not divide the {count} experts of {name}: use a divisor of {count}"
            )


def _match_rule(path: str, shape: tuple[int, ...], rules: Rules) -> P:
    for pattern, spec in rules.items():
        if re.fullmatch(pattern, path):
            if len(spec) > len(shape):
                raise UserError(
                    f"the sharding rule {pattern!r} has {len(spec)} axes and {path} only {len(shape)}: fix the rule"
                )
            return spec
    raise UserError(
        f"no sharding rule matches the parameter {path} {list(shape)}: "
        "add one, or omit all rules to shard automatically"
    )
