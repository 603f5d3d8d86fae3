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
from jaxtrain.models import GPT2, functional_with_state
from jaxtrain.models.bert import Bert
from jaxtrain.models.llama import Llama
from jaxtrain.models.t5 import shift_right
from jaxtrain.recipes import (
    GPTRecipe,
    ImageRecipe,
    LanguageRecipe,
    LlamaRecipe,
    MaskedLanguageRecipe,
    Recipe,
    ResNetRecipe,
    T5Recipe,
    TextClassificationRecipe,
)
from jaxtrain.tasks import Task, classification, language, masked_language, seq2seq

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
      model: The module, with shapes instead of arrays.
      weights: Parameters and BatchNorm's running statistics by path.
      inputs: The inputs by name.
      logits: `logits(call, *inputs)` computes the logits, given the model's `call`.
      length_input: Name of the input whose length the logits have; None for logits per row.
      rows: Validation examples by input name, [ROWS, …].
    """

    model: nnx.Module
    weights: Mapping[str, Any]
    inputs: Mapping[str, Input]
    logits: Callable[..., Any]
    length_input: str | None
    rows: Mapping[str, np.ndarray]

    def __call__(self, weights: Mapping[str, Any], *inputs: Any) -> Any:
        """Return the logits of inputs of any batch size and any length up to the longest; shapes may be symbolic."""
        logits = self.apply(weights, *map(_pad, self.inputs.values(), inputs))
        if self.length_input is None:
            return logits
        return lax.slice_in_dim(logits, 0, inputs[[*self.inputs].index(self.length_input)].shape[1], axis=1)

    def apply(self, weights: Mapping[str, Any], *padded: Any) -> Any:
        """Return the logits of inputs of the longest length."""
        run, *likes = functional_with_state(self.model)
        trees = [unflatten(weights, like) for like in likes]
        return self.logits(lambda *inputs: run(*trees, *inputs)[0], *padded)

    def symbolic(self) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes of the inputs with symbolic batch size and lengths."""
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


def build_inference(recipe: Recipe, task: Task, params: Any, model_state: Any) -> Inference:
    """Build the inference function of a run; float16 and bfloat16 weights become float32."""
    model = nnx.eval_shape(lambda: _model(recipe, task, nnx.Rngs(0)))
    inputs, logits, length_input = _signature(recipe, task, model)
    examples = [task.validation[i] for i in range(min(ROWS, len(task.validation)))]
    rows = {
        name: np.stack([np.asarray(example[name], x.dtype)[: x.shape[0]] for example in examples])
        for name, x in inputs.items()
    }
    return Inference(model, named_weights(params, model_state), inputs, logits, length_input, rows)


def named_weights(params: Any, model_state: Any) -> dict[str, Any]:
    """Return the leaves of both pytrees by path, with float16 and bfloat16 as float32."""
    return {path: _widen(leaf) for tree in (params, model_state) if tree is not None for path, leaf in leaves(tree)}


def _widen(leaf: Any) -> Any:
    return leaf.astype(np.float32) if leaf.dtype in (jnp.bfloat16, np.float16) else leaf


def _signature(recipe: Recipe, task: Task, model: Any) -> tuple[dict[str, Input], Callable[..., Any], str | None]:
    """Return `inputs`, `logits` and `length_input` of an `Inference`."""
    if isinstance(recipe, ImageRecipe):
        return {"image": Input(_image_shape(task), np.float32)}, lambda call, image: call(image), None
    if isinstance(recipe, LanguageRecipe):
        # The padding follows the tokens, which do not attend to it.
        return {"tokens": Input((recipe.seq_len,), np.int32, 0)}, lambda call, tokens: call(tokens), "tokens"
    pad = model.config.pad_token_id
    if isinstance(recipe, T5Recipe):
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


def _model(recipe: Recipe, task: Task, rngs: nnx.Rngs) -> nnx.Module:
    if isinstance(recipe, ResNetRecipe):
        return classification.resnet_model(recipe, _image_shape(task))
    if isinstance(recipe, ImageRecipe):
        return classification.image_model(recipe, _image_shape(task))
    if isinstance(recipe, GPTRecipe):
        return GPT2(language.gpt2_config(recipe), rngs=rngs)
    if isinstance(recipe, LlamaRecipe):
        return Llama(language.llama_config(recipe), rngs=rngs)
    if isinstance(recipe, MaskedLanguageRecipe):
        texts = tokenizer(recipe.tokenizer)
        return Bert(masked_language.bert_config(recipe, texts, recipe.seq_len, num_labels=None), rngs=rngs)
    if isinstance(recipe, TextClassificationRecipe):
        texts, longest = tokenizer(recipe.tokenizer), recipe.seq_len + 2
        return Bert(masked_language.bert_config(recipe, texts, longest, num_labels=task.classes), rngs=rngs)
    if isinstance(recipe, T5Recipe):
        return seq2seq.t5(recipe, tokenizer(recipe.tokenizer))[0]
    raise TypeError(f"no model for {type(recipe).__name__}")


def _image_shape(task: Task) -> tuple[int, ...]:
    return tuple(task.validation[0]["image"].shape)
