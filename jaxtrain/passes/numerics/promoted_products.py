"""Find the products that a float32 value makes float32 in a function computed in low precision.

An operand of the other dtype is promoted without a trace in the code: by JAX within the product, by a layer of flax
before it.
"""

from collections.abc import Collection, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxtrain.errors import traced_location, warn_user
from jaxtrain.passes.numerics.autocast import DISABLED
from jaxtrain.program import equations
from jaxtrain.program import operations as op

_LOW = (jnp.bfloat16, jnp.float16)
_FLAX_PROMOTION = "promote_dtype"


def warn_promoted_products(traced: Jaxpr, products: Collection[str]) -> None:
    """Warn if a function has products, named by their primitives, of a low-precision and a float32 operand."""
    found = list(_promoted(traced, products))
    if found:
        where = next(filter(None, (traced_location(eqn.source_info.traceback) for eqn in found)), "an unknown line")
        count = "a product is" if len(found) == 1 else f"{len(found)} products are"
        warn_user(
            f"{count} computed in float32, because a float32 operand promotes a low-precision one, first at {where}: "
            "convert the float32 operand, such as a constant or the output of nnx.Embed without dtype=, or apply "
            'policy("fp32") if float32 is intended'
        )


def _promoted(traced: Jaxpr, products: Collection[str]) -> Iterator[JaxprEqn]:
    producers = equations.producers(traced)
    for eqn in equations.of(traced):
        if equations.in_scope(eqn, DISABLED):
            continue
        if op.of(eqn) in products:
            operands: list[Any] = [x for x in eqn.invars[:2] if not isinstance(x, Literal)]
            widening = {x: producers[x] for x in operands if x in producers and _widens(producers[x])}
            wide = [x for x in operands if x.aval.dtype == np.float32 and x not in widening]
            if wide and any(x.aval.dtype in _LOW or _is_by_flax(widening.get(x)) for x in operands):
                yield eqn
        for inner in equations.inner_jaxprs(eqn):
            yield from _promoted(inner, products)


def _widens(eqn: JaxprEqn) -> bool:
    operand: Any = eqn.invars[0]
    return op.of(eqn) == op.CONVERT_ELEMENT_TYPE and operand.aval.dtype in _LOW


def _is_by_flax(conversion: JaxprEqn | None) -> bool:
    """Return whether a layer of flax promoted an operand, rather than code that asks for float32."""
    traceback: Any = conversion and conversion.source_info.traceback
    return traceback is not None and any(frame.function_name == _FLAX_PROMOTION for frame in traceback.frames)
