"""Compute the parts of a split product as products of their own on a GPU.

Attention splits one product into queries, keys and values, which its kernel takes as three arrays: a copy of all of them.
Three products of parts of the weight write them where they are used, with the same numbers. The gradient remains one
product of the joined gradients of the parts, summed and rounded once.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jaxtrain.transforms import jaxpr
from jaxtrain.transforms.biased_product import NAME as BIASED_PRODUCT
from jaxtrain.transforms.biased_product import biased_product
from jaxtrain.transforms.platform import is_gpu

_ROWS_BY_COLUMNS = (((1,), (0,)), ((), ()))


def split_products(fn: Callable[..., Any], platform: str | None = None) -> Callable[..., Any]:
    """Compute each part of a split product with a bias, in low precision, as a product.

    Args:
      fn: A function of arrays.
      platform: The platform that it is compiled for; None for that of the default backend.

    Returns:
      The same function on a GPU, whose split products have only a reverse-mode derivative. On any other platform, `fn`.

    Example:
      >>> x, kernel, bias = (jnp.ones(shape, jnp.bfloat16) for shape in ((2, 4), (4, 6), (1, 6)))
      >>> def halves(x):
      ...     return jnp.split(biased_product(x, kernel, bias, (((1,), (0,)), ((), ()))), 2, axis=-1)
      >>> [str(jax.make_jaxpr(split_products(halves, p))(x)).count("= biased_product") for p in ("cpu", "gpu")]
      [1, 2]
    """

    def evaluate(closed: ClosedJaxpr, leaves: list[Any]) -> list[Any]:
        split = set(_split_products(closed.jaxpr))

        def rule(eqn: JaxprEqn, args: list[Any], run: jaxpr.Run) -> Sequence[Any] | None:
            del run
            if eqn.outvars[0] in split:
                return [_Product(*args)]
            if args and isinstance(args[0], _Product):
                return args[:1] if eqn.primitive.name == "reshape" else args[0].parts(eqn)
            return None

        return jaxpr.interpret(closed.jaxpr, closed.consts, leaves, rule)

    rewritten = jaxpr.retrace(fn, evaluate)

    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (rewritten if is_gpu(platform) else fn)(*args, **kwargs)

    return chosen


class _Product(NamedTuple):
    """A product that is to be split."""

    x: jax.Array
    kernel: jax.Array
    bias: jax.Array

    def parts(self, eqn: JaxprEqn) -> list[jax.Array]:
        """Return the outputs of `eqn`, which splits it."""
        columns = _parts_of(*self, sizes=eqn.params["sizes"])
        return [part.reshape(var.aval.shape) for part, var in zip(columns, eqn.outvars, strict=True)]  # type: ignore[attr-defined]


def _parts_of(x: jax.Array, kernel: jax.Array, bias: jax.Array, *, sizes: Sequence[int]) -> list[jax.Array]:
    @jax.custom_vjp
    def parts(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> list[jax.Array]:
        computed: list[jax.Array] = []
        for columns, entries in zip(lax.split(kernel, sizes, 1), lax.split(bias, sizes, 1), strict=True):
            # Each waits for the one before it, or XLA would merge them.
            *computed, columns = lax.optimization_barrier([*computed, columns])
            computed.append(biased_product(x, columns, entries, _ROWS_BY_COLUMNS))
        return computed

    def backward(saved: Any, cotangents: list[jax.Array]) -> Any:
        _, pull_back = jax.vjp(lambda *operands: biased_product(*operands, _ROWS_BY_COLUMNS), *saved)
        # The barrier keeps reshapes out of the kernel that joins the parts, which then sums the bias's gradient too.
        return pull_back(jnp.concatenate(lax.optimization_barrier(cotangents), axis=1))

    parts.defvjp(lambda *operands: (parts(*operands), operands), backward)
    return parts(x, kernel, bias)


def _split_products(traced: Jaxpr) -> Iterator[Var]:
    """Yield the products with a bias in `traced`, and in all jaxprs inside it, that are used by a split alone."""
    producers = {var: eqn for eqn in traced.eqns for var in eqn.outvars}
    uses = Counter(v for v in [*traced.outvars, *(v for e in traced.eqns for v in e.invars)] if isinstance(v, Var))
    for eqn in traced.eqns:
        if eqn.primitive.name == "split" and eqn.params["axis"] == eqn.invars[0].aval.ndim - 1:  # type: ignore[attr-defined]
            var: Any = eqn.invars[0]
            while uses[var] == 1 and (producer := producers.get(var)) is not None and _keeps_columns(producer):
                var = producer.invars[0]
            if uses[var] == 1 and (producer := producers.get(var)) is not None and _is_product(producer):
                yield var
        for inner in jaxpr.inner_jaxprs(eqn):
            yield from _split_products(inner)


def _keeps_columns(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name != "reshape":
        return False
    before, after = (v.aval.shape for v in (eqn.invars[0], eqn.outvars[0]))  # type: ignore[attr-defined]
    return bool(before and after and before[-1] == after[-1])


def _is_product(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name != "custom_jvp_call" or any(isinstance(v, Literal) for v in eqn.invars):
        return False
    first, *more = eqn.params["call_jaxpr"].jaxpr.eqns
    return not more and first.primitive.name == BIASED_PRODUCT and first.params["dimension_numbers"] == _ROWS_BY_COLUMNS
