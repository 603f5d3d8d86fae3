"""Compute the products of a function with its parameters in 8 bits.

A parameter is followed through conversions, layout operations, calls, checkpoints and scans to the products that use
it. The function is one under a policy already: a product in 8 bits replaces one in its compute dtype, and reads the
parameter in the dtype that it is stored in.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxtrain.errors import UserError
from jaxtrain.paths import Matching, path_name
from jaxtrain.transforms import jaxpr
from jaxtrain.transforms.biased_product import NAME as BIASED_PRODUCT
from jaxtrain.transforms.casts import is_array, to_dtype
from jaxtrain.transforms.fp8 import Fp8
from jaxtrain.transforms.fp8_product import fp8_product
from jaxtrain.transforms.gathered import DIVIDED_LOOKUP
from jaxtrain.transforms.kernel_scales import KernelScales, Uses
from jaxtrain.transforms.precision import DISABLED

MULTIPLE = 16
"""Of which both sizes of a kernel must be multiples, as for `torch._scaled_mm` and cuBLASLt."""

_CALLS = frozenset({"jit", "pjit", "checkpoint", "remat2"})
# Of the first operand; the others are indices.
_LAYOUT = frozenset({"copy", "dynamic_slice", "expand_dims", "name", "reshape", "slice", "squeeze", "transpose"})
_PRODUCTS = frozenset({"conv_general_dilated", "dot_general", "ragged_dot_general", BIASED_PRODUCT})


class KernelUse(NamedTuple):
    """A product with a parameter.

    Attributes:
      path: The parameter's path.
      kernels: Number of kernels in the parameter: those of all layers that are scanned over.
      reason: Why the product is not in 8 bits; None if it is.
    """

    path: str
    kernels: int
    reason: str | None


def fp8_products(
    fn: Callable[..., Any], fp8: Fp8, compute_dtype: Any, scales: Any = None, probes: Any = None
) -> Callable[..., Any]:
    """Compute the products of a function `fn(params, …)` with its parameters in 8 bits.

    Args:
      fn: The function, under autocast or computed in low precision as a whole.
      fp8: The settings. "delayed" is "tensor" without `scales`.
      compute_dtype: That of the function; a product of other dtypes is not in 8 bits.
      scales: With the scaling "delayed", the scales of each kernel, a tree like the parameters.
      probes: Zeros like `scales`: the gradient by them is the largest magnitudes that products have.

    Returns:
      The same function. Products qualify whose kernel, of sizes that are multiples of 16, is a parameter that is
      neither excluded nor looked up in; not those of two parameters, nor batched ones.

    Raises:
      UserError: No product qualifies, when the function is called.

    Example:
      >>> from jaxtrain.transforms.precision import autocast
      >>> fn = fp8_products(autocast(lambda kernel, x: x @ kernel, jnp.bfloat16), Fp8(), jnp.bfloat16)
      >>> text = str(jax.make_jaxpr(fn)(jnp.ones((16, 32)), jnp.ones((1, 16))))
      >>> "fp8_product" in text, "dot_general" in text
      (True, False)
    """

    def computed(*args: Any, **kwargs: Any) -> Any:
        uses: list[KernelUse] = []
        result = _rewritten(fn, fp8, compute_dtype, uses, scales, probes)(*args, **kwargs)
        if all(use.reason for use in uses):
            raise UserError(_none_qualifies(uses))
        return result

    return computed


def kernel_uses(fn: Callable[..., Any], fp8: Fp8, compute_dtype: Any, *args: Any) -> list[KernelUse]:
    """Return the products of a function `fn(params, …)` with its parameters, in 8 bits and not.

    Args:
      fn: The function, as for `fp8_products`.
      fp8: The settings.
      compute_dtype: As for `fp8_products`.
      *args: Its arguments, or their shapes.

    Example:
      >>> from jaxtrain.transforms.precision import autocast
      >>> params = {"body": jnp.ones((16, 16)), "head": jnp.ones((16, 32))}
      >>> fn = autocast(lambda params, x: x @ params["body"] @ params["head"], jnp.bfloat16)
      >>> [(use.path, use.reason) for use in kernel_uses(fn, Fp8(), jnp.bfloat16, params, jnp.ones((1, 16)))]
      [('body', None), ('head', 'excluded')]
    """
    uses: list[KernelUse] = []
    jax.eval_shape(_rewritten(fn, fp8, compute_dtype, uses), *args)
    return uses


def format_uses(uses: Sequence[KernelUse]) -> str:
    """Return which kernels are in 8 bits and which are not, in one line.

    Example:
      >>> format_uses([KernelUse("blocks/fc/kernel", 12, None), KernelUse("head/kernel", 1, "excluded")])
      '12 kernels; not in 8 bits: head/kernel (excluded)'
    """
    low = sum(use.kernels for use in uses if use.reason is None)
    others = ", ".join(f"{use.path} ({use.reason})" for use in uses if use.reason is not None)
    return f"{low} kernel{'s' * (low != 1)}" + (f"; not in 8 bits: {others}" if others else "")


def _none_qualifies(uses: Sequence[KernelUse]) -> str:
    found = "; ".join(dict.fromkeys(f"{use.path or 'params'} ({use.reason})" for use in uses)) or "no parameter is one"
    return (
        f"precision fp8: no kernel qualifies for products in 8 bits, of the parameters in products: {found}: use bf16, "
        f"or kernels whose sizes are multiples of {MULTIPLE} and that are not excluded"
    )


def _rewritten(
    fn: Callable[..., Any], fp8: Fp8, compute_dtype: Any, uses: list[KernelUse], scales: Any = None, probes: Any = None
) -> Callable[..., Any]:
    if fp8.is_delayed and scales is None:
        fp8 = Fp8(exclude=fp8.exclude)

    def computed(params: Any, *rest: Any, **kwargs: Any) -> Any:
        leaves = jax.tree_util.tree_leaves_with_path(params)
        excluded = Matching(fp8.exclude)
        scales_of_leaves = [None] * len(leaves) if scales is None else _joined(scales, probes)

        def evaluate(closed: ClosedJaxpr, values: list[Any]) -> list[Any]:
            given = []
            of_params = zip(leaves, scales_of_leaves, strict=True)
            for ((path, _), own), x, var in zip(of_params, values, closed.jaxpr.invars, strict=False):
                name = path_name(path)
                reason = "excluded" if excluded(name) else "looked up" if _is_table(closed.jaxpr, var) else None
                given.append(_Parameter(x, own, x.dtype, name, x.size, reason) if is_array(x) else x)
            # Autocast traces its operations in one such region.
            run = _runner(fp8, compute_dtype, uses, disabled=-1)
            return [*map(_converted, run(closed.jaxpr, closed.consts, [*given, *values[len(leaves) :]]))]

        return jaxpr.retrace(fn, evaluate)(params, *rest, **kwargs)

    return computed


def _joined(scales: Any, probes: Any) -> list[KernelScales | None]:
    """Return the scales with the probe of each parameter, None for those without."""
    of_leaves = (jax.tree.leaves(tree, is_leaf=lambda x: x is None) for tree in (scales, probes))
    return [None if scale is None else KernelScales(scale, probe) for scale, probe in zip(*of_leaves, strict=True)]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Parameter:
    """A parameter, or a part of it, that stands for its conversion to a dtype; a pytree, so that scans slice it.

    Attributes:
      array: In the dtype that the parameter is stored in.
      scales: Its delayed scales, or None.
      dtype: The dtype that it stands for.
      path: The path of the parameter.
      size: Number of elements of the parameter.
      reason: Why none of its products is in 8 bits; None if some may be.
    """

    array: Any
    scales: KernelScales | None
    dtype: Any = field(metadata={"static": True})
    path: str = field(metadata={"static": True})
    size: int = field(metadata={"static": True})
    reason: str | None = field(metadata={"static": True})

    def converted(self) -> Any:
        return to_dtype(self.dtype, self.array)


def _converted(x: Any) -> Any:
    return x.converted() if isinstance(x, _Parameter) else x


def _is_parameter(x: Any) -> bool:
    return isinstance(x, _Parameter)


def _runner(fp8: Fp8, compute_dtype: Any, uses: list[KernelUse], disabled: int) -> jaxpr.Run:
    """Return a function that evaluates a jaxpr, called in so many regions in which autocast is disabled."""

    def rule(of_jaxpr: Uses, eqn: JaxprEqn, args: list[Any], run: jaxpr.Run) -> Sequence[Any] | None:
        del run
        args = [_used(of_jaxpr, v, x) for v, x in zip(eqn.invars, args, strict=True)]
        name, depth = eqn.primitive.name, disabled + _regions(eqn)
        inner = _runner(fp8, compute_dtype, uses, depth)
        if not any(map(_is_parameter, args)):
            return None
        if name in _CALLS:
            return jaxpr.HIGHER_ORDER[name](eqn, args, inner)
        if name == "scan":
            return _scan(eqn, args, inner)
        first, rest = args[0], args[1:]
        if _is_parameter(first) and not any(map(_is_parameter, rest)):
            if name == "convert_element_type" and _is_followed(first, eqn.params["new_dtype"]):
                return [replace(first, dtype=np.dtype(eqn.params["new_dtype"]))]
            if name in _LAYOUT or _is_identity(eqn):
                array = _apply(eqn, [first.array, *rest], inner)[0]
                return [replace(first, array=array, scales=first.scales and first.scales.after(eqn, rest))]
        if (product := _Product.of(eqn)) is not None and any(map(_is_parameter, args[:2])):
            reason = product.refusal(args, depth, compute_dtype, is_delayed=fp8.is_delayed)
            _note(uses, args[:2], reason)
            if reason is None:
                return [product.multiply([*args[:2], *map(_converted, args[2:])], fp8)]
        elif any(_has_product(eqn)):
            _note(uses, args, _KINDS.get(name, "in a function that is not followed"))
        return _apply(eqn, [*map(_converted, args)], inner)

    return lambda traced, consts, args: jaxpr.interpret(traced, consts, args, partial(rule, Uses(traced)))


def _used(of_jaxpr: Uses, variable: Any, x: Any) -> Any:
    if not _is_parameter(x) or x.scales is None:
        return x
    return replace(x, scales=of_jaxpr.next_of(variable, x.scales))


_KINDS = {"conv_general_dilated": "a convolution", "ragged_dot_general": "a grouped product"}


def _apply(eqn: JaxprEqn, args: list[Any], run: jaxpr.Run) -> list[Any]:
    rebuild = jaxpr.HIGHER_ORDER.get(eqn.primitive.name)
    return jaxpr.bind(eqn, args) if rebuild is None else rebuild(eqn, args, run)


def _scan(eqn: JaxprEqn, args: list[Any], run: jaxpr.Run) -> list[Any]:
    """Scan over layers of parameters. Scales of whole parameters are repeated, so that each step has its own probe."""
    n_consts, n_carry = jaxpr.scan_sizes(eqn)
    end, length = n_consts + n_carry, eqn.params["length"]
    args = [_converted(x) if n_consts <= i < end else x for i, x in enumerate(args)]
    of_all = {i: x.scales for i, x in enumerate(args) if _is_whole(x, is_sliced=i >= end)}
    args = [replace(x, scales=None) if i in of_all else x for i, x in enumerate(args)]

    def body(traced: Jaxpr, consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        own = dict(zip(of_all, values[len(traced.invars) :], strict=True))
        given = values[: len(traced.invars)]
        given = [replace(x, scales=own[i]) if i in own else x for i, x in enumerate(given)]
        return [*map(_converted, run(traced, consts, given))]

    repeated = [scales.repeated(length) for scales in of_all.values()]
    return jaxpr.HIGHER_ORDER["scan"](eqn, [*args, *repeated], body)


def _is_whole(x: Any, *, is_sliced: bool) -> bool:
    """Return whether the scales of a parameter are not sliced by a scan, which slices the parameter or shares it."""
    return _is_parameter(x) and x.scales is not None and not (is_sliced and x.scales.n_leading)


def _regions(eqn: JaxprEqn) -> int:
    """Return the number of regions, in which autocast is disabled, that an equation was traced in."""
    return sum(part.name == DISABLED for part in eqn.source_info.name_stack.stack)


def _is_followed(x: _Parameter, dtype: Any) -> bool:
    """Return whether a parameter is converted once at most."""
    return x.dtype in (x.array.dtype, dtype) and jnp.issubdtype(dtype, np.floating)


def _is_identity(eqn: JaxprEqn) -> bool:
    """Return whether an equation returns its operand: a hook, or a constraint of its sharding."""
    if eqn.primitive.name != "custom_vjp_call":
        return eqn.primitive.name == "sharding_constraint"
    body = eqn.params["call_jaxpr"].jaxpr
    names = [inner.primitive.name for inner in body.eqns]
    return names == ["sharding_constraint"] or (not names and body.outvars == body.invars)


def _has_product(eqn: JaxprEqn) -> Iterator[bool]:
    """Yield a value for every product in an equation."""
    if eqn.primitive.name in _PRODUCTS:
        yield True
    for inner in jaxpr.inner_jaxprs(eqn):
        for inner_eqn in inner.eqns:
            yield from _has_product(inner_eqn)


def _note(uses: list[KernelUse], args: Sequence[Any], reason: str | None) -> None:
    for x in args:
        if _is_parameter(x):
            use = KernelUse(x.path, x.size // math.prod(x.array.shape), reason)
            if use not in uses:
                uses.append(use)


def _is_table(traced: Jaxpr, var: Any) -> bool:
    """Return whether a program looks up rows of a parameter."""
    for eqn in traced.eqns:
        for i in (i for i, v in enumerate(eqn.invars) if v is var):
            name = eqn.primitive.name
            if i == 0 and (name == "gather" or jaxpr.is_call(eqn, DIVIDED_LOOKUP)):
                return True
            if name in _CALLS or name == "scan":
                (inner,) = jaxpr.inner_jaxprs(eqn)
                found = _is_table(inner, inner.invars[i])
            elif name in _LAYOUT or name == "convert_element_type" or _is_identity(eqn):
                found = _is_table(traced, eqn.outvars[0])
            else:
                found = False
            if found:
                return True
    return False


class _Product(NamedTuple):
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
    def of(cls, eqn: JaxprEqn) -> "_Product | None":
        """Return the product that an equation computes, with a bias or without one; None for any other equation."""
        inner = eqn
        if eqn.primitive.name == "custom_jvp_call":
            inner, *more = eqn.params["call_jaxpr"].jaxpr.eqns
            # Autocast's own products with a derivative: those with a bias, and those that are not rounded.
            is_unrounded = inner.primitive.name == "dot_general" and inner.outvars[0].aval.dtype == np.float32
            if more or not (is_unrounded or inner.primitive.name == BIASED_PRODUCT):
                return None
        elif eqn.primitive.name != "dot_general":
            return None
        avals: list[Any] = [v.aval for v in (*eqn.invars, *eqn.outvars)]
        shapes, dtypes = zip(*((aval.shape, aval.dtype) for aval in avals), strict=True)
        return cls(shapes[:2], inner.params["dimension_numbers"], (*dtypes[:2], dtypes[-1]), shapes[-1])

    def refusal(self, args: Sequence[Any], disabled: int, compute_dtype: Any, *, is_delayed: bool) -> str | None:
        """Return why the product is not in 8 bits; None if it is."""
        kernels = [i for i in (0, 1) if _is_parameter(args[i])]
        if len(kernels) != 1:
            return "a product of parameters"
        kernel = args[kernels[0]]
        if kernel.reason is not None:
            return str(kernel.reason)
        others = [dtype for dtype in self.dtypes[:2] if dtype != compute_dtype]
        if others:
            return f"in {others[0].name}"
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

    def multiply(self, args: Sequence[Any], fp8: Fp8) -> jax.Array:
        """Return the product in 8 bits."""
        which = int(_is_parameter(args[1]))
        x, kernel, *bias = args[1 - which], args[which].array, *args[2:]
        scales = args[which].scales and args[which].scales.of_one()
        contracted, _ = self.dimension_numbers
        of_x, of_kernel = contracted[1 - which], contracted[which]
        rows = [i for i in range(x.ndim) if i not in of_x]
        columns = [i for i in range(kernel.ndim) if i not in of_kernel]
        rows_shape, columns_shape = ([a.shape[i] for i in axes] for a, axes in ((x, rows), (kernel, columns)))
        depth, width = math.prod(x.shape[i] for i in of_x), math.prod(columns_shape)
        x = _transposed(x, (*rows, *of_x)).reshape(*(rows_shape or [1]), depth)
        kernel = _transposed(kernel, (*of_kernel, *columns)).reshape(depth, width)
        result = self.dtypes[2]
        if bias and which == 1 and len(columns) == 1:
            return fp8_product(x, kernel, *bias, fp8=fp8, result=result, scales=scales).reshape(self.out_shape)
        out = fp8_product(x, kernel, fp8=fp8, result=np.float32 if bias else result, scales=scales)
        out = out.reshape(*rows_shape, *columns_shape)
        if which == 0:
            out = _transposed(out, (*range(len(rows), out.ndim), *range(len(rows))))
        for b in bias:
            out += lax.broadcast_in_dim(b.astype(np.float32), out.shape, range(out.ndim))
        return to_dtype(result, out)


def _transposed(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    return x if axes == tuple(range(x.ndim)) else lax.transpose(x, axes)
