"""What the exported model of a task is called with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Input:
    """An input of a model, [batch, *shape].

    Attributes:
      shape: Shape of a row; with a `fill`, of the longest row.
      dtype: Its dtype.
      fill: Value with which shorter rows are padded, which does not change the logits of the other tokens; None for a
        fixed shape.
      length: Name of the axis that may be shorter.

    Example:
      >>> Input((28, 28, 1), "float32").fill is None
      True
    """

    shape: tuple[int, ...]
    dtype: Any
    fill: int | None = None
    length: str = "length"


@dataclass(frozen=True, eq=False)
class Signature:
    """A model as it is exported.

    Attributes:
      model: The flax.nnx module, with arrays or their shapes; None for a model that is no module.
      inputs: The inputs by name, which are arrays of the validation examples, or begin them.
      logits: `logits(call, *inputs)` computes the logits, given the model's `call`; without a module
        `logits(params, *inputs)`, given the parameters by path, for one batch size.
      length_input: Name of the input whose length the logits have; None for logits per row.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> model = nnx.Embed(16, 3, rngs=nnx.Rngs(0))  # a padding token changes the logits of no other
      >>> tokens = {"tokens": Input((8,), jnp.int32, fill=0)}
      >>> signature = Signature(model, tokens, lambda call, tokens: call(tokens), "tokens")
      >>> signature.logits(model, jnp.ones((2, 5), jnp.int32)).shape
      (2, 5, 3)
    """

    model: Any
    inputs: Mapping[str, Input]
    logits: Callable[..., Any]
    length_input: str | None = None
