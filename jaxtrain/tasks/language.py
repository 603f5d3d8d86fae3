"""Causal language modeling: a GPT-2 or a Llama that predicts the next token; tokens are bytes by default."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.data import (
    PackedRows,
    Source,
    TokenizedDocuments,
    Tokenizer,
    TokenWindows,
    is_table,
    pack,
    split_documents,
    split_table,
    subsample,
    tokenized_rows,
    tokenizer,
    unigram_entropy,
)
from jaxtrain.errors import UserError
from jaxtrain.interop import NameTable
from jaxtrain.models import GPT2, GPT2Config, Sampling, functional, gpt2, llama, stream
from jaxtrain.models.llama import Llama, LlamaConfig
from jaxtrain.recipes import GPTRecipe, LanguageRecipe, LlamaRecipe
from jaxtrain.step import Loss
from jaxtrain.tasks.task import Predictions, Task, row_weights
from jaxtrain.tasks.text_stream import replace_unprintable

BYTES = 256
PROMPT = "def "
SAMPLE_TOKENS = 300
TEMPERATURE = 0.8


def language_task(recipe: LanguageRecipe) -> Task:
    """Return the task of a `LanguageRecipe`."""
    texts = tokenizer(recipe.tokenizer)
    train, validation, entropy = _sources(recipe, texts)
    model, apply, init, names = decoder(recipe)

    def predict(params: Any, batch: Any, rng: Any) -> Predictions:
        if "segments" in batch:
            inputs, targets = batch["tokens"], batch["targets"]
            real = batch["segments"] > 0
            logits = apply(params, inputs, rng, batch["positions"], batch["segments"])
        else:
            inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
            real = jnp.ones_like(targets, bool)
            logits = apply(params, inputs, rng)
        weight = jnp.where(real, row_weights(batch, len(targets))[:, None], 0)
        return Predictions(logits, targets, weight)

    def loss_fn(params: Any, batch: Any, rng: Any) -> tuple[Loss, dict[str, Any]]:
        return predict(params, batch, rng).loss(), {}

    def sample(params: Any, seed: int) -> str:
        prompt = texts.encode(PROMPT).tolist()
        tokens = stream(model, params, prompt, SAMPLE_TOKENS, sampling=Sampling(TEMPERATURE), seed=seed)
        return replace_unprintable(texts.decode([*prompt, *tokens]))

    return Task(
        init=lambda: (init(), None),
        loss_fn=loss_fn,
        predict=lambda params, batch, _: predict(params, batch, None),
        texts=texts,
        train=train,
        validation=validation,
        eval_rows=min(recipe.eval_sequences, len(validation)),
        classes=vocabulary(recipe),
        unit="tokens",
        units_per_row=recipe.seq_len,
        bounds={"segments": recipe.seq_len + 1, "positions": recipe.seq_len},
        description={
            "text": str(recipe.data) if recipe.data else "the source of Python's standard library",
            "rows": f"{len(train):,} for training, {len(validation):,} for validation",
        },
        references={"unigram entropy": entropy},
        sample=sample,
        sharding=gpt2.SHARDING if isinstance(recipe, GPTRecipe) else llama.SHARDING,
        names=names,
    )


class Decoder(NamedTuple):
    """The model of a `LanguageRecipe`.

    Attributes:
      model: The module, without arrays.
      apply: `apply(params, tokens, rng, positions, segments)` returns the logits [B, T, vocabulary].
      init: Creates the initial params; `jax.eval_shape(init)` returns their shapes.
      names: PyTorch's names of the parameters.
    """

    model: nnx.Module
    apply: Callable[..., Any]
    init: Callable[[], Any]
    names: NameTable


def decoder(recipe: LanguageRecipe) -> Decoder:
    """Return the recipe's model. Raises `UserError` for sizes that are not divisible."""
    if isinstance(recipe, GPTRecipe):
        config = gpt2_config(recipe)
        return _decoder(lambda rngs: GPT2(config, rngs=rngs), recipe.seed, gpt2.torch_names())
    if isinstance(recipe, LlamaRecipe):
        sizes = llama_config(recipe)
        return _decoder(lambda rngs: Llama(sizes, rngs=rngs), recipe.seed, llama.torch_names(sizes))
    raise TypeError(f"no model for {type(recipe).__name__}")


def vocabulary(recipe: LanguageRecipe) -> int:
    """Return the size of the model's vocabulary."""
    return BYTES if recipe.tokenizer is None else tokenizer(recipe.tokenizer).size


def _sources(recipe: LanguageRecipe, texts: Tokenizer) -> tuple[Source, Source, float]:
    """Return (train, validation, unigram entropy of the validation tokens): windows over all text, or packed rows."""
    if recipe.data is not None and is_table(recipe.data):
        rows = split_table(recipe.data, [recipe.text_column])
        train, validation = (
            tokenized_rows(recipe.data, part, recipe.text_column, texts, name)
            for part, name in zip(rows, ("train", "validation"), strict=True)
        )
        return _pack_rows(recipe, train, validation)
    train_texts, validation_texts = split_documents(recipe.data, texts)
    if recipe.packing:
        return _pack_rows(recipe, train_texts, validation_texts)
    windows = TokenWindows(train_texts.tokens, recipe.seq_len), TokenWindows(validation_texts.tokens, recipe.seq_len)
    return *windows, unigram_entropy(validation_texts.tokens)


def _pack_rows(
    recipe: LanguageRecipe, train: TokenizedDocuments, validation: TokenizedDocuments
) -> tuple[PackedRows, Source, float]:
    rows = subsample(pack(validation, recipe.seq_len, pad=0), recipe.eval_sequences)
    targets = [rows[i]["targets"][rows[i]["segments"] > 0] for i in range(len(rows))]
    return pack(train, recipe.seq_len, pad=0), rows, unigram_entropy(np.concatenate(targets))


def _decoder(create: Callable[[nnx.Rngs], nnx.Module], seed: int, names: NameTable) -> Decoder:
    model = nnx.eval_shape(lambda: create(nnx.Rngs(seed)))
    return Decoder(model, functional(model)[0], jax.jit(lambda: functional(create(nnx.Rngs(seed)))[1]), names)


def gpt2_config(recipe: GPTRecipe) -> GPT2Config:
    """Return the model's configuration. Raises `UserError` for sizes that are not divisible."""
    if recipe.n_embd % recipe.n_head:
        raise UserError(f"n_embd {recipe.n_embd} is not divisible by n_head {recipe.n_head}: change one of them")
    return GPT2Config(
        vocab_size=vocabulary(recipe),
        n_positions=recipe.seq_len,
        n_embd=recipe.n_embd,
        n_layer=recipe.n_layer,
        n_head=recipe.n_head,
        dropout=recipe.dropout,
        initializer_range=_initial_std(recipe.n_embd),
    )


def llama_config(recipe: LlamaRecipe) -> LlamaConfig:
    """Return the model's configuration. Raises `UserError` for sizes that are not divisible."""
    width, heads, shared = recipe.hidden_size, recipe.num_attention_heads, recipe.num_key_value_heads
    if width % (2 * heads):
        raise UserError(f"hidden_size {width} is not divisible by 2 × num_attention_heads {heads}: change one of them")
    if heads % shared:
        raise UserError(f"num_attention_heads {heads} is not divisible by num_key_value_heads {shared}: change one")
    return LlamaConfig(
        vocab_size=vocabulary(recipe),
        hidden_size=width,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        head_dim=width // heads,
        max_position_embeddings=recipe.seq_len,
        tie_word_embeddings=True,
        initializer_range=_initial_std(width),
    )


def _initial_std(width: int) -> float:
    # GPT-2's 0.02 is meant for its width of 768; narrower models learn faster from a larger standard deviation.
    return 0.02 * math.sqrt(768 / width)
