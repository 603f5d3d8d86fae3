"""The table of operations: from PyTorch's overloads to JAX functions."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp

from jaxtrain.passes import kernel, widen

Function = Callable[..., Any]
F = TypeVar("F", bound=Function)

TABLE: dict[str, Function] = {}
"""JAX functions by overload ("aten.gelu.default"), with the arguments of PyTorch's schema: tensors as arrays, dtypes as
NumPy's. An elementwise function receives its arrays in PyTorch's promoted dtype; every result is converted to the dtype
that PyTorch computed."""

RANDOM: dict[str, Callable[..., bool]] = {}
"""Overloads that draw random numbers, with whether they do with these arguments: dropout may be off. Their functions
take the keyword `rng`, a key."""


def op(*overloads: str, random: bool | Callable[..., bool] = False, library: str = "aten") -> Callable[[F], F]:
    """Register a function for overloads of PyTorch's operations, as in `@op("add.Tensor", "add.Scalar")`.

    Args:
      *overloads: The overloads.
      random: Whether they draw random numbers, or a function of their arguments that says so.
      library: PyTorch's library of operations.
    """
    draws = random if callable(random) else lambda *_, **__: True

    def register(fn: F) -> F:
        for overload in overloads:
            TABLE[f"{library}.{overload}"] = fn
            if random:
                RANDOM[f"{library}.{overload}"] = draws
        return fn

    return register


def ops(functions: dict[str, Function]) -> None:
    """Register functions by their overloads, several of them separated by spaces."""
    for overloads, fn in functions.items():
        op(*overloads.split())(fn)


def of_vectors(fn: F) -> F:
    """Give a function of (x, …, dim, …) PyTorch's meaning for a scalar x: a vector of one element."""

    @functools.wraps(fn)
    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        if x.ndim:
            return fn(x, *args, **kwargs)
        return jax.tree.map(lambda y: y.reshape(()), fn(x.reshape(1), *args, **kwargs))

    return cast(F, call)


def in_opmath(fn: F) -> F:
    """Give a function float32 arrays in place of bfloat16 and float16 ones, in which PyTorch's kernels compute too.

    The interpreter rounds the results. PyTorch's name of the dtype is `at::opmath_type` (`aten/src/ATen/OpMathType.h`).
    """

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = jax.tree.map(widen, (args, kwargs))
        return fn(*args, **kwargs)

    return cast(F, call)


def broadcast(fn: F) -> F:
    """Give a function bfloat16 and float16 arrays of one shape, whose gradients are then summed in float32."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        shape = jnp.broadcast_shapes(*(x.shape for x in args if isinstance(x, jax.Array)))
        return fn(*(_of_shape(x, shape) for x in args), **kwargs)

    return cast(F, call)


def _of_shape(x: Any, shape: tuple[int, ...]) -> Any:
    if not isinstance(x, jax.Array) or x.shape == shape or (wide := widen(x)) is x:
        return x
    return jnp.broadcast_to(wide, shape).astype(x.dtype)


@jax.custom_jvp
def with_gradient(value: jax.Array, like: jax.Array) -> jax.Array:
    """Return a value with the gradient of another function, of its shape."""
    del like
    return value


with_gradient.defjvps(None, lambda tangent, *_: tangent)


def as_kernel(fn: Function, *arrays: Any, **options: Any) -> Any:
    """Call a pure function of arrays as one operation under autocast, as `jaxtrain.passes.kernel`.

    Args:
      fn: The function.
      *arrays: Its arrays, or None.
      **options: Numbers and tuples of them, which it is compiled for.

    Returns:
      Its result.
    """
    return _kernel_of(fn, tuple(sorted(options.items())))(*arrays)


@functools.cache
def _kernel_of(fn: Function, options: tuple[tuple[str, Any], ...]) -> Function:
    return kernel(functools.partial(fn, **dict(options)))
