"""Recompute cheap operations of low-precision values in the backward pass, as PyTorch's kernels do.

A kernel such as PyTorch's gelu or layer_norm keeps its inputs for the backward pass. Differentiated by JAX, the same
formula keeps each factor that it multiplies by, in float32: several times the memory of a low-precision input.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, jaxpr_as_fun

from jaxtrain.program import equations, rewrite
from jaxtrain.program import operations as op
from jaxtrain.program.follow import sole_sources

RECOMPUTED = "recomputed_in_low_precision"
_GRADIENTS: "WeakValueDictionary[str, partial[Any]]" = WeakValueDictionary()  # by name in a jaxpr
_NUMBERS = itertools.count()

Gradient = Callable[..., Any]
"""`gradient(*args, cotangent)` returns the gradients of a function's arguments."""


def recomputed(fn: Callable[..., Any], on_gpu: Gradient | None = None) -> Callable[..., Any]:
    """Mark a pure function of arrays that is cheaper to compute again than to keep its intermediate values.

    Under autocast, and for low-precision inputs, its backward pass keeps its inputs alone and computes it again. In
    float32 and float64 nothing changes.

    Args:
      fn: A pure function of arrays, without matrix products.
      on_gpu: Its gradient, `on_gpu(*args, cotangent)`, which programs compiled for GPUs compute instead of
        differentiating `fn`; called with the keyword arguments of `fn` if that is a partial.

    Returns:
      The jitted function, the same one for every call with the same `fn` and `on_gpu`.

    Example:
      >>> def kept(x):
      ...     _, pull = jax.vjp(recomputed(lambda x: jnp.exp(jnp.sin(x))), x)
      ...     return [(leaf.dtype.name, leaf.shape) for leaf in jax.tree.leaves(pull)]
      >>> kept(jnp.ones(3, jnp.bfloat16))
      [('bfloat16', (3,))]
      >>> len(kept(jnp.ones(3)))
      2
    """
    return rewrite.jit_once(fn, _Recomputed(on_gpu))


def recomputes(eqn: JaxprEqn) -> bool:
    """Return whether the equation calls a function marked by `recomputed`."""
    name = equations.label(eqn)
    return isinstance(name, str) and name.startswith(RECOMPUTED) and equations.is_call(eqn, name)


def rounded_results(traced: Jaxpr, rounds: Callable[[JaxprEqn], bool]) -> Iterator[Var]:
    """Return the results of marked functions, in `traced` and in all jaxprs inside it, that are rounded when used.

    Args:
      traced: A jaxpr.
      rounds: Whether an equation rounds its float32 operands.
    """

    def rounds_floats(eqn: JaxprEqn) -> bool:
        return rounds(eqn) and all(v.aval.dtype == np.float32 for v in eqn.invars)  # type: ignore[attr-defined]

    found = sole_sources(traced, rounds_floats, lambda eqn: op.of(eqn) in (op.RESHAPE, op.TRANSPOSE))
    return (var for var, eqn in found if recomputes(eqn) and len(eqn.outvars) == 1)


def recompute_call(eqn: JaxprEqn, args: Sequence[Any], run: rewrite.Run, result: Any = None) -> list[Any]:
    """Evaluate a call of a marked function by `run`; its backward pass keeps its inputs alone.

    Args:
      eqn: The call.
      args: Its arguments.
      run: Evaluates a jaxpr.
      result: Dtype that the only user of its result rounds it to, so that its gradient has this dtype; None for none.
    """
    body, name = equations.body(eqn), equations.label(eqn)
    on_gpu = _GRADIENTS.get(name)

    def fn(*args: Any) -> list[Any]:
        outs = run(body.jaxpr, body.consts, args)
        return outs if result is None or on_gpu is not None else [jnp.asarray(x, result) for x in outs]

    if on_gpu is None:
        return list(recompute(fn, args, body.jaxpr))
    return [_with_gradient(rewrite.make_jaxpr(fn)(*args), on_gpu, args, name)]


def gradient_on_gpu(eqn: JaxprEqn) -> Gradient | None:
    """Return the gradient on GPUs of an evaluated call of a marked function; None for any other equation."""
    if op.of(eqn) != op.CUSTOM_VJP_CALL:
        return None
    scopes = (part.name for part in eqn.source_info.name_stack.stack)
    return next((_GRADIENTS[name] for name in scopes if name in _GRADIENTS), None)


def recompute(fn: Callable[..., Any], args: Sequence[Any], traced: Jaxpr) -> Any:
    """Return `fn(*args)`, of whose intermediate values the backward pass keeps none; `traced` is the jaxpr of `fn`."""
    # XLA would merge the computations of a loop-free program and keep what they share. That is wanted of the few
    # statistics of a norm only.
    return jax.checkpoint(fn, prevent_cse=not _reduces(traced))(*args)


def _with_gradient(closed: ClosedJaxpr, on_gpu: Gradient, args: Sequence[Any], name: str) -> Any:
    """Evaluate a function with one result, whose gradient on a GPU is `on_gpu`, by its name."""

    def fn(*args: Any) -> Any:
        return jaxpr_as_fun(closed)(*args)[0]

    def differentiate(*args_and_cotangent: Any) -> Any:
        *args, cotangent = args_and_cotangent
        return jax.vjp(fn, *args)[1](cotangent)

    def backward(args: Sequence[Any], cotangent: Any) -> Any:
        return lax.platform_dependent(*args, cotangent, cuda=on_gpu, rocm=on_gpu, default=differentiate)

    with_gradient = jax.custom_vjp(fn)
    # Not by `with_gradient` itself, which policies of rematerialization would take for a costly operation.
    with_gradient.defvjp(lambda *args: (fn(*args), args), backward)
    with jax.named_scope(RECOMPUTED), jax.named_scope(name):
        return with_gradient(*args)


def _reduces(traced: Jaxpr) -> bool:
    return any(op.of(eqn).startswith("reduce_") for eqn in equations.visit(traced))


@dataclass(frozen=True)
class _Recomputed:
    on_gpu: Gradient | None

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        keywords = fn.keywords if isinstance(fn, partial) else {}
        on_gpu = None if self.on_gpu is None else partial(self.on_gpu, **keywords)

        def recomputed_in_low_precision(*args: Any) -> Any:
            if not any(getattr(x, "dtype", None) in (jnp.bfloat16, jnp.float16) for x in jax.tree.leaves(args)):
                return fn(*args)
            closed = rewrite.make_jaxpr(fn)(*args)
            return recompute(fn, args, closed.jaxpr) if on_gpu is None else _with_gradient(closed, on_gpu, args, name)

        name = RECOMPUTED if on_gpu is None else f"{RECOMPUTED}_{next(_NUMBERS)}"
        recomputed_in_low_precision.__name__ = name
        if on_gpu is not None:
            _GRADIENTS[name] = on_gpu
        return recomputed_in_low_precision
