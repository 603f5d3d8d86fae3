"""A matrix product with a parameter, as a product in 8 bits."""

import math
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jaxtrain.passes.fp8.fp8_product import fp8_product
from jaxtrain.passes.fp8.fp8_settings import Fp8
from jaxtrain.passes.fp8.kernel_parts import Part, as_matrix, transposed
from jaxtrain.passes.fp8.quantized_kernel import Gathering, QuantizedKernel
from jaxtrain.passes.numerics.biased_product import NAME as BIASED_PRODUCT
from jaxtrain.passes.numerics.casts import to_dtype
from jaxtrain.program import equations
from jaxtrain.program import operations as op
from jaxtrain.program.follow import is_followed

MULTIPLE = 16
"""Of which both sizes of a kernel must be multiples, as for `torch._scaled_mm` and cuBLASLt."""


class KernelProduct(NamedTuple):
    """A matrix product.

    Attributes:
      shapes: Of its operands.
      dimension_numbers: As for `lax.dot_general`.
      dtypes: Of its operands, and of its result.
      out_shape: Of its result.
    """

    shapes: tuple[tuple[int, ...], ...]
    dimension_numbers: Any
    dtypes: tuple[Any, ...]
    out_shape: tuple[int, ...]

    @classmethod
    def of(cls, eqn: JaxprEqn) -> "KernelProduct | None":
        """Return the product that an equation computes, with a bias or without one; None for any other equation."""
        inner = equations.sole(equations.body(eqn)) if op.of(eqn) == op.CUSTOM_JVP_CALL else eqn
        if inner is None:
            return None
        if inner is not eqn:
            # Autocast's own products with a derivative: those with a bias, and those that are not rounded.
            is_unrounded = op.of(inner) == op.DOT_GENERAL and inner.outvars[0].aval.dtype == np.float32  # type: ignore[attr-defined]
            if not (is_unrounded or op.of(inner) == BIASED_PRODUCT):
                return None
        elif op.of(eqn) != op.DOT_GENERAL:
            return None
        avals: list[Any] = [v.aval for v in (*eqn.invars, *eqn.outvars)]
        shapes, dtypes = zip(*((aval.shape, aval.dtype) for aval in avals), strict=True)
        return cls(shapes[:2], equations.contraction(inner), (*dtypes[:2], dtypes[-1]), shapes[-1])

    def refusal(self, args: Sequence[Any], disabled: int, dtypes: Collection[Any], *, is_delayed: bool) -> str | None:
        """Return why the product, of operands in other `dtypes` for example, is not in 8 bits; None if it is."""
        kernels = [i for i in (0, 1) if is_followed(args[i])]
        if len(kernels) != 1:
            return "a product of parameters"
        kernel = args[kernels[0]]
        if kernel.reason is not None:
            return str(kernel.reason)
        if any(dtype not in dtypes for dtype in self.dtypes[:2]):
            return f"in {self.dtypes[0].name}"
        if disabled > 0:
            return "autocast is disabled"
        (contracted, (batch, _)) = self.dimension_numbers
        if batch:
            return "a batched product"
        depth = math.prod(kernel.array.shape[i] for i in contracted[kernels[0]])
        width = kernel.array.size // depth
        if depth % MULTIPLE or width % MULTIPLE:
            return f"{depth}×{width} is not a multiple of {MULTIPLE}"
        if is_delayed and kernel.scales is None:
            return "a parameter of one axis"
        return None

    def part(self, args: Sequence[Any]) -> Part | None:
        """Return the part of the parameter that is the kernel; None if it depends on values of the program."""
        which = int(is_followed(args[1]))
        part: Part | None = args[which].part(self.dimension_numbers[0][which])
        return part

    def multiply(
        self, args: Sequence[Any], fp8: Fp8, quantized: QuantizedKernel | None, gathering: Gathering | None
    ) -> jax.Array:
        """Return the product in 8 bits, with the kernel already quantized or None."""
        which = int(is_followed(args[1]))
        x, kernel, *bias = args[1 - which], args[which].array, *args[2:]
        scales = args[which].scales and args[which].scales.of_one()
        contracted, _ = self.dimension_numbers
        of_x, of_kernel = contracted[1 - which], contracted[which]
        rows = [i for i in range(x.ndim) if i not in of_x]
        rows_shape = [x.shape[i] for i in rows]
        columns_shape = [kernel.shape[i] for i in range(kernel.ndim) if i not in of_kernel]
        depth = math.prod(x.shape[i] for i in of_x)
        x = transposed(x, (*rows, *of_x)).reshape(*(rows_shape or [1]), depth)
        kernel, result = as_matrix(kernel, of_kernel), self.dtypes[2]
        multiply = partial(fp8_product, fp8=fp8, scales=scales, quantized=quantized, gathering=gathering)
        if bias and which == 1 and len(columns_shape) == 1:
            return multiply(x, kernel, *bias, result=result).reshape(self.out_shape)
        out = multiply(x, kernel, result=np.float32 if bias else result)
        out = out.reshape(*rows_shape, *columns_shape)
        if which == 0:
            out = transposed(out, (*range(len(rows), out.ndim), *range(len(rows))))
        for b in bias:
            out += lax.broadcast_in_dim(b.astype(np.float32), out.shape, range(out.ndim))
        return to_dtype(result, out)
