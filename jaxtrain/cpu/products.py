"""Rewrite matrix products and convolutions into forms that XLA:CPU runs fast; other backends are unaffected.

A convolution over few positions becomes the product of all its windows, one row each, with its kernel (im2col,
Chellapilla et al. 2006). Measured on two cores, 16 images of 2×2 pixels, 512 to 512 channels, 3×3 taps: 90 ms, and
94 ms for the gradient of the images; as products 1.1 and 0.9 ms, PyTorch 1.4 and 1.8. With more positions XLA's
convolutions are as fast.

A matrix product of low-precision operands is computed in float32 and rounded, as the backend does too. Rewritten
before differentiation, the product transposes the weights' gradient itself, which is otherwise copied between
conversions (a third of a perceptron's bfloat16 step).

Inside a loop a convolution's axes are put in the order that the backend has a library for, as XLA does only outside
loops (`xla/service/cpu/conv_canonicalization.cc` visits the entry computation alone). Otherwise the gradient of a
kernel is a plain loop: 64 images of 16×16, 32 to 32 channels, in a scan of four, 12 s instead of 0.04.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jaxtrain.program import equations, rewrite
from jaxtrain.program import operations as op

FEW_POSITIONS = 16
"""Up to this number of positions a product is faster for any kernel; with more, it is if taps outnumber positions."""


def cpu_products(fn: Callable[..., Any], platform: str | None = None) -> Callable[..., Any]:
    """Rewrite the products of a function that is compiled for a CPU. To be differentiated afterwards.

    The platform is chosen when the function is traced, not when it is lowered. `lax.platform_dependent` would put every
    product into the branches of a `cond`, where policies of rematerialization no longer find it and whose derivative
    saves the values of all branches. A primitive with a lowering of its own for CPUs would come too late: the rewritten
    product is the one to be differentiated. Without a `platform`, a function that is then compiled for another device
    than the default backend's computes the same numbers, and may take longer.

    Args:
      fn: The function.
      platform: The platform that it is compiled for; None for that of the default backend.

    >>> def same(x, w):
    ...     return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    >>> traced = jax.make_jaxpr(cpu_products(same))(jnp.ones((1, 2, 2, 3)), jnp.ones((3, 3, 3, 5)))
    >>> ("dot_general" in str(traced)) == (jax.default_backend() == "cpu")
    True
    """

    def rule(eqn: JaxprEqn, args: list[Any], run: rewrite.Run) -> Sequence[Any] | None:
        del run
        if not _is_slow(eqn):
            return None
        compute = _convolve_as_product if _is_convolution(eqn) else _compute_in_float32
        return [compute(eqn, *args)]

    return _on_a_cpu(fn, rule, _is_slow, platform)


def loop_convolutions(fn: Callable[..., Any], platform: str | None = None) -> Callable[..., Any]:
    """Rewrite the convolutions of a loop's body that is compiled for a CPU. To be applied after differentiation.

    Args:
      fn: The function.
      platform: The platform that it is compiled for; None for that of the default backend.

    >>> def rows_last(x, w):
    ...     return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("HWCN", "HWIO", "NHWC"))
    >>> traced = jax.make_jaxpr(loop_convolutions(rows_last))(jnp.ones((2, 2, 3, 1)), jnp.ones((3, 3, 3, 5)))
    >>> ("lhs_spec=(0, 3, 1, 2)" in str(traced)) == (jax.default_backend() == "cpu")
    True
    """

    def rule(eqn: JaxprEqn, args: list[Any], run: rewrite.Run) -> Sequence[Any] | None:
        del run
        return [_convolve_channels_last(eqn, *args)] if _is_convolution(eqn) else None

    return _on_a_cpu(fn, rule, _is_convolution, platform)


def _on_a_cpu(
    fn: Callable[..., Any], rule: rewrite.Rule, where: rewrite.Where, platform: str | None
) -> Callable[..., Any]:
    """Apply `rule` to `fn` if it is compiled for a CPU."""
    rewritten = rewrite.transform(fn, rule, where)

    @functools.wraps(fn)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        # Decided when traced: querying it earlier would start a backend before `jax.distributed` is initialized.
        return (rewritten if (platform or jax.default_backend()) == "cpu" else fn)(*args, **kwargs)

    return dispatch


def _is_convolution(eqn: JaxprEqn) -> bool:
    return op.of(eqn) == op.CONV_GENERAL_DILATED


def _is_slow(eqn: JaxprEqn) -> bool:
    return _is_small(eqn) if _is_convolution(eqn) else op.of(eqn) == op.DOT_GENERAL and _is_low(eqn)


def _is_low(eqn: JaxprEqn) -> bool:
    """Return whether it is a product of low-precision matrices; the backend's batched products are as fast."""
    avals: list[Any] = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    _, (batch, _) = equations.contraction(eqn)
    return not batch and all(aval.dtype in (jnp.bfloat16, np.float16) for aval in avals)


def _compute_in_float32(eqn: JaxprEqn, x: jax.Array, y: jax.Array) -> jax.Array:
    wide = equations.with_params(eqn, preferred_element_type=np.dtype(np.float32))
    (product,) = rewrite.bind(wide, [x.astype(np.float32), y.astype(np.float32)])
    return product.astype(x.dtype)


def _is_small(eqn: JaxprEqn) -> bool:
    window, dims = equations.window(eqn), equations.contraction(eqn)
    if window.feature_groups != 1 or window.batch_groups != 1 or any(n != 1 for n in window.lhs_dilation):
        return False
    kernel: Any = eqn.invars[1].aval
    out: Any = eqn.outvars[0].aval
    taps = math.prod(kernel.shape[d] for d in dims.rhs_spec[2:])
    positions = math.prod(out.shape[d] for d in dims.out_spec[2:])
    return positions <= FEW_POSITIONS or positions < taps


def _convolve_as_product(eqn: JaxprEqn, x: jax.Array, kernel: jax.Array) -> jax.Array:
    out_first = equations.contraction(eqn).rhs_spec == tuple(range(kernel.ndim))
    x, taps_first = _operands_channels_last(eqn, x, kernel)
    *taps, _, features = taps_first.shape
    # PyTorch's kernel [out, in, *taps] is a matrix as it is, but windows are copied from channels that are last: the
    # smaller one of the two matrices is transposed.
    out: Any = eqn.outvars[0].aval
    channels_first = out_first and math.prod(out.shape) // features <= features
    windows = _windows(x, taps, equations.window(eqn), channels_first=channels_first)
    if out_first:
        kernel = (kernel if channels_first else jnp.moveaxis(kernel, 1, -1)).reshape(features, -1)
    y = lax.dot_general(
        windows.reshape(-1, windows.shape[-1]),
        kernel if out_first else taps_first.reshape(-1, features),
        (((1,), (int(out_first),)), ((), ())),
        precision=equations.precision(eqn),
        preferred_element_type=equations.accumulated_in(eqn),
    )
    return _restore_axes(eqn, y.reshape(*windows.shape[:-1], -1))


def _convolve_channels_last(eqn: JaxprEqn, x: jax.Array, kernel: jax.Array) -> jax.Array:
    space = tuple(range(1, x.ndim - 1))
    images, taps = (0, x.ndim - 1, *space), (x.ndim - 1, x.ndim - 2, *(d - 1 for d in space))
    moved = equations.with_params(eqn, dimension_numbers=lax.ConvDimensionNumbers(images, taps, images))
    return _restore_axes(eqn, rewrite.bind(moved, _operands_channels_last(eqn, x, kernel))[0])


def _operands_channels_last(eqn: JaxprEqn, x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Transpose the operands to [B, *space, in] and [*taps, in, out]."""
    dims = equations.contraction(eqn)
    x = lax.transpose(x, (dims.lhs_spec[0], *dims.lhs_spec[2:], dims.lhs_spec[1]))
    return x, lax.transpose(kernel, (*dims.rhs_spec[2:], dims.rhs_spec[1], dims.rhs_spec[0]))


def _restore_axes(eqn: JaxprEqn, y: jax.Array) -> jax.Array:
    """Transpose [B, *space, out] to the axes of the convolution's result."""
    spec = equations.contraction(eqn).out_spec
    places = (spec[0], *spec[2:], spec[1])
    return lax.transpose(y, tuple(places.index(d) for d in range(y.ndim)))


def _windows(x: jax.Array, taps: Sequence[int], window: equations.Window, *, channels_first: bool) -> jax.Array:
    """Return the window of the kernel at each position: [B, *positions, taps·in], or [B, *positions, in·taps]."""
    around = [(0, 0), *window.padding, (0, 0)]
    x = lax.pad(x, jnp.zeros([], x.dtype), [(low, high, 0) for low, high in around])
    strides = (1, *window.strides, 1)
    spans = [(size - 1) * by for size, by in zip(taps, window.rhs_dilation, strict=True)]
    ends = [n - span for n, span in zip(x.shape[1:-1], spans, strict=True)]
    slices = []
    for tap in itertools.product(*map(range, taps)):
        begin = [i * by for i, by in zip(tap, window.rhs_dilation, strict=True)]
        limit = [end + b for end, b in zip(ends, begin, strict=True)]
        slices.append(lax.slice(x, (0, *begin, 0), (x.shape[0], *limit, x.shape[-1]), strides))
    if not channels_first:
        return jnp.concatenate(slices, -1)
    return jnp.stack(slices, -1).reshape(*slices[0].shape[:-1], -1)
