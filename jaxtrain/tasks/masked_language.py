"""Masked language modelling (Devlin et al. 2018): a BERT that fills in what is hidden of a text."""

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
from jaxtrain.tasks.task import Predicted, Task, row_weights

HIDDEN, RANDOM = 0.8, 0.1
"""Of the tokens to predict, the shares that the model sees hidden and replaced; the others it sees as they are."""


def masked_language_task(recipe: MaskedLanguageRecipe) -> Task:
    """The task of a `MaskedLanguageRecipe`."""
    texts = tokenizer(recipe.tokenizer)
    pad, mask = texts.special("pad"), texts.special("mask")
    around = np.array([pad, texts.special("start"), texts.special("end")], np.int32)
    train, held_out = _sources(recipe, texts)
    train, validation = IndexedSource(train), IndexedSource(subsample(held_out, recipe.eval_sequences))
    config = bert_config(recipe, texts, recipe.seq_len, num_labels=None)
    apply, init = bert(config, recipe.seed)

    def hide(batch: Any, rng: Any) -> tuple[jax.Array, jax.Array]:
        """What the model sees of a batch, and where it is to predict."""
        # In evaluation there is no key: what is hidden then depends on the example's number alone.
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0) if rng is None else rng, batch["index"])
        hidden = partial(masked, mask=mask, vocabulary=texts.size, share=recipe.masked)
        of_text = jnp.isin(batch["tokens"], around, invert=True)
        return jax.vmap(hidden)(keys, batch["tokens"], of_text)

    def predict(params: Any, batch: Any, rng: Any) -> Predicted:
        mask_rng, rng = (None, None) if rng is None else jax.random.split(rng)
        tokens = batch["tokens"]
        seen, predicted = hide(batch, mask_rng)
        weight = jnp.where(predicted, row_weights(batch, len(tokens))[:, None], 0)
        return Predicted(apply(params, seen, tokens != pad, None, rng), tokens, weight)

    def loss_fn(params: Any, batch: Any, rng: Any) -> tuple[Loss, dict[str, Any]]:
        predicted = predict(params, batch, rng)
        return predicted.loss(), {"accuracy": predicted.accuracy()}

    def sample(params: Any, seed: int) -> str:
        example = validation[int(np.random.default_rng(seed).integers(len(validation)))]
        batch = {name: np.asarray(value)[None] for name, value in example.items()}
        seen, predicted = hide(batch, None)
        filled = apply(params, seen, batch["tokens"] != pad, None, None).argmax(-1)
        return f"{_with_gaps(texts, batch['tokens'], predicted)}\n→\n{texts.decode(_filled(batch, predicted, filled))}"

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
        facts={
            "text": str(recipe.data) if recipe.data else "the source of Python's standard library",
            "sequences": f"{len(train):,} to train on, {len(validation):,} to validate on",
        },
        references={"unigram entropy": unigram_entropy(targets[targets != pad])},
        sample=sample,
        sharding=SHARDING,
        names=torch_names(config),
    )


def masked(
    rng: jax.Array, tokens: jax.Array, real: jax.Array, *, mask: int, vocabulary: int, share: float
) -> tuple[jax.Array, jax.Array]:
    """(tokens as seen, bool where to predict them), both [T], for tokens int [T] of which the `real` ones count.

    Each is to be predicted with the probability `share`; of these 80 % are seen as `mask`, 10 % as any token and 10 %
    as they are, so that a model cannot know which of those it sees is right.
    """
    of_choice, of_sight, of_tokens = jax.random.split(rng, 3)
    predicted = (jax.random.uniform(of_choice, tokens.shape) < share) & real
    sight = jax.random.uniform(of_sight, tokens.shape)
    anything = jax.random.randint(of_tokens, tokens.shape, 0, vocabulary, tokens.dtype)
    replaced = jnp.where(sight < HIDDEN, jnp.full_like(tokens, mask), anything)
    return jnp.where(predicted & (sight < HIDDEN + RANDOM), replaced, tokens), predicted


def bert_config(recipe: EncoderRecipe, texts: Tokenizer, seq_len: int, num_labels: int | None) -> BertConfig:
    """The configuration of the recipe's model. Raises `UserError` for sizes that make none."""
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
        # BERT's 0.02 belongs to its width of 768; narrower models learn faster from the wider start.
        initializer_range=0.02 * math.sqrt(768 / recipe.hidden_size),
        pad_token_id=texts.special("pad"),
        num_labels=num_labels,
    )


def bert(config: BertConfig, seed: int) -> tuple[Callable[..., Any], Callable[[], Any]]:
    """(apply, init) of the model: `init()` makes its first parameters."""

    def model() -> Bert:
        return Bert(config, rngs=nnx.Rngs(seed))

    apply, _ = functional(nnx.eval_shape(model))
    return apply, jax.jit(lambda: functional(model())[1])


def enclosed(texts: Tokenizer, text: str, length: int) -> Tokens:
    """The tokens of a text between the one that starts and the one that ends it, int32 [length]: the text is cut, or
    the row padded, to that."""
    start, end = texts.special("start"), texts.special("end")
    return pad_tokens(np.r_[start, texts.encode(text)[: length - 2], end], length, texts.special("pad"))[0]


def _sources(recipe: MaskedLanguageRecipe, texts: Tokenizer) -> tuple[Source, Source]:
    """Windows over the text of files, or the rows of a table, each of `seq_len` tokens."""
    if recipe.seq_len < 3:
        raise UserError(f"seq_len is {recipe.seq_len}: choose 3 or more")
    if recipe.data is not None and is_table(recipe.data):
        encode = partial(_encoded, recipe, texts)
        train, validation = split_table(recipe.data, [recipe.text_column])
        return MappedSource(train, encode), MappedSource(validation, encode)
    train_text, validation_text = (np.concatenate(files) for files in split_documents(recipe.data, texts))
    return TokenWindows(train_text, recipe.seq_len - 1), TokenWindows(validation_text, recipe.seq_len - 1)


def _encoded(recipe: MaskedLanguageRecipe, texts: Tokenizer, row: Example) -> Example:
    return {"tokens": enclosed(texts, str(row[recipe.text_column]), recipe.seq_len)}


def _filled(batch: Any, predicted: jax.Array, filled: jax.Array) -> np.ndarray:
    return np.where(predicted, filled, batch["tokens"])[0]


def _with_gaps(texts: Tokenizer, tokens: np.ndarray, predicted: jax.Array) -> str:
    return "".join("█" if gap else texts.decode([token]) for token, gap in zip(tokens[0], predicted[0], strict=True))
