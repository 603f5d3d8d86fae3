"""The delayed scales of a parameter and the probe that observes its products, followed to them with the parameter."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxtrain.passes.fp8.amax_probes import repeated, split
from jaxtrain.program import equations
from jaxtrain.program import operations as op

_PER_PRODUCT = 3  # of its rows, its kernel and its gradient


class KernelScales(NamedTuple):
    """The scales of a parameter's kernels, with the probe by which the gradient is their largest magnitudes.

    Attributes:
      scale: float32[…, 3]; the leading axes are the parameter's first ones.
      probe: float32[…, 3].
    """

    scale: jax.Array
    probe: jax.Array

    @property
    def n_leading(self) -> int:
        """The number of leading axes."""
        return self.scale.ndim - 1

    def of_one(self) -> "KernelScales":
        """Return those of a single product, float32[3]: of the first kernel, if the product uses several."""
        return self._each(lambda x: x[(0,) * self.n_leading])

    def repeated(self, n: int) -> "KernelScales":
        """Return those of n uses, float32[n, …, 3]."""
        return KernelScales(jnp.broadcast_to(self.scale, (n, *self.scale.shape)), repeated(self.probe, n))

    def split(self, n: int) -> "list[KernelScales]":
        """Return those of each of n uses."""
        return [self] if n == 1 else [KernelScales(self.scale, probe) for probe in split(self.probe, n)]

    def after(self, eqn: JaxprEqn, indices: Sequence[jax.Array]) -> "KernelScales":
        """Return those of the parameter after a change of its layout.

        Args:
          eqn: The equation, whose first operand is the parameter.
          indices: Its other operands.
        """
        n, params, name = self.n_leading, equations.params(eqn), op.of(eqn)
        shape, after = (v.aval.shape[:n] for v in (eqn.invars[0], eqn.outvars[0]))  # type: ignore[attr-defined]
        if name == op.SLICE:
            strides = params["strides"] or (1,) * len(params["start_indices"])
            bounds = (x[:n] for x in (params["start_indices"], params["limit_indices"], strides))
            part = tuple(slice(*own) for own in zip(*bounds, strict=True))
            return self._each(lambda x: x[part])
        if name == op.DYNAMIC_SLICE:
            sizes = (*params["slice_sizes"][:n], _PER_PRODUCT)
            return self._each(lambda x: lax.dynamic_slice(x, (*indices[:n], jnp.zeros_like(indices[0])), sizes))
        if name == op.SQUEEZE:
            return self._each(lambda x: jnp.squeeze(x, tuple(i for i in params["dimensions"] if i < n)))
        keeps = params["permutation"][:n] == tuple(range(n)) if name == op.TRANSPOSE else shape == after
        return self if keeps else self.of_one()

    def _each(self, change: Any) -> "KernelScales":
        return KernelScales(*map(change, self))


class Uses:
    """The uses of variables in a jaxpr, each with a part of the probe of its own."""

    def __init__(self, traced: Jaxpr) -> None:
        self._counts = Counter(v for eqn in equations.of(traced) for v in eqn.invars if not isinstance(v, Literal))
        self._unused: dict[Any, list[KernelScales]] = {}

    def next_of(self, variable: Any, scales: KernelScales) -> KernelScales:
        """Return the scales of a variable for its next use."""
        if variable not in self._unused:
            self._unused[variable] = scales.split(self._counts[variable])
        return self._unused[variable].pop()
