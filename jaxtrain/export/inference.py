"""The model of a run as a function for export: named weights and inputs to logits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.export import symbolic_shape

from jaxtrain.interop import leaves, unflatten
from jaxtrain.models import functional_with_state
from jaxtrain.run import Input, Signature, Task

ROWS = 8
"""Number of validation examples on which an export is verified."""


@dataclass(frozen=True, eq=False)
class Inference:
    """A function from weights and inputs to logits, with rows of the validation data to verify it on.

    Attributes:
      model: The module, with shapes instead of arrays; None if the function is the task's `predict`, or the model is no
        module.
      weights: Parameters and BatchNorm's running statistics by path.
      inputs: The inputs by name.
      logits: `logits(call, *inputs)` computes the logits, given the model's `call`; without a model
        `logits(weights, *inputs)`.
      length_input: Name of the input whose length the logits have; None for logits per row.
      rows: Validation examples by input name, [ROWS, …].
      batch: The only batch size; None for any.
      note: Why the batch size is fixed.
    """

    model: nnx.Module | None
    weights: Mapping[str, Any]
    inputs: Mapping[str, Input]
    logits: Callable[..., Any]
    length_input: str | None
    rows: Mapping[str, np.ndarray]
    batch: int | None = None
    note: str = ""

    def __call__(self, weights: Mapping[str, Any], *inputs: Any) -> Any:
        """Return the logits of inputs of any batch size and any length up to the longest; shapes may be symbolic."""
        logits = self.apply(weights, *map(_pad, self.inputs.values(), inputs))
        if self.length_input is None:
            return logits
        return lax.slice_in_dim(logits, 0, inputs[[*self.inputs].index(self.length_input)].shape[1], axis=1)

    def apply(self, weights: Mapping[str, Any], *padded: Any) -> Any:
        """Return the logits of inputs of the longest length."""
        if self.model is None:
            return self.logits(weights, *padded)
        run, *likes = functional_with_state(self.model)
        trees = [unflatten(weights, like) for like in likes]
        return self.logits(lambda *inputs: run(*trees, *inputs)[0], *padded)

    def symbolic(self) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes of the inputs, with symbolic lengths and batch size unless it is fixed."""
        if self.batch is not None:
            return [jax.ShapeDtypeStruct((self.batch, *x.shape), x.dtype) for x in self.inputs.values()]
        lengths = {x.length: x.shape[0] for x in self.inputs.values() if x.fill is not None}
        constraints = [f"{name} <= {longest}" for name, longest in lengths.items()]
        batch, *symbols = symbolic_shape(", ".join(["batch", *lengths]), constraints=constraints)
        sizes = dict(zip(lengths, symbols, strict=True))
        return [
            jax.ShapeDtypeStruct((batch, *(x.shape if x.fill is None else [sizes[x.length]])), x.dtype)
            for x in self.inputs.values()
        ]


def _pad(kind: Input, x: Any) -> Any:
    if kind.fill is None:
        return x
    rows = x.shape[0]
    # A concatenation does not lower with symbolic sizes; padding would cut rows that are too long.
    return lax.dynamic_update_slice(jnp.full((rows, kind.shape[0]), kind.fill, x.dtype), x, (0, 0))


def build_inference(task: Task, signature: Signature, params: Any, model_state: Any) -> Inference:
    """Build the inference function of a task's `signature`; float16 and bfloat16 weights become float32."""
    examples = [task.validation[i] for i in range(min(ROWS, len(task.validation)))]
    rows = {
        name: np.stack([np.asarray(example[name], x.dtype)[: x.shape[0]] for example in examples])
        for name, x in signature.inputs.items()
    }
    found = Inference(
        signature.model,
        named_weights(params, model_state),
        signature.inputs,
        signature.logits,
        signature.length_input,
        rows,
    )
    if signature.model is not None:
        return found
    note = "the batch size and the length are fixed, because the model is imported"
    inputs = {name: replace(x, fill=None) for name, x in signature.inputs.items()}
    return replace(found, inputs=inputs, length_input=None, batch=len(examples), note=note)


def named_weights(params: Any, model_state: Any) -> dict[str, Any]:
    """Return the leaves of both pytrees by path, with float16 and bfloat16 as float32."""
    return {path: widen(leaf) for tree in (params, model_state) if tree is not None for path, leaf in leaves(tree)}


def widen(leaf: Any) -> Any:
    """Return an array with float16 and bfloat16 as float32."""
    return leaf.astype(np.float32) if leaf.dtype in (jnp.bfloat16, np.float16) else leaf
