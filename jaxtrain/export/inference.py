"""The model of a run as a function for export: named weights and inputs to logits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.export import symbolic_shape

from jaxtrain.data import tokenizer
from jaxtrain.interop import leaves, unflatten
from jaxtrain.models import functional_with_state
from jaxtrain.models.t5 import shift_right
from jaxtrain.recipes.image import ImageRecipe
from jaxtrain.recipes.language import LanguageRecipe
from jaxtrain.recipes.masked_language import MaskedLanguageRecipe
from jaxtrain.recipes.seq2seq import Seq2SeqRecipe
from jaxtrain.recipes.text_classification import TextClassificationRecipe
from jaxtrain.run import Recipe, Task

ROWS = 8
"""Number of validation examples on which an export is verified."""


@dataclass(frozen=True)
class Input:
    """An input of a model, [batch, *shape].

    Attributes:
      shape: Shape of a row; with a `fill`, of the longest row.
      dtype: Its dtype.
      fill: Value with which shorter rows are padded, which does not change the logits of the other tokens; None for a
        fixed shape.
      length: Name of the axis that may be shorter.
    """

    shape: tuple[int, ...]
    dtype: Any
    fill: int | None = None
    length: str = "length"


@dataclass(frozen=True, eq=False)
class Inference:
    """A function from weights and inputs to logits, with rows of the validation data to verify it on.

    Attributes:
      model: The module, with shapes instead of arrays; None if the function is the task's `predict`.
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
    rows, length = x.shape
    # Padded by concatenation, so that rows that are too long raise an error in ONNX as in JAX.
    return jnp.concatenate([x, jnp.full((rows, kind.shape[0] - length), kind.fill, x.dtype)], axis=1)


def has_signature(recipe: Recipe) -> bool:
    """Whether the task of a recipe is that of a built-in one, whose inputs `build_inference` knows."""
    return type(recipe).task.__module__.startswith("jaxtrain.recipes.")


def build_inference(recipe: Recipe, task: Task, params: Any, model_state: Any) -> Inference:
    """Build the inference function of a built-in recipe's run; float16 and bfloat16 weights become float32."""
    model = nnx.eval_shape(lambda: _model(recipe, task))
    inputs, logits, length_input = _signature(recipe, task, model)
    examples = [task.validation[i] for i in range(min(ROWS, len(task.validation)))]
    rows = {
        name: np.stack([np.asarray(example[name], x.dtype)[: x.shape[0]] for example in examples])
        for name, x in inputs.items()
    }
    return Inference(model, named_weights(params, model_state), inputs, logits, length_input, rows)


def named_weights(params: Any, model_state: Any) -> dict[str, Any]:
    """Return the leaves of both pytrees by path, with float16 and bfloat16 as float32."""
    return {path: widen(leaf) for tree in (params, model_state) if tree is not None for path, leaf in leaves(tree)}


def widen(leaf: Any) -> Any:
    """Return an array with float16 and bfloat16 as float32."""
    return leaf.astype(np.float32) if leaf.dtype in (jnp.bfloat16, np.float16) else leaf


def _signature(recipe: Recipe, task: Task, model: Any) -> tuple[dict[str, Input], Callable[..., Any], str | None]:
    """Return `inputs`, `logits` and `length_input` of an `Inference`."""
    if isinstance(recipe, ImageRecipe):
        return {"image": Input(_image_shape(task), np.float32)}, lambda call, image: call(image), None
    if isinstance(recipe, LanguageRecipe):
        # The padding follows the tokens, which do not attend to it.
        return {"tokens": Input((recipe.seq_len,), np.int32, 0)}, lambda call, tokens: call(tokens), "tokens"
    pad = model.config.pad_token_id
    if isinstance(recipe, Seq2SeqRecipe):
        return (
            {
                "source": Input((recipe.source_len,), np.int32, pad, "source_length"),
                "target": Input((recipe.target_len,), np.int32, pad, "target_length"),
            },
            lambda call, source, target: call(source, shift_right(target, model.config), source != pad),
            "target",
        )
    return (
        {"tokens": Input((model.config.max_position_embeddings,), np.int32, pad)},
        lambda call, tokens: call(tokens, tokens != pad),
        "tokens" if isinstance(recipe, MaskedLanguageRecipe) else None,
    )


def _model(recipe: Recipe, task: Task) -> nnx.Module:
    if isinstance(recipe, ImageRecipe):
        return recipe.model(_image_shape(task))
    if isinstance(recipe, LanguageRecipe) and task.classes is not None:
        return recipe.model(task.classes)
    if isinstance(recipe, MaskedLanguageRecipe):
        return recipe.bert(tokenizer(recipe.tokenizer), recipe.seq_len, num_labels=None)
    if isinstance(recipe, TextClassificationRecipe):
        return recipe.bert(tokenizer(recipe.tokenizer), recipe.seq_len + 2, num_labels=task.classes)
    if isinstance(recipe, Seq2SeqRecipe):
        return recipe.model(tokenizer(recipe.tokenizer))
    raise TypeError(f"no model for {type(recipe).__name__}")


def _image_shape(task: Task) -> tuple[int, ...]:
    return tuple(task.validation[0]["image"].shape)
