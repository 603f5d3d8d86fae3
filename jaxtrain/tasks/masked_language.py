"""Masked language modeling (Devlin et al. 2018): a BERT that predicts masked tokens."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.data import (
    Example,
    IndexedSource,
    MappedSource,
    Source,
    Tokenizer,
    Tokens,
    TokenWindows,
    is_table,
    pad_tokens,
    split_documents,
    split_table,
    subsample,
    tokenizer,
    unigram_entropy,
)
from jaxtrain.errors import UserError
from jaxtrain.models import functional
from jaxtrain.models.bert import SHARDING, Bert, BertConfig, torch_names
from jaxtrain.recipes import EncoderRecipe, MaskedLanguageRecipe
from jaxtrain.step import Loss
from jaxtrain.tasks.task import Predictions, Task, row_weights

MASKED, RANDOM = 0.8, 0.1
"""Shares of the predicted tokens that are replaced by the mask token and by a random token; the rest is unchanged."""


def masked_language_task(recipe: MaskedLanguageRecipe) -> Task:
    """Return the task of a `MaskedLanguageRecipe`."""
    texts = tokenizer(recipe.tokenizer)
    pad, mask = texts.special("pad"), texts.special("mask")
    special = np.array([pad, texts.special("start"), texts.special("end")], np.int32)
    train_rows, validation_rows = _sources(recipe, texts)
    train, validation = IndexedSource(train_rows), IndexedSource(subsample(validation_rows, recipe.eval_sequences))
    config = bert_config(recipe, texts, recipe.seq_len, num_labels=None)
    apply, init = bert(config, recipe.seed)

    def mask_batch(batch: Any, rng: Any) -> tuple[jax.Array, jax.Array]:
        """Return the model's input tokens and where it predicts."""
        # Evaluation has no key: its mask depends on the example's index alone.
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0) if rng is None else rng, batch["index"])
        mask_row = partial(mask_tokens, mask=mask, vocabulary=texts.size, share=recipe.masked)
        maskable = jnp.isin(batch["tokens"], special, invert=True)
        return jax.vmap(mask_row)(keys, batch["tokens"], maskable)

    def predict(params: Any, batch: Any, rng: Any) -> Predictions:
        mask_rng, rng = (None, None) if rng is None else jax.random.split(rng)
        tokens = batch["tokens"]
        inputs, predicted = mask_batch(batch, mask_rng)
        weight = jnp.where(predicted, row_weights(batch, len(tokens))[:, None], 0)
        return Predictions(apply(params, inputs, tokens != pad, None, rng), tokens, weight)

    def loss_fn(params: Any, batch: Any, rng: Any) -> tuple[Loss, dict[str, Any]]:
        predictions = predict(params, batch, rng)
        return predictions.loss(), {"accuracy": predictions.accuracy()}

    def sample(params: Any, seed: int) -> str:
        example = validation[int(np.random.default_rng(seed).integers(len(validation)))]
        batch = {name: np.asarray(value)[None] for name, value in example.items()}
        inputs, predicted = mask_batch(batch, None)
        filled = apply(params, inputs, batch["tokens"] != pad, None, None).argmax(-1)
        text = texts.decode(_fill_masks(batch, predicted, filled))
        return f"{_show_masks(texts, batch['tokens'], predicted)}\n→\n{text}"

    targets = np.concatenate([validation[i]["tokens"] for i in range(len(validation))])
    return Task(
        init=lambda: (init(), None),
        loss_fn=loss_fn,
        predict=lambda params, batch, _: predict(params, batch, None),
        texts=texts,
        train=train,
        validation=validation,
        eval_rows=len(validation),
        classes=texts.size,
        unit="tokens",
        units_per_row=recipe.seq_len,
        bounds={"index": max(len(train), len(validation))},
        description={
            "text": str(recipe.data) if recipe.data else "the source of Python's standard library",
            "sequences": f"{len(train):,} for training, {len(validation):,} for validation",
        },
        references={"unigram entropy": unigram_entropy(targets[targets != pad])},
        sample=sample,
        sharding=SHARDING,
        names=torch_names(config),
    )


def mask_tokens(
    rng: jax.Array, tokens: jax.Array, maskable: jax.Array, *, mask: int, vocabulary: int, share: float
) -> tuple[jax.Array, jax.Array]:
    """Choose the tokens to predict and mask them as BERT does.

    Of the tokens to predict, 80 % are replaced by the mask token and 10 % by a random token; 10 % stay unchanged, so
    that the model cannot know which of its input tokens are correct.

    Args:
      rng: Key of the draws.
      tokens: int [T].
      maskable: bool [T], False for special tokens.
      mask: The mask token.
      vocabulary: Number of tokens to draw random ones from.
      share: Probability that a token is to be predicted.

    Returns:
      A tuple (input tokens int [T], bool [T] where to predict).
    """
    choice_rng, action_rng, random_rng = jax.random.split(rng, 3)
    predicted = (jax.random.uniform(choice_rng, tokens.shape) < share) & maskable
    action = jax.random.uniform(action_rng, tokens.shape)
    random_tokens = jax.random.randint(random_rng, tokens.shape, 0, vocabulary, tokens.dtype)
    replaced = jnp.where(action < MASKED, jnp.full_like(tokens, mask), random_tokens)
    return jnp.where(predicted & (action < MASKED + RANDOM), replaced, tokens), predicted


def bert_config(recipe: EncoderRecipe, texts: Tokenizer, seq_len: int, num_labels: int | None) -> BertConfig:
    """Return the model's configuration. Raises `UserError` for sizes that are not divisible."""
    if recipe.hidden_size % recipe.num_attention_heads:
        raise UserError(
            f"hidden_size {recipe.hidden_size} is not divisible by num_attention_heads {recipe.num_attention_heads}: "
            "change one of them"
        )
    return BertConfig(
        vocab_size=texts.size,
        hidden_size=recipe.hidden_size,
        num_hidden_layers=recipe.num_hidden_layers,
        num_attention_heads=recipe.num_attention_heads,
        intermediate_size=4 * recipe.hidden_size,
        max_position_embeddings=seq_len,
        hidden_dropout_prob=recipe.dropout,
        attention_probs_dropout_prob=recipe.dropout,
        # BERT's 0.02 is meant for its width of 768; narrower models learn faster from a larger standard deviation.
        initializer_range=0.02 * math.sqrt(768 / recipe.hidden_size),
        pad_token_id=texts.special("pad"),
        num_labels=num_labels,
    )


def bert(config: BertConfig, seed: int) -> tuple[Callable[..., Any], Callable[[], Any]]:
    """Return (apply, init) of the model; `init()` creates the initial params."""

    def model() -> Bert:
        return Bert(config, rngs=nnx.Rngs(seed))

    apply, _ = functional(nnx.eval_shape(model))
    return apply, jax.jit(lambda: functional(model())[1])


def encode_text(texts: Tokenizer, text: str, length: int) -> Tokens:
    """Return a text's tokens between start and end token, truncated or padded to int32 [length]."""
    start, end = texts.special("start"), texts.special("end")
    return pad_tokens(np.r_[start, texts.encode(text)[: length - 2], end], length, texts.special("pad"))[0]


def _sources(recipe: MaskedLanguageRecipe, texts: Tokenizer) -> tuple[Source, Source]:
    """Return (train, validation): windows over the text of files, or a table's rows, of `seq_len` tokens each."""
    if recipe.seq_len < 3:
        raise UserError(f"seq_len must be at least 3, got {recipe.seq_len}: use 3 or more")
    if recipe.data is not None and is_table(recipe.data):
        encode = partial(_encode_row, recipe, texts)
        train, validation = split_table(recipe.data, [recipe.text_column])
        return MappedSource(train, encode), MappedSource(validation, encode)
    train, validation = (TokenWindows(part.tokens, recipe.seq_len - 1) for part in split_documents(recipe.data, texts))
    return train, validation


def _encode_row(recipe: MaskedLanguageRecipe, texts: Tokenizer, row: Example) -> Example:
    return {"tokens": encode_text(texts, str(row[recipe.text_column]), recipe.seq_len)}


def _fill_masks(batch: Any, predicted: jax.Array, filled: jax.Array) -> np.ndarray:
    return np.where(predicted, filled, batch["tokens"])[0]


def _show_masks(texts: Tokenizer, tokens: np.ndarray, predicted: jax.Array) -> str:
    return "".join("█" if gap else texts.decode([token]) for token, gap in zip(tokens[0], predicted[0], strict=True))
