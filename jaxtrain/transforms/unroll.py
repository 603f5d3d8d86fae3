"""Scanned layers, compiled one by one.

A model scans over layers that are alike, so that one of them is compiled, however deep it is. What this costs at run
time is a copy of every value that the backward pass needs into an array of all the layers', and out of it again.
`unroll(fn)` takes the layers out of the scan: longer to compile, faster to run, the same numbers.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from jaxtrain.transforms import jaxpr
from jaxtrain.transforms.remat import BLOCK


def unroll(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` without the scans over its marked blocks (`jaxtrain.block`); scans over anything else stay.

    >>> import jax, jax.numpy as jnp
    >>> from jaxtrain import block
    >>> def layers(x):
    ...     return jax.lax.scan(lambda x, _: (block(jnp.sin)(x), None), x, None, length=3)[0]
    >>> text = str(jax.make_jaxpr(unroll(layers))(1.0))
    >>> text.count("scan["), text.count("name=remat_block")
    (0, 3)
    """

    def rule(eqn: JaxprEqn, args: list[Any], run: jaxpr.Run) -> Sequence[Any] | None:
        if eqn.primitive.name == "scan" and _has_block(eqn.params["jaxpr"].jaxpr):
            return jaxpr.unroll_scan(eqn, args, run)
        return None

    return jaxpr.transform(fn, rule)


def _has_block(traced: Jaxpr) -> bool:
    return any(
        jaxpr.is_call(eqn, BLOCK) or any(_has_block(inner) for inner in jaxpr.inner_jaxprs(eqn)) for eqn in traced.eqns
    )
