"""Products said as XLA's CPU backend is fast at them; other backends are left alone.

A convolution over few positions becomes the product of all its windows, one row each, with its kernel (Chellapilla et
al. 2006, known as im2col). Measured on two cores, 16 images of 2×2 pixels, 512 to 512 channels, 3×3 taps: 90 ms, and
94 ms for the gradient of the images; as products 1.1 and 0.9 ms, PyTorch 1.4 and 1.8. Where there are more positions,
XLA's own are as fast.

A matrix product of low-precision operands is computed in float32 and rounded, as the backend would do itself: but said
before differentiation, the weights' gradient is transposed by its product, not copied between conversions (of a
perceptron's bfloat16 step a third).

Inside of a loop a convolution's axes are put in the order that the backend has a library for, as XLA does by itself
outside of loops (`xla/service/cpu/conv_canonicalization.cc` goes through the entry computation alone). Without, the
gradient of a kernel is a plain loop: 64 images of 16×16, 32 to 32 channels, in a scan of four, 12 s instead of 0.04.
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

from jaxtrain.transforms import jaxpr

FEW = 16
"""Positions to which a product is the faster, whatever the kernel; and it is wherever taps outnumber positions."""


def cpu_products(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` as it is best compiled where the default backend is a CPU. To be differentiated afterwards.

    >>> def same(x, w):
    ...     return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    >>> traced = jax.make_jaxpr(cpu_products(same))(jnp.ones((1, 2, 2, 3)), jnp.ones((3, 3, 3, 5)))
    >>> ("dot_general" in str(traced)) == (jax.default_backend() == "cpu")
    True
    """

    def rule(eqn: JaxprEqn, args: list[Any], run: jaxpr.Run) -> Sequence[Any] | None:
        del run
        if eqn.primitive.name == "conv_general_dilated" and _is_small(eqn):
            return [_product_of_windows(eqn, *args)]
        if eqn.primitive.name == "dot_general" and _is_low(eqn):
            return [_rounded_once(eqn, *args)]
        return None

    return _on_a_cpu(fn, rule)


def loop_convolutions(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` as it is best compiled in a loop, where the default backend is a CPU. Put around what is differentiated.

    >>> def rows_last(x, w):
    ...     return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("HWCN", "HWIO", "NHWC"))
    >>> traced = jax.make_jaxpr(loop_convolutions(rows_last))(jnp.ones((2, 2, 3, 1)), jnp.ones((3, 3, 3, 5)))
    >>> ("lhs_spec=(0, 3, 1, 2)" in str(traced)) == (jax.default_backend() == "cpu")
    True
    """

    def rule(eqn: JaxprEqn, args: list[Any], run: jaxpr.Run) -> Sequence[Any] | None:
        del run
        return [_channels_last(eqn, *args)] if eqn.primitive.name == "conv_general_dilated" else None

    return _on_a_cpu(fn, rule)


def _on_a_cpu(fn: Callable[..., Any], rule: jaxpr.Rule) -> Callable[..., Any]:
    """`fn` under `rule` where the default backend is a CPU."""
    rewritten = jaxpr.transform(fn, rule)

    @functools.wraps(fn)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        # Asked when traced: to ask when built would start a backend before `jax.distributed` could be.
        return (rewritten if jax.default_backend() == "cpu" else fn)(*args, **kwargs)

    return chosen


def _is_low(eqn: JaxprEqn) -> bool:
    """Whether it is a product of low-precision matrices; of batches of them the backend's own is as fast."""
    avals: list[Any] = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    _, (batch, _) = eqn.params["dimension_numbers"]
    return not batch and all(aval.dtype in (jnp.bfloat16, np.float16) for aval in avals)


def _rounded_once(eqn: JaxprEqn, x: jax.Array, y: jax.Array) -> jax.Array:
    params = {**eqn.params, "preferred_element_type": np.dtype(np.float32)}
    product = eqn.primitive.bind(x.astype(np.float32), y.astype(np.float32), **params)
    return product.astype(x.dtype)


def _is_small(eqn: JaxprEqn) -> bool:
    plain = eqn.params["feature_group_count"] == eqn.params["batch_group_count"] == 1
    if not plain or any(dilation != 1 for dilation in eqn.params["lhs_dilation"]):
        return False
    dims = eqn.params["dimension_numbers"]
    kernel: Any = eqn.invars[1].aval
    out: Any = eqn.outvars[0].aval
    taps = math.prod(kernel.shape[d] for d in dims.rhs_spec[2:])
    positions = math.prod(out.shape[d] for d in dims.out_spec[2:])
    return positions <= FEW or positions < taps


def _product_of_windows(eqn: JaxprEqn, x: jax.Array, kernel: jax.Array) -> jax.Array:
    x, kernel = _operands_channels_last(eqn, x, kernel)
    windows = _windows(x, kernel.shape[:-2], eqn.params)
    y = lax.dot_general(
        windows.reshape(-1, windows.shape[-1]),
        kernel.reshape(-1, kernel.shape[-1]),
        (((1,), (0,)), ((), ())),
        precision=eqn.params["precision"],
        preferred_element_type=eqn.params["preferred_element_type"],
    )
    return _as_asked(eqn, y.reshape(*windows.shape[:-1], -1))


def _channels_last(eqn: JaxprEqn, x: jax.Array, kernel: jax.Array) -> jax.Array:
    space = tuple(range(1, x.ndim - 1))
    images, taps = (0, x.ndim - 1, *space), (x.ndim - 1, x.ndim - 2, *(d - 1 for d in space))
    params = {**eqn.params, "dimension_numbers": lax.ConvDimensionNumbers(images, taps, images)}
    return _as_asked(eqn, eqn.primitive.bind(*_operands_channels_last(eqn, x, kernel), **params))


def _operands_channels_last(eqn: JaxprEqn, x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[B, *space, in] and [*taps, in, out]."""
    dims = eqn.params["dimension_numbers"]
    x = lax.transpose(x, (dims.lhs_spec[0], *dims.lhs_spec[2:], dims.lhs_spec[1]))
    return x, lax.transpose(kernel, (*dims.rhs_spec[2:], dims.rhs_spec[1], dims.rhs_spec[0]))


def _as_asked(eqn: JaxprEqn, y: jax.Array) -> jax.Array:
    """[B, *space, out] with its axes where the convolution has them."""
    spec = eqn.params["dimension_numbers"].out_spec
    places = (spec[0], *spec[2:], spec[1])
    return lax.transpose(y, tuple(places.index(d) for d in range(y.ndim)))


def _windows(x: jax.Array, taps: Sequence[int], params: Any) -> jax.Array:
    """[B, *positions, taps·in]: what the kernel sees at each position, tap by tap."""
    around = [(0, 0), *params["padding"], (0, 0)]
    x = lax.pad(x, jnp.zeros([], x.dtype), [(low, high, 0) for low, high in around])
    strides = (1, *params["window_strides"], 1)
    spans = [(size - 1) * by for size, by in zip(taps, params["rhs_dilation"], strict=True)]
    ends = [n - span for n, span in zip(x.shape[1:-1], spans, strict=True)]
    seen = []
    for tap in itertools.product(*map(range, taps)):
        begin = [i * by for i, by in zip(tap, params["rhs_dilation"], strict=True)]
        limit = [end + b for end, b in zip(ends, begin, strict=True)]
        seen.append(lax.slice(x, (0, *begin, 0), (x.shape[0], *limit, x.shape[-1]), strides))
    return jnp.concatenate(seen, -1)
