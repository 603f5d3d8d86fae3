"""Causal language modelling: a GPT-2 or a Llama that predicts every next token, bytes if nothing else is said."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.data import (
    Example,
    MappedSource,
    PackedRows,
    Source,
    Tokenizer,
    Tokens,
    TokenWindows,
    is_table,
    pack,
    split_documents,
    split_table,
    subsample,
    tokenizer,
    unigram_entropy,
)
from jaxtrain.errors import UserError
from jaxtrain.interop import NameTable
from jaxtrain.models import GPT2, GPT2Config, functional, gpt2, llama
from jaxtrain.models.llama import Llama, LlamaConfig
from jaxtrain.recipes import GPTRecipe, LanguageRecipe, LlamaRecipe
from jaxtrain.step import Loss
from jaxtrain.tasks.task import Predicted, Task, row_weights

BYTES = 256
PROMPT = "def "
SAMPLE_TOKENS = 300


def language_task(recipe: LanguageRecipe) -> Task:
    """The task of a `LanguageRecipe`."""
    texts = tokenizer(recipe.tokenizer)
    train, validation, entropy = _sources(recipe, texts)
    apply, init, names = decoder(recipe)

    def predict(params: Any, batch: Any, rng: Any) -> Predicted:
        if "segments" in batch:
            inputs, targets = batch["tokens"], batch["targets"]
            real = batch["segments"] > 0
            logits = apply(params, inputs, rng, batch["positions"], batch["segments"])
        else:
            inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
            real = jnp.ones_like(targets, bool)
            logits = apply(params, inputs, rng)
        weight = jnp.where(real, row_weights(batch, len(targets))[:, None], 0)
        return Predicted(logits, targets, weight)

    def loss_fn(params: Any, batch: Any, rng: Any) -> tuple[Loss, dict[str, Any]]:
        return predict(params, batch, rng).loss(), {}

    def sample(params: Any, seed: int) -> str:
        prompt = texts.encode(PROMPT).tolist()
        written = generate(apply, params, recipe.seq_len, prompt, SAMPLE_TOKENS, seed=seed)
        return printable(texts.decode([*prompt, *written]))

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
        facts={
            "text": str(recipe.data) if recipe.data else "the source of Python's standard library",
            "rows": f"{len(train):,} to train on, {len(validation):,} to validate on",
        },
        references={"unigram entropy": entropy},
        sample=sample,
        sharding=gpt2.SHARDING if isinstance(recipe, GPTRecipe) else llama.SHARDING,
        names=names,
    )


def decoder(recipe: LanguageRecipe) -> tuple[Callable[..., Any], Callable[[], Any], NameTable]:
    """(apply, init, names) of the recipe's model.

    `init()` makes its first parameters, `jax.eval_shape(init)` their shapes.
    """
    if isinstance(recipe, GPTRecipe):
        config = gpt2_config(recipe)
        return *_functional(lambda rngs: GPT2(config, rngs=rngs), recipe.seed), gpt2.torch_names()
    if isinstance(recipe, LlamaRecipe):
        sizes = llama_config(recipe)
        return *_functional(lambda rngs: Llama(sizes, rngs=rngs), recipe.seed), llama.torch_names(sizes)
    raise TypeError(f"no model for {type(recipe).__name__}")


def vocabulary(recipe: LanguageRecipe) -> int:
    """How many tokens the model knows."""
    return BYTES if recipe.tokenizer is None else tokenizer(recipe.tokenizer).size


def generate(
    apply: Any,
    params: Any,
    seq_len: int,
    prompt: Sequence[int],
    length: int,
    *,
    temperature: float = 0.8,
    seed: int = 0,
) -> Iterator[int]:
    """`length` tokens that follow `prompt`, one by one, each drawn with the last `seq_len` tokens as context.

    `temperature` 0 takes the likeliest token.
    """

    @jax.jit
    def next_token(params: Any, window: Any, last: Any, key: Any) -> Any:
        logits = apply(params, window)[0, last].astype(np.float32)
        drawn = jax.random.categorical(key, logits / max(temperature, 1e-6))
        return jnp.where(temperature > 0, drawn, logits.argmax())

    text, keys = list(prompt), jax.random.key(seed)
    for i in range(length):
        context = text[-seq_len:]
        window = np.zeros((1, seq_len), np.int32)
        window[0, : len(context)] = context
        text.append(int(next_token(params, window, np.int32(len(context) - 1), jax.random.fold_in(keys, i))))
        yield text[-1]


def printable(text: str) -> str:
    """`text` for a terminal: what was no UTF-8, and control characters, become "·"."""
    return "".join(c if c.isprintable() or c in "\n\t" else "·" for c in text).replace("\ufffd", "·")


def _sources(recipe: LanguageRecipe, texts: Tokenizer) -> tuple[Source, Source, float]:
    """(train, validation, the entropy of the validation's tokens): windows over all text, or rows of whole texts."""
    if recipe.data is not None and is_table(recipe.data):
        encode = partial(_encoded, recipe, texts)
        train, validation = (MappedSource(rows, encode) for rows in split_table(recipe.data, [recipe.text_column]))
        return _packed(recipe, train, validation)
    of_train, of_validation = split_documents(recipe.data, texts)
    if recipe.packing:
        return _packed(recipe, of_train, of_validation)
    tokens = np.concatenate(of_validation)
    windows = TokenWindows(np.concatenate(of_train), recipe.seq_len), TokenWindows(tokens, recipe.seq_len)
    return *windows, unigram_entropy(tokens)


def _packed(recipe: LanguageRecipe, train: Any, validation: Any) -> tuple[PackedRows, Source, float]:
    rows = subsample(pack(validation, recipe.seq_len, pad=0), recipe.eval_sequences)
    targets = [rows[i]["targets"][rows[i]["segments"] > 0] for i in range(len(rows))]
    return pack(train, recipe.seq_len, pad=0), rows, unigram_entropy(np.concatenate(targets))


def _encoded(recipe: LanguageRecipe, texts: Tokenizer, row: Example) -> Tokens:
    return texts.encode(str(row[recipe.text_column]))


def _functional(model: Callable[[nnx.Rngs], nnx.Module], seed: int) -> tuple[Callable[..., Any], Callable[[], Any]]:
    apply, _ = functional(nnx.eval_shape(lambda: model(nnx.Rngs(seed))))
    return apply, jax.jit(lambda: functional(model(nnx.Rngs(seed)))[1])


def gpt2_config(recipe: GPTRecipe) -> GPT2Config:
    """The model's configuration. Raises `UserError` for sizes that do not divide."""
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
    """The model's configuration. Raises `UserError` for sizes that do not divide."""
    width, heads, shared = recipe.hidden_size, recipe.num_attention_heads, recipe.num_key_value_heads
    if width % (2 * heads):
        raise UserError(f"hidden_size {width} is no multiple of 2 × num_attention_heads {heads}: change one of them")
    if heads % shared:
        raise UserError(f"num_attention_heads {heads} is no multiple of num_key_value_heads {shared}: change one")
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
    # GPT-2's 0.02 belongs to its width of 768; narrower models learn faster from the wider start.
    return 0.02 * math.sqrt(768 / width)
