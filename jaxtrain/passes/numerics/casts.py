"""Conversions between floating-point dtypes under autocast."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LOWER_FLOATS = (jnp.bfloat16, jnp.float16)
_LOW_FLOATS = (*LOWER_FLOATS, np.float32)
_LIMIT = float(np.finfo(np.float32).max)


class Casts:
    """The conversions within one jaxpr.

    A low-precision value is widened once, however many operations use it in float32, so that its gradients are summed
    before they are rounded. The least and the largest number of float32, with which masks are filled, become those of
    the other dtype: code traced in float32 that reads `finfo(x.dtype)` of a low-precision x means these.
    """

    def __init__(self) -> None:
        self._widened: dict[int, tuple[Any, Any]] = {}
        self._limits: dict[int, tuple[Any, float]] = {}

    def __call__(self, dtype: Any, x: Any) -> Any:
        """Convert `x` to `dtype`."""
        number = x if isinstance(x, float) else self._limits.get(id(x), (None, 0.0))[1]
        if is_limit(number) and dtype in LOWER_FLOATS:
            return lax.full(np.shape(x), math.copysign(float(jnp.finfo(dtype).max), number), dtype)
        if dtype != np.float32 or not is_array(x) or x.dtype == np.float32:
            return to_dtype(dtype, x)
        if id(x) not in self._widened:
            self._widened[id(x)] = x, to_dtype(dtype, x)
        return self._widened[id(x)][1]

    def limit(self, number: float, repeated: list[Any]) -> list[Any]:
        """Return the array that repeats such a number, whose value is then known when it is converted."""
        (x,) = repeated
        self._limits[id(x)] = x, number
        return repeated


def to_widest(args: list[Any], to: Casts) -> list[Any]:
    """Convert floating-point `args` to the widest dtype among them."""
    dtype = widest(args)
    return args if dtype is None else [to(dtype, x) if is_float(x) else x for x in args]


def widest(args: list[Any]) -> Any:
    """Return the widest floating dtype of the arrays with dimensions, else of the scalars; None without any."""
    strong = [x for x in args if is_float(x) and not getattr(x, "weak_type", isinstance(x, float))]
    deciding = [x for x in strong if np.ndim(x)] or strong
    return functools.reduce(_wider, (x.dtype for x in deciding)) if deciding else None


def _wider(a: Any, b: Any) -> Any:
    # Neither bfloat16 nor float16 contains the other: float32 contains both.
    return a if a == b else np.promote_types(np.promote_types(a, np.float32), b)


def to_dtype(dtype: Any, x: Any) -> Any:
    """Convert `x` to `dtype` unless it has it."""
    return x if getattr(x, "dtype", None) == dtype else lax.convert_element_type(x, dtype)


def widen(x: Any) -> Any:
    """Convert a bfloat16 or float16 array to float32."""
    return to_dtype(np.float32, x) if getattr(x, "dtype", None) in LOWER_FLOATS else x


def in_float32(x: jax.Array) -> jax.Array:
    """Convert a float32 array to float32: it remains so under autocast, which may have lowered its precision.

    >>> from jaxtrain.passes import autocast
    >>> autocast(lambda x: in_float32(x @ x) + x @ x, jnp.bfloat16)(jnp.ones((2, 2))).dtype.name
    'float32'
    """
    return _in_float32(x) if x.dtype == np.float32 else x


def autocast_in_float32(x: jax.Array) -> jax.Array:
    """The identity, by whose name autocast knows such a conversion."""
    return x


IN_FLOAT32 = autocast_in_float32.__name__
_in_float32 = jax.jit(autocast_in_float32)


def is_float(x: Any) -> bool:
    """Return whether `x` is a floating-point number or array."""
    return isinstance(x, float) or jnp.issubdtype(getattr(x, "dtype", np.int32), np.floating)


def is_array(x: Any) -> bool:
    """Return whether `x` is a floating-point array, rather than a number or an array of integers."""
    return is_float(x) and not isinstance(x, float)


def is_low(x: Any) -> bool:
    """Return whether `x` is a floating-point number, or an array that autocast converts: one of at most 32 bits."""
    return isinstance(x, float) or getattr(x, "dtype", None) in _LOW_FLOATS


def is_limit(x: Any) -> bool:
    """Return whether `x` is the least or the largest number of float32, as a number."""
    return isinstance(x, float) and abs(x) == _LIMIT
