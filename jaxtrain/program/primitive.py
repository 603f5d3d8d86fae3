"""Primitives of this project: a function as one equation that passes recognize and platforms may compute otherwise."""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_NONE: Mapping[str, Any] = MappingProxyType({})


def primitive(
    name: str,
    evaluate: Callable[..., jax.Array],
    *,
    on: Mapping[str, Callable[..., jax.Array]] = _NONE,
    jvp: Callable[..., Any] | None = None,
    batch: Callable[..., Any] | None = None,
) -> Primitive:
    """Return a primitive with one result, whose shape, batching and lowering are those of a function.

    Args:
      name: Its name in programs.
      evaluate: `evaluate(*operands, **params)` computes the result.
      on: Functions that compute it on some platforms: "cpu", "cuda" or "rocm".
      jvp: Its rule of differentiation, as of `jax.interpreters.ad`; None for none.
      batch: Its rule of batching; None for that of `evaluate`.

    Returns:
      The primitive, which is compiled where it is applied outside of `jax.jit`.

    Example:
      >>> double = primitive("double", lambda x, *, n: n * x)
      >>> double.bind(3.0, n=2).item(), jax.vmap(lambda x: double.bind(x, n=2))(jax.numpy.ones(2)).tolist()
      (6.0, [2.0, 2.0])
      >>> str(jax.make_jaxpr(lambda x: double.bind(x, n=2))(1.0)).split("= ")[1].split()[0]
      'double[n=2]'
    """
    made = Primitive(name)

    def batched(args: Any, axes: Any, **params: Any) -> tuple[jax.Array, int]:
        return jax.vmap(functools.partial(evaluate, **params), axes)(*args), 0

    def abstract(*args: Any, **params: Any) -> Any:
        return jax.make_jaxpr(functools.partial(evaluate, **params))(*args).out_avals[0]

    made.def_impl(lambda *args, **params: jax.jit(functools.partial(made.bind, **params))(*args))
    made.def_abstract_eval(abstract)
    batching.primitive_batchers[made] = batched if batch is None else batch
    if jvp is not None:
        ad.primitive_jvps[made] = jvp
    mlir.register_lowering(made, mlir.lower_fun(evaluate, multiple_results=False))
    for platform, compute in on.items():
        mlir.register_lowering(made, mlir.lower_fun(compute, multiple_results=False), platform=platform)
    return made
