"""A run's model as other programs call it: named weights, named inputs, logits."""

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
"""Examples of the validation data on which an export is verified."""


@dataclass(frozen=True)
class Input:
    """An array [batch, *shape] that a model is given.

    With a `fill`, `shape` is that of the longest row: a shorter one is filled up with it, and told from none.
    """

    shape: tuple[int, ...]
    dtype: Any
    fill: int | None = None
    length: str = "length"
    """What an axis that may be shorter is called."""


@dataclass(frozen=True, eq=False)
class Inference:
    """Weights and inputs → logits; and rows of the run's validation data to try it on.

    `model` is without arrays: `weights`, by their paths, are its parameters and BatchNorm's statistics. Of the inputs
    `logits(call, *inputs)` makes the logits, `call` being the model's. `follows` is the input whose length they have;
    None where there are logits of the row, not of its tokens.
    """

    model: nnx.Module
    weights: Mapping[str, Any]
    inputs: Mapping[str, Input]
    logits: Callable[..., Any]
    follows: str | None
    rows: Mapping[str, np.ndarray]

    def __call__(self, weights: Mapping[str, Any], *given: Any) -> Any:
        """Logits of inputs of any batch, each as long as it is or shorter; the shapes may be symbolic."""
        logits = self.apply(weights, *map(_whole, self.inputs.values(), given))
        if self.follows is None:
            return logits
        return lax.slice_in_dim(logits, 0, given[[*self.inputs].index(self.follows)].shape[1], axis=1)

    def apply(self, weights: Mapping[str, Any], *whole: Any) -> Any:
        """Logits of inputs as long as they can be."""
        run, *likes = functional_with_state(self.model)
        trees = [unflatten(weights, like) for like in likes]
        return self.logits(lambda *inputs: run(*trees, *inputs)[0], *whole)

    def symbolic(self) -> list[jax.ShapeDtypeStruct]:
        """What is given, of any batch and any length up to the longest."""
        lengths = {x.length: x.shape[0] for x in self.inputs.values() if x.fill is not None}
        constraints = [f"{name} <= {longest}" for name, longest in lengths.items()]
        batch, *symbols = symbolic_shape(", ".join(["batch", *lengths]), constraints=constraints)
        sizes = dict(zip(lengths, symbols, strict=True))
        return [
            jax.ShapeDtypeStruct((batch, *(x.shape if x.fill is None else [sizes[x.length]])), x.dtype)
            for x in self.inputs.values()
        ]


def _whole(kind: Input, x: Any) -> Any:
    if kind.fill is None:
        return x
    rows, length = x.shape
    # Filled by concatenation: of too long a row there is then no program, in ONNX as in JAX.
    return jnp.concatenate([x, jnp.full((rows, kind.shape[0] - length), kind.fill, x.dtype)], axis=1)


def inference(recipe: Recipe, task: Task, params: Any, model_state: Any) -> Inference:
    """That of a run of `recipe` with these parameters; weights narrower than float32 are widened to it."""
    model = nnx.eval_shape(lambda: _model(recipe, task, nnx.Rngs(0)))
    inputs, logits, follows = _signature(recipe, task, model)
    examples = [task.validation[i] for i in range(min(ROWS, len(task.validation)))]
    rows = {
        name: np.stack([np.asarray(example[name], x.dtype)[: x.shape[0]] for example in examples])
        for name, x in inputs.items()
    }
    return Inference(model, weights_of(params, model_state), inputs, logits, follows, rows)


def weights_of(params: Any, model_state: Any) -> dict[str, Any]:
    """Both by their paths, floating numbers in float32 at least."""
    return {path: _wide(leaf) for tree in (params, model_state) if tree is not None for path, leaf in leaves(tree)}


def _wide(leaf: Any) -> Any:
    return leaf.astype(np.float32) if leaf.dtype in (jnp.bfloat16, np.float16) else leaf


def _signature(recipe: Recipe, task: Task, model: Any) -> tuple[dict[str, Input], Callable[..., Any], str | None]:
    """(inputs, logits, follows) of an `Inference`."""
    if isinstance(recipe, ImageRecipe):
        return {"image": Input(_image_shape(task), np.float32)}, lambda call, image: call(image), None
    if isinstance(recipe, LanguageRecipe):
        # What a row is filled up with comes after its tokens, which therefore do not see it.
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
