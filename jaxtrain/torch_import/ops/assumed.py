"""Assumptions about a batch."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.torch_import.ops.table import op
from jaxtrain.torch_import.refusals import refusal


@op("assumed.default", library="jaxtrain")
def assumed(*values: Any, answers: tuple[Any, ...], sources: tuple[str, ...]) -> jax.Array:
    """Return 1 if all values are the answers, else NaN; raise an error if a value that is known is not.

    Raises:
      UserError: A value is known and is another one.
    """
    for value, answer, source in zip(values, answers, sources, strict=True):
        if isinstance(value, jax.core.Tracer) or (found := type(answer)(value)) == answer:
            continue
        raise refusal(
            f"forward reads {found} where it read {answer} of the example",
            "import the module with an example like this batch, for such batches",
            source,
        )
    holds = [jnp.all(jnp.asarray(x) == answer) for x, answer in zip(values, answers, strict=True)]
    return jnp.where(jnp.stack(holds).all(), 1.0, jnp.nan)
