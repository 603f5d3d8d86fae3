"""Autocast by program transformation, over the jaxpr.

`autocast_lists` defines the dtype of each operation. Master parameters stay in `param_dtype`; a model written in
float32 needs no change.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from jaxtrain.errors import UserError
from jaxtrain.passes.numerics.autocast_lists import AS_TRACED, LISTS, Dtype
from jaxtrain.passes.numerics.bias import biased_products
from jaxtrain.passes.numerics.biased_product import KERNEL, biased_product
from jaxtrain.passes.numerics.casts import (
    IN_FLOAT32,
    LOWER_FLOATS,
    Casts,
    is_array,
    is_float,
    is_limit,
    is_low,
    to_dtype,
    to_widest,
    widen,
    widest,
)
from jaxtrain.passes.numerics.recompute import recompute, recompute_call, recomputes, rounded_results
from jaxtrain.program import equations, rewrite
from jaxtrain.program import operations as op

# These handle operands of different dtypes: widening one would add conversions that PyTorch does not have.
_INDEPENDENT = frozenset({op.SORT, op.GATHER, op.DYNAMIC_SLICE, op.CONVERT_ELEMENT_TYPE, op.STOP_GRADIENT, op.COPY})
DISABLED = "autocast_disabled"
LOSS = "float32_loss"
_LOW_OPERATION = "autocast_low_operation"
_LOW_OPERATIONS: WeakValueDictionary[str, Callable[..., jax.Array]] = WeakValueDictionary()  # by name in a jaxpr
_EVERYWHERE = f"{_LOW_OPERATION}_everywhere"
_NUMBERS = itertools.count()


def autocast(fn: Callable[..., Any], dtype: Any, device: str = "cuda") -> Callable[..., Any]:
    """Run each operation of a function in the dtype that `torch.autocast(device, dtype)` would choose.

    Matrix products and convolutions, with the bias of a linear layer, run in `dtype`; the operations of the device's
    float32 list in float32; every other operation in the widest dtype of its inputs. float64 is unchanged. Scalars and
    literals do not widen; the least and the largest float32, with which masks are filled, become those of the dtype
    that they meet. Loops preserve the dtypes of their carries.

    Args:
      fn: A function of arrays.
      dtype: bfloat16 or float16.
      device: "cuda" or "cpu": which of PyTorch's lists apply (`autocast_lists`), wherever the function runs. With the
        default a run on the CPU has the numerics of the training on a GPU.

    Returns:
      The same function under autocast.

    Raises:
      UserError: `device` is unknown.

    Example:
      >>> x = jnp.ones((2, 2))
      >>> autocast(lambda x: x @ x, jnp.bfloat16)(x).dtype.name
      'bfloat16'
      >>> autocast(lambda x: jnp.exp(x @ x), jnp.bfloat16)(x).dtype.name
      'float32'
    """
    if device not in LISTS:
        raise UserError(f"device {device!r} has no autocast lists: use one of {', '.join(LISTS)}")
    lists = LISTS[device]

    def evaluate(closed: ClosedJaxpr, leaves: list[Any]) -> list[Any]:
        biased = list(biased_products(closed.jaxpr))
        biases = {match.total: match.bias for match in biased}
        unrounded = {match.product for match in biased}
        rounded = set(rounded_results(closed.jaxpr, _is_low_product))
        casts: WeakKeyDictionary[rewrite.Run, Casts] = WeakKeyDictionary()

        def rule(eqn: JaxprEqn, args: list[Any], run: rewrite.Run) -> Sequence[Any] | None:
            name, to = op.of(eqn), casts.setdefault(run, Casts())
            args = [_weaken(v, x) for v, x in zip(eqn.invars, args, strict=True)]
            if equations.in_scope(eqn, DISABLED):
                return rewrite.bind_as_traced(eqn, args)
            if equations.is_call(eqn, KERNEL):
                return _rounded_to_first(eqn, args)
            if equations.is_call(eqn, IN_FLOAT32):
                return [to(np.float32, args[0])]
            if recomputes(eqn):
                return recompute_call(eqn, args, run, dtype if eqn.outvars[0] in rounded else None)
            if (on_cuda := low_precision_operation(eqn)) and _is_cast(eqn, args):
                return _on_cuda(on_cuda, eqn, args, dtype, run)
            if name in op.CALLS and any(map(is_limit, args)):
                # As an argument of a call the number would be unknown.
                return rewrite.evaluate_inner(equations.body(eqn), args, run)
            if name in rewrite.HIGHER_ORDER:
                return rewrite.HIGHER_ORDER[name](eqn, args, run)
            if eqn.outvars[0] in biases:
                return _add_bias(eqn, args, biases[eqn.outvars[0]], dtype, to)
            if eqn.outvars[0] in unrounded:
                return [_Product(eqn, args)] if _awaits_bias(eqn, args) else low_unrounded(eqn, args, dtype)
            args = [x.unrounded(dtype) if isinstance(x, _Product) else x for x in args]
            if name in lists:
                return _LISTED[lists[name]](eqn, args, dtype, to)
            if name == op.CONVERT_ELEMENT_TYPE and _only_weakens(eqn):
                return rewrite.bind(equations.with_params(eqn, weak_type=True), args)
            if name == op.BROADCAST_IN_DIM and is_limit(args[0]):
                return to.limit(args[0], rewrite.bind(eqn, args))
            if name in _INDEPENDENT:
                return rewrite.bind(eqn, args)
            if name in AS_TRACED or equations.inner_jaxprs(eqn):
                return rewrite.bind_as_traced(eqn, args)
            with _within_kernel():
                return rewrite.bind(eqn, to_widest(args, to))

        with jax.named_scope(DISABLED):  # an inner autocast takes precedence, as PyTorch's
            return rewrite.interpret(closed.jaxpr, closed.consts, leaves, rule)

    return rewrite.retrace(fn, evaluate)


def autocast_disabled() -> AbstractContextManager[None]:
    """Disable autocast within a region, as `torch.autocast(…, enabled=False)`.

    Returns:
      A context manager, also usable as a decorator. Operations inside run in the dtypes they are written in.

    Example:
      >>> def fn(x):
      ...     with autocast_disabled():
      ...         return x @ x
      >>> autocast(fn, jnp.bfloat16)(jnp.ones((2, 2))).dtype.name
      'float32'
    """
    # Equations retain the scopes they were traced in, through jit, scan and differentiation.
    return jax.named_scope(DISABLED)


def kernel(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a pure function as one operation that PyTorch has a kernel for and lists nowhere (batch_norm, gelu).

    In low precision it is computed in float32 and rounded once, as that kernel does.

    Args:
      fn: A pure function of arrays.

    Returns:
      The jitted function, the same one for every call with the same `fn`. In low precision its first result has the
      dtype of the first argument.

    Example:
      >>> def twice_cubed(x):
      ...     return 2 * x**3
      >>> autocast(lambda x: kernel(twice_cubed)(x @ x), jnp.bfloat16)(jnp.ones((2, 2))).dtype.name
      'bfloat16'
    """
    return rewrite.jit_once(fn, _kernel)


def _kernel(fn: Callable[..., Any]) -> Callable[..., Any]:
    def autocast_kernel(*args: Any) -> Any:
        # Under autocast `fn` is traced in float32, so that this changes nothing.
        first, *others = jax.tree.leaves(out := fn(*map(widen, args)))
        if (dtype := getattr(args[0], "dtype", None)) in LOWER_FLOATS:
            first = to_dtype(dtype, first)
        return jax.tree.unflatten(jax.tree.structure(out), [first, *others])

    return autocast_kernel


def low_precision(fn: Callable[..., jax.Array], on_cuda: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Mark a pure function as one operation that CUDA has a low-precision kernel for.

    A program compiled for CUDA computes `on_cuda` where autocast's dtype, or that of all floating-point arguments, is
    bfloat16 or float16. Every other program computes `fn`, under autocast operation by operation.

    Args:
      fn: A pure function of arrays.
      on_cuda: The same function of arguments in bfloat16 or float16.

    Returns:
      The jitted function, the same one for every call with the same `fn`. Keep a reference to it while programs that
      contain it are in use.

    Example:
      >>> product = low_precision(lambda x: x @ x, lambda x: x @ x)
      >>> x = jnp.ones((2, 2))
      >>> autocast(product, jnp.bfloat16)(x).dtype.name, product(x).dtype.name
      ('bfloat16', 'float32')
      >>> text = str(jax.make_jaxpr(autocast(product, jnp.bfloat16))(x))
      >>> "platform_index" in text
      True
    """
    return rewrite.jit_once(fn, _LowOperation(on_cuda))


def low_operation(fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Mark a pure function as one operation of autocast's low-precision list, whatever it is compiled for.

    Args:
      fn: A pure function of arrays in float32, bfloat16 or float16.

    Returns:
      The jitted function, the same one for every call with the same `fn`. Keep a reference to it while programs that
      contain it are in use.

    Example:
      >>> square = low_operation(lambda x: x * x)
      >>> x = jnp.ones((2, 2))
      >>> autocast(square, jnp.bfloat16)(x).dtype.name, square(x).dtype.name
      ('bfloat16', 'float32')
    """
    return rewrite.jit_once(fn, _low_operation)


def _low_operation(fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def autocast_low_operation(*args: Any) -> jax.Array:
        return fn(*args)

    autocast_low_operation.__name__ = f"{_EVERYWHERE}_{next(_NUMBERS)}"
    _LOW_OPERATIONS[autocast_low_operation.__name__] = fn
    return autocast_low_operation


@dataclass(frozen=True)
class _LowOperation:
    on_cuda: Callable[..., jax.Array]

    def __call__(self, fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        def autocast_low_operation(*args: Any) -> jax.Array:
            if any(is_float(x) and x.dtype not in LOWER_FLOATS for x in args):
                return fn(*args)
            computed: jax.Array = lax.platform_dependent(*args, cuda=self.on_cuda, default=fn)
            return computed

        autocast_low_operation.__name__ = f"{_LOW_OPERATION}_{next(_NUMBERS)}"
        _LOW_OPERATIONS[autocast_low_operation.__name__] = self.on_cuda
        return autocast_low_operation


def _is_cast(eqn: JaxprEqn, args: list[Any]) -> bool:
    """Return whether autocast converts arguments of an operation traced in float32, none of them being float64."""
    traced = [v.aval.dtype for v in eqn.invars if jnp.issubdtype(v.aval.dtype, np.floating)]  # type: ignore[attr-defined]
    return np.float32 in traced and all(is_low(x) for x in args if is_float(x))


def _on_cuda(
    operation: Callable[..., jax.Array], eqn: JaxprEqn, args: list[Any], dtype: Any, run: rewrite.Run
) -> list[Any]:
    """Compute a marked operation by its kernel where the program is compiled for CUDA."""
    body = equations.body(eqn)

    def low(*args: Any) -> list[Any]:
        return [operation(*(to_dtype(dtype, x) if is_float(x) else x for x in args))]

    if equations.label(eqn).startswith(_EVERYWHERE):
        return low(*args)
    return lax.platform_dependent(*args, cuda=low, default=lambda *args: run(body.jaxpr, body.consts, args))


def _low(eqn: JaxprEqn, args: list[Any], dtype: Any, to: Casts) -> list[Any]:
    operands, sizes = args[:2], args[2:]  # sizes: of the groups of a grouped product
    if not all(is_low(x) for x in operands):
        return rewrite.bind_as_traced(eqn, args)
    return rewrite.bind(low_product(eqn, dtype), [*(to(dtype, x) for x in operands), *sizes])


def low_product(eqn: JaxprEqn, result: Any) -> JaxprEqn:
    """Return a product of low-precision operands, to which the policy's precision does not apply."""
    default = (lax.Precision.DEFAULT, lax.Precision.DEFAULT)
    return equations.with_params(eqn, precision=default, preferred_element_type=np.dtype(result))


def _float32(eqn: JaxprEqn, args: list[Any], dtype: Any, to: Casts) -> list[Any]:
    del dtype
    return rewrite.bind(eqn, to_widest([to(np.float32, x) if is_low(x) else x for x in args], to))


def _rounded(eqn: JaxprEqn, args: list[Any], dtype: Any, to: Casts) -> list[Any]:
    result = widest(args)
    with _within_kernel():
        return [to_dtype(result, out) if is_low(out) else out for out in _float32(eqn, args, dtype, to)]


_LISTED = {Dtype.LOW: _low, Dtype.FLOAT32: _float32, Dtype.ROUNDED: _rounded}


def _is_low_product(eqn: JaxprEqn) -> bool:
    return op.of(eqn) == op.DOT_GENERAL and not equations.in_scope(eqn, DISABLED)


def low_unrounded(eqn: JaxprEqn, args: list[Any], dtype: Any) -> list[Any]:
    """Compute a product of low-precision operands in float32; its derivative is that of the rounded product."""
    if not all(is_low(x) for x in args):
        return rewrite.bind_as_traced(eqn, args)

    def unrounded(*operands: Any) -> Any:
        return rewrite.bind(low_product(eqn, np.float32), operands)[0]

    def rounded(*operands: Any) -> Any:
        with _within_kernel():
            return to_dtype(np.float32, rewrite.bind(low_product(eqn, dtype), operands)[0])

    @jax.custom_jvp
    def product(*operands: Any) -> Any:
        if op.of(eqn) == op.CONV_GENERAL_DILATED:
            # cuDNN has no convolution of low-precision images with a float32 result: XLA would convert the images.
            return lax.platform_dependent(*operands, cuda=rounded, rocm=rounded, default=unrounded)
        return unrounded(*operands)

    def jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
        (x, y), (dx, dy) = primals, tangents
        parts = [_low(eqn, ab, dtype, Casts())[0] for ab in ([dx, y], [x, dy]) if not any(map(_is_zero, ab))]
        with _within_kernel():
            return product(x, y), to_dtype(np.float32, functools.reduce(lax.add, parts))

    product.defjvp(jvp, symbolic_zeros=True)
    return [product(*(to_dtype(dtype, x) for x in args))]


class _Product(NamedTuple):
    """A product that waits for its bias."""

    eqn: JaxprEqn
    args: list[Any]

    def unrounded(self, dtype: Any) -> Any:
        """Return the product by itself, in float32."""
        return low_unrounded(self.eqn, self.args, dtype)[0]


def _awaits_bias(eqn: JaxprEqn, args: list[Any]) -> bool:
    return op.of(eqn) == op.DOT_GENERAL and all(is_low(x) and is_array(x) for x in args)


def _add_bias(eqn: JaxprEqn, args: list[Any], which: int, dtype: Any, to: Casts) -> list[Any]:
    """Add a bias and round once. The bias's gradient is summed in float32 and then rounded, as in PyTorch's kernel."""
    product, bias = args[1 - which], args[which]
    if isinstance(product, _Product):
        out: Any = eqn.outvars[0].aval
        if is_low(bias) and bias.shape == (1,) * (out.ndim - 1) + out.shape[-1:]:
            x, kernel, bias = (to_dtype(dtype, operand) for operand in (*product.args, bias))
            return [biased_product(x, kernel, bias, equations.contraction(product.eqn))]
        product = product.unrounded(dtype)
        args = [product, bias] if which else [bias, product]
    if not (is_low(product) and is_low(bias)):
        return rewrite.bind(eqn, to_widest(args, to))
    bias = to_dtype(dtype, bias)
    with _within_kernel():
        bias = lax.broadcast_in_dim(to_dtype(np.float32, bias), product.shape, range(product.ndim))
        (total,) = rewrite.bind(eqn, [to(np.float32, product), bias])
        return [to_dtype(dtype, total)]


def _rounded_to_first(eqn: JaxprEqn, args: list[Any]) -> list[Any]:
    def rounded(*args: Any) -> list[Any]:
        with _within_kernel():
            outs = rewrite.bind_as_traced(eqn, list(args))
            return [to_dtype(args[0].dtype, outs[0]), *outs[1:]]

    return recompute(rounded, args, equations.body(eqn).jaxpr)


def low_precision_operation(eqn: JaxprEqn) -> Callable[..., jax.Array] | None:
    """Return the kernel of an equation marked by `low_precision`; None for any other equation."""
    return equations.marked_function(eqn, _LOW_OPERATION, _LOW_OPERATIONS, "a low_precision operation that")


def _within_kernel() -> AbstractContextManager[None]:
    """Mark the conversions traced inside as those within a PyTorch kernel, between memory and registers."""
    return jax.named_scope(KERNEL)


def _weaken(invar: Any, x: Any) -> Any:
    """Convert a float literal to a Python number, so that neither it nor its broadcasts widen other operands."""
    return float(x) if isinstance(invar, Literal) and is_float(x) else x


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, jax.custom_derivatives.SymbolicZero)


def _only_weakens(eqn: JaxprEqn) -> bool:
    """Return whether a conversion only fixes a number's dtype, as of the 1 in `where`: it continues not to widen."""
    x: Any = eqn.invars[0].aval
    strips = x.weak_type and x.dtype == equations.dtype(eqn)
    return jnp.issubdtype(equations.dtype(eqn), np.floating) and (strips or (x.ndim == 0 and not is_float(x)))
