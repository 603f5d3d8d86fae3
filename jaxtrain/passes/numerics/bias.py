"""Recognize a linear layer's bias in a jaxpr: a vector added along the features of a matrix product.

PyTorch adds the bias inside the product (`linear`, `addmm`, `conv2d`), so that under autocast the sum is in low
precision too, rounded once. In a jaxpr it is an addition like any other.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jaxtrain.program import equations
from jaxtrain.program import operations as op
from jaxtrain.program.equations import inner_jaxprs

Atom = Var | Literal
Producers = dict[Var, JaxprEqn]


class Biased(NamedTuple):
    """The sum of a product and its bias.

    Attributes:
      total: The sum.
      bias: Index of the operand that is the bias.
      product: The other operand; None if it has other uses.
    """

    total: Var
    bias: int
    product: Var | None


def biased_products(jaxpr: Jaxpr) -> Iterator[Biased]:
    """Yield the sums of a product and its bias in `jaxpr` and in all jaxprs inside it.

    >>> import jax, jax.numpy as jnp
    >>> def layer(x, w, b):
    ...     return x @ w + b[None]
    >>> traced = jax.make_jaxpr(layer)(jnp.ones((2, 3)), jnp.ones((3, 4)), jnp.ones(4))
    >>> [(biased.total.aval.shape, biased.bias) for biased in biased_products(traced.jaxpr)]
    [((2, 4), 1)]
    """
    producers = equations.producers(jaxpr)
    uses = Counter(equations.reads(jaxpr))
    for eqn in equations.of(jaxpr):
        if op.of(eqn) == op.ADD:
            for i in (0, 1):
                product, bias = eqn.invars[1 - i], eqn.invars[i]
                if _is_bias(bias, _feature_axes(product, producers), producers):
                    yield Biased(eqn.outvars[0], i, _used_once(product, producers, uses))
        for inner in inner_jaxprs(eqn):
            yield from biased_products(inner)


def _used_once(var: Atom, producers: Producers, uses: Counter[Var]) -> Var | None:
    """Return the product that `var` is, or is a transpose of; None if it has other uses."""
    eqn = _producer(var, producers)
    if isinstance(var, Literal) or eqn is None or uses[var] > 1:
        return None
    return _used_once(eqn.invars[0], producers, uses) if op.of(eqn) == op.TRANSPOSE else var


def _feature_axes(var: Atom, producers: Producers) -> set[int]:
    """Return the axes of `var` that may be features; none if it is not a product."""
    eqn = _producer(var, producers)
    if eqn is None:
        return set()
    if op.of(eqn) == op.TRANSPOSE:  # inserted by vmap
        axes = _feature_axes(eqn.invars[0], producers)
        return {to for to, axis in enumerate(equations.permutation(eqn)) if axis in axes}
    if op.of(eqn) == op.CONV_GENERAL_DILATED:
        return {equations.contraction(eqn).out_spec[1]}
    if op.of(eqn) in op.CHECKPOINTS:
        (body,) = inner_jaxprs(eqn)
        inner = next(x for x, out in zip(body.outvars, eqn.outvars, strict=True) if out is var)
        return _feature_axes(inner, equations.producers(body))
    if op.of(eqn) == op.DOT_GENERAL and equations.contraction(eqn)[1] == ((), ()):
        return set(range(_aval(var).ndim))
    return set()


def _is_bias(var: Atom, axes: set[int], producers: Producers) -> bool:
    """Return whether `var` is a vector broadcast along one of those axes."""
    eqn = _producer(var, producers)
    if eqn is None or op.of(eqn) not in (op.BROADCAST_IN_DIM, op.RESHAPE) or _aval(eqn.invars[0]).ndim != 1:
        return False
    if op.of(eqn) == op.BROADCAST_IN_DIM:
        return set(equations.axes(eqn)) <= axes
    wide = {axis for axis, n in enumerate(_aval(var).shape) if n != 1}
    return wide <= axes and len(wide) <= 1


def _producer(var: Atom, producers: Producers) -> JaxprEqn | None:
    return None if isinstance(var, Literal) else producers.get(var)


def _aval(var: Atom) -> Any:
    return var.aval
