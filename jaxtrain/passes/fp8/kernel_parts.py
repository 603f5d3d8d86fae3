"""Parts of a parameter that products use as kernels, and their copies in 8 bits for a window.

A part is described by how the program arrives at it from the parameter: by changes of its layout, and by scans over its
first axis. It is quantized as in the program, for all steps of a scan at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.passes.fp8.fp8_settings import Fp8
from jaxtrain.passes.fp8.kernel_scales import KernelScales
from jaxtrain.passes.fp8.quantized_kernel import Gathering, QuantizedKernel, Whole, quantize_kernel
from jaxtrain.program import equations, rewrite
from jaxtrain.program import operations as op
from jaxtrain.program.part_specs import Entries, entries, reshaped

_UNCHANGED = op.IDENTITIES | {op.CUSTOM_VJP_CALL}


@dataclass(frozen=True)
class Change:
    """A change of an array's layout; equal to the same change in another trace.

    Attributes:
      name: Of the primitive, or "each": a scan over the first axis.
      params: Those of the primitive.
      eqn: The equation.
    """

    name: str
    params: tuple[tuple[str, Any], ...] = ()
    eqn: JaxprEqn | None = field(default=None, compare=False)

    @classmethod
    def of(cls, eqn: JaxprEqn) -> "Change":
        """Return the change by an equation."""
        return cls(op.of(eqn), tuple(sorted(equations.params(eqn).items())), eqn)


EACH = Change("each")
Changes = tuple[Change, ...] | None
"""Changes in order; None if they depend on values of the program."""


def after(changes: Changes, eqn: JaxprEqn) -> Changes:
    """Return the changes with that of an equation."""
    if changes is None or op.of(eqn) in _UNCHANGED:
        return changes
    return None if len(eqn.invars) > 1 else (*changes, Change.of(eqn))


class Part(NamedTuple):
    """A part of a parameter that a product uses as its kernel.

    Attributes:
      changes: How the program arrives at it.
      contracted: The axes that the product sums over.
    """

    changes: tuple[Change, ...]
    contracted: tuple[int, ...]


def as_matrix(kernel: jax.Array, contracted: Sequence[int]) -> jax.Array:
    """Return a kernel as a matrix whose first axis a product sums over."""
    order = _order(kernel.ndim, contracted)
    depth = int(np.prod([kernel.shape[i] for i in contracted]))
    return transposed(kernel, order).reshape(depth, kernel.size // depth)


def transposed(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Transpose an array unless its axes are in order."""
    return x if axes == tuple(range(x.ndim)) else lax.transpose(x, axes)


def _order(ndim: int, contracted: Sequence[int]) -> tuple[int, ...]:
    return (*contracted, *(i for i in range(ndim) if i not in contracted))


def quantized_part(fp8: Fp8, part: Part, x: jax.Array, scales: KernelScales | None) -> QuantizedKernel:
    """Return a part of a parameter in 8 bits, with a leading axis for every scan.

    Args:
      fp8: The settings.
      part: The part.
      x: The parameter.
      scales: Its delayed scales, or None.
    """
    if not part.changes:
        scale = None if scales is None else scales.of_one().scale[1]
        return quantize_kernel(fp8, as_matrix(x, part.contracted), scale)
    change, rest = part.changes[0], part._replace(changes=part.changes[1:])
    if change.eqn is None:
        of_each = scales is not None and scales.n_leading > 0
        mapped = jax.vmap(lambda x, scales: quantized_part(fp8, rest, x, scales), (0, 0 if of_each else None))
        each: QuantizedKernel = mapped(x, scales)
        return each
    changed = rewrite.bind(change.eqn, [x])[0]
    return quantized_part(fp8, rest, changed, None if scales is None else scales.after(change.eqn, []))


class Placed(NamedTuple):
    """How a part is sharded.

    Attributes:
      each: The mesh axes of the axes that scans are over.
      matrix: Those of the matrix.
    """

    each: Entries
    matrix: Entries


def placed(part: Part, shape: tuple[int, ...], sharding: NamedSharding) -> Placed | None:
    """Return how a part is sharded as the parameter is; None if its numbers are in no order that a sharding has.

    Args:
      part: The part.
      shape: The parameter's shape.
      sharding: The parameter's sharding.
    """
    spec = entries(sharding.spec, len(shape))
    each: Entries = ()
    for change in part.changes:
        if change.eqn is None:
            each, spec, shape = (*each, spec[0]), spec[1:], shape[1:]
            continue
        aval: Any = change.eqn.outvars[0].aval
        changed = _changed(change, spec, shape, aval.shape, sharding)
        if changed is None:
            return None
        spec, shape = changed, aval.shape
    order = _order(len(shape), part.contracted)
    spec, shape = tuple(spec[i] for i in order), tuple(shape[i] for i in order)
    depth = int(np.prod(shape[: len(part.contracted)]))
    matrix = reshaped(spec, shape, (depth, int(np.prod(shape)) // depth), sharding.mesh)
    return None if matrix is None else Placed(each, matrix)


def _changed(
    change: Change, spec: Entries, before: tuple[int, ...], shape: tuple[int, ...], sharding: NamedSharding
) -> Entries | None:
    params = dict(change.params)
    if change.name == op.TRANSPOSE:
        return tuple(spec[i] for i in params["permutation"])
    if change.name == op.SLICE:
        whole = [own is None or n == m for own, n, m in zip(spec, before, shape, strict=True)]
        return spec if all(whole) else None
    if change.name not in (op.RESHAPE, op.SQUEEZE):
        return None
    return reshaped(spec, before, shape, sharding.mesh)


def gathering(part: Part | None, shape: tuple[int, ...], sharding: Any, whole: Whole | None) -> Gathering | None:
    """Return how a part in 8 bits is gathered for a product; None if it is not known, or no device has less of it.

    Args:
      part: The part.
      shape: The parameter's shape.
      sharding: The parameter's sharding, or None.
      whole: Returns a sharding without the axes over which parameters are gathered; None on one device.
    """
    if part is None or whole is None or not isinstance(sharding, NamedSharding):
        return None
    found = placed(part, shape, sharding)
    if found is None:
        return None
    own = NamedSharding(sharding.mesh, P(*found.matrix))
    return None if whole(own).is_equivalent_to(own, 2) else Gathering(own, whole(own))


def constrained_copy(
    copy: QuantizedKernel, part: Part, shape: tuple[int, ...], sharding: Any, whole: Whole | None, *, keeps_whole: bool
) -> QuantizedKernel:
    """Constrain the sharding of a copy of a part to the parameter's, or to gathered numbers.

    Args:
      copy: The copy, with a leading axis for every scan.
      part: The part.
      shape: The parameter's shape.
      sharding: The parameter's sharding, or None.
      whole: As for `gathering`.
      keeps_whole: Whether to gather the copy.
    """
    if whole is None or not isinstance(sharding, NamedSharding) or (found := placed(part, shape, sharding)) is None:
        return copy
    own = NamedSharding(sharding.mesh, P(*found.each, *found.matrix))

    def constrain(x: jax.Array) -> jax.Array:
        if x.dtype.itemsize > 1:  # scales
            return x
        x = lax.with_sharding_constraint(x, own)
        return lax.with_sharding_constraint(x, whole(own)) if keeps_whole else x

    return jax.tree.map(constrain, copy)
