"""Sequence-to-sequence tasks: a T5 that generates the target of each source."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.data import (
    Example,
    MappedSource,
    Source,
    Tokenizer,
    Tokens,
    dates,
    pad_tokens,
    split_table,
    subsample,
    tokenizer,
    unigram_entropy,
)
from jaxtrain.errors import UserError
from jaxtrain.models import functional, generate
from jaxtrain.models.t5 import SHARDING, T5, T5Config, shift_right, torch_names
from jaxtrain.recipes import T5Recipe
from jaxtrain.step import Loss
from jaxtrain.tasks.task import Predictions, Task, row_weights

SAMPLE_PAIRS = 5


def seq2seq_task(recipe: T5Recipe) -> Task:
    """Return the task of a `T5Recipe`."""
    texts = tokenizer(recipe.tokenizer)
    train, pairs = _pairs(recipe)
    encode = partial(encode_pair, recipe, texts)
    validation = MappedSource(pairs, encode)
    model, init = t5(recipe, texts)
    config, (apply, _) = model.config, functional(model)

    def predict(params: Any, batch: Any, rng: Any) -> Predictions:
        source, target = batch["source"], batch["target"]
        logits = apply(params, source, shift_right(target, config), source != config.pad_token_id, None, rng)
        weight = jnp.where(target != config.pad_token_id, row_weights(batch, len(target))[:, None], 0)
        return Predictions(logits, target, weight)

    def loss_fn(params: Any, batch: Any, rng: Any) -> tuple[Loss, dict[str, Any]]:
        predictions, target = predict(params, batch, rng), batch["target"]
        rows = row_weights(batch, len(target))
        right = (predictions.logits.argmax(-1) == target) | (target == config.pad_token_id)
        # Greedy decoding generates the target if and only if every token is right given the right ones before it.
        exact = Loss(jnp.where(right.all(-1), rows, 0).sum(), rows.sum())
        return predictions.loss(), {"exact_match": exact}

    def sample(params: Any, seed: int) -> str:
        chosen = np.random.default_rng(seed).permutation(len(pairs))[:SAMPLE_PAIRS]
        sources = [pairs[int(i)]["source"] for i in chosen]
        targets = translate(recipe, texts, model, params, sources)
        return "\n".join(f"{source} → {target}" for source, target in zip(sources, targets, strict=True))

    targets = np.concatenate([validation[i]["target"] for i in range(len(validation))])
    return Task(
        init=lambda: (init(), None),
        loss_fn=loss_fn,
        predict=lambda params, batch, _: predict(params, batch, None),
        texts=texts,
        input_text=lambda example: texts.decode(example["source"]),
        train=MappedSource(train, encode),
        validation=validation,
        eval_rows=len(validation),
        classes=texts.size,
        unit="examples",
        units_per_row=1,
        description={
            "pairs": str(recipe.data) if recipe.data else "written dates and their ISO 8601 form",
            "examples": f"{len(train):,} for training, {len(validation):,} for validation",
        },
        references={"unigram entropy": unigram_entropy(targets[targets != texts.special("pad")])},
        sample=sample,
        sharding=SHARDING,
        names=torch_names(config),
    )


def t5(recipe: T5Recipe, texts: Tokenizer) -> tuple[T5, Callable[[], Any]]:
    """Return the recipe's model, without arrays, and `init`, which creates its initial params."""
    if recipe.d_model % recipe.num_heads:
        raise UserError(
            f"d_model {recipe.d_model} is not divisible by num_heads {recipe.num_heads}: change one of them"
        )
    config = T5Config(
        vocab_size=texts.size,
        d_model=recipe.d_model,
        d_kv=recipe.d_model // recipe.num_heads,
        d_ff=4 * recipe.d_model,
        num_layers=recipe.num_layers,
        num_decoder_layers=recipe.num_layers,
        num_heads=recipe.num_heads,
        dropout=recipe.dropout,
        pad_token_id=texts.special("pad"),
        eos_token_id=texts.special("end"),
        decoder_start_token_id=texts.special("pad"),
    )

    def model() -> T5:
        return T5(config, rngs=nnx.Rngs(recipe.seed))

    return nnx.eval_shape(model), jax.jit(lambda: functional(model())[1])


def encode_pair(recipe: T5Recipe, texts: Tokenizer, pair: Example) -> Example:
    """Encode a pair of texts as `{"source": int32 [source_len], "target": int32 [target_len]}`, with end and padding.

    Raises `UserError` for a text that does not fit: from a target without its end the model would learn not to stop.
    """
    return {
        "source": _encode_with_end(texts, pair["source"], "source", recipe.source_len),
        "target": _encode_with_end(texts, pair["target"], "target", recipe.target_len),
    }


def translate(recipe: T5Recipe, texts: Tokenizer, model: T5, params: Any, sources: list[str]) -> list[str]:
    """Generate the target of each source by greedy decoding."""
    pad, end = texts.special("pad"), texts.special("end")
    rows = np.stack([_encode_with_end(texts, source, "source", recipe.source_len) for source in sources])
    generated = generate(model, params, rows, recipe.target_len, mask=rows != pad, stop=end, pad=pad)
    return [texts.decode(_truncate_at(row, end)) for row in np.asarray(generated)]


def _truncate_at(tokens: Tokens, end: int) -> Tokens:
    ends = np.flatnonzero(tokens == end)
    return tokens[: ends[0]] if len(ends) else tokens


def _encode_with_end(texts: Tokenizer, text: str, what: str, length: int) -> Tokens:
    tokens = np.append(texts.encode(text), texts.special("end"))
    if len(tokens) > length:
        raise UserError(
            f"the {what} {text!r} has {len(tokens)} tokens with its end token, more than {what}_len {length}: "
            f"increase {what}_len, or remove the pair"
        )
    return pad_tokens(tokens, length, texts.special("pad"))[0]


def _pairs(recipe: T5Recipe) -> tuple[Source, Source]:
    """Return (train, validation) of examples `{"source": str, "target": str}`."""
    if recipe.data is None:
        train, validation = dates()
        return train, subsample(validation, recipe.eval_pairs)
    row = partial(_row, recipe)
    rows, validation_rows = split_table(recipe.data, [recipe.source_column, recipe.target_column])
    return MappedSource(rows, row), MappedSource(subsample(validation_rows, recipe.eval_pairs), row)


def _row(recipe: T5Recipe, row: Example) -> Example:
    return {"source": str(row[recipe.source_column]), "target": str(row[recipe.target_column])}
