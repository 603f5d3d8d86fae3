"""A parameter that is followed through a program to the products that use it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from jaxtrain.passes.fp8.kernel_parts import EACH, Changes, Part, after
from jaxtrain.passes.fp8.kernel_scales import KernelScales
from jaxtrain.passes.fp8.quantized_kernel import QuantizedKernel
from jaxtrain.passes.numerics.casts import to_dtype
from jaxtrain.program import equations
from jaxtrain.program import operations as op
from jaxtrain.program.follow import Apply, Followed, constrained_to, moves


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Parameter(Followed):
    """A parameter, or a part of it, that stands for its conversion to a dtype; a pytree, so that scans slice it.

    Attributes:
      array: In the dtype that the parameter is stored in.
      scales: Its delayed scales, or None.
      copies: The copies in 8 bits of `parts`.
      dtype: The dtype that it stands for.
      path: The path of the parameter.
      position: Its position among all parameters.
      shape: The shape of the parameter.
      reason: Why none of its products is in 8 bits; None if some may be.
      changes: How the program has arrived at this part.
      sharding: The sharding to which the program constrains the parameter; None if there is none.
      parts: The parts of this part that have copies.
    """

    array: Any
    scales: KernelScales | None
    copies: tuple[QuantizedKernel, ...]
    dtype: Any = field(metadata={"static": True})
    path: str = field(metadata={"static": True})
    position: int = field(metadata={"static": True})
    shape: tuple[int, ...] = field(metadata={"static": True})
    reason: str | None = field(metadata={"static": True})
    changes: Changes = field(default=(), metadata={"static": True})
    sharding: Any = field(default=None, metadata={"static": True})
    parts: tuple[Part, ...] = field(default=(), metadata={"static": True})

    @property
    def n_kernels(self) -> int:
        """The number of such parts in the parameter."""
        return int(np.prod(self.shape)) // int(np.prod(self.array.shape))

    def used(self) -> Any:
        """Return the array in the dtype that it stands for."""
        return to_dtype(self.dtype, self.array)

    def moved(self, eqn: JaxprEqn, rest: Sequence[Any], apply: Apply) -> "Parameter | None":
        """Return the parameter after an equation that changes its layout, or its first conversion."""
        if op.of(eqn) == op.CONVERT_ELEMENT_TYPE:
            to = equations.dtype(eqn)
            is_first = self.dtype in (self.array.dtype, to) and jnp.issubdtype(to, np.floating)
            return replace(self, dtype=to) if is_first else None
        if not moves(eqn):
            return None
        array, sharding = apply(self.array), constrained_to(eqn) if self.changes == () else None
        scales = self.scales and self.scales.after(eqn, rest)
        moved = replace(self, array=array, scales=scales, sharding=self.sharding if sharding is None else sharding)
        return moved._at(after(self.changes, eqn))

    def to_slice(self) -> "Parameter":
        """Return the parameter, about to be sliced by a scan, without the copies that are not sliced with it."""
        return replace(self._at(self._each), changes=self.changes)

    def sliced(self) -> "Parameter":
        """Return the slice of a scan, of which only the arrays are sliced so far."""
        return replace(self, changes=self._each)

    @property
    def _each(self) -> Changes:
        return None if self.changes is None else (*self.changes, EACH)

    def _at(self, changes: Changes) -> "Parameter":
        """Return the parameter with other changes, and the copies of the parts that they lead to."""
        own = {
            part: copy
            for part, copy in zip(self.parts, self.copies, strict=True)
            if changes is not None and part.changes[: len(changes)] == changes
        }
        return replace(self, changes=changes, parts=tuple(own), copies=tuple(own.values()))

    def part(self, contracted: tuple[int, ...]) -> Part | None:
        """Return the part that a product uses; None if it depends on values of the program."""
        return None if self.changes is None else Part(self.changes, contracted)

    def copy_of(self, part: Part | None) -> QuantizedKernel | None:
        """Return the copy of a part; None if there is none."""
        return dict(zip(self.parts, self.copies, strict=True)).get(part) if part is not None else None
