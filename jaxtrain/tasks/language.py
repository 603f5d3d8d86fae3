"""Causal language modelling over bytes: a GPT-2 that predicts every next byte."""

import math
import sysconfig
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.data import Text, split_text, stdlib_files, text_files, unigram_entropy
from jaxtrain.errors import UserError
from jaxtrain.losses import cross_entropy
from jaxtrain.models import GPT2, GPT2Config, functional
from jaxtrain.objective import Loss
from jaxtrain.recipes import GPTRecipe
from jaxtrain.tasks.task import Task, row_weights

VOCABULARY = 256
PROMPT = b"def "
SAMPLE_BYTES = 300


def language_task(recipe: GPTRecipe) -> Task:
    """The task of a `GPTRecipe`."""
    train, validation = _corpus(recipe)
    apply, init = gpt(recipe)

    def loss_fn(params: Any, batch: Any, rng: Any) -> tuple[Loss, dict[str, Any]]:
        inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        weight = jnp.broadcast_to(row_weights(batch, len(targets))[:, None], targets.shape)
        losses = cross_entropy(apply(params, inputs, rng), targets) * weight
        return Loss(losses.sum(), weight.sum()), {}

    def sample(params: Any, seed: int) -> str:
        return printable(PROMPT + bytes(generate(apply, params, recipe.seq_len, PROMPT, SAMPLE_BYTES, seed=seed)))

    return Task(
        params=init(),
        loss_fn=loss_fn,
        train=Text(train, recipe.seq_len),
        validation=Text(validation, recipe.seq_len),
        eval_rows=recipe.eval_sequences,
        classes=VOCABULARY,
        unit="tokens",
        units_per_row=recipe.seq_len,
        facts={
            "text": str(recipe.data) if recipe.data else "the source of Python's standard library",
            "bytes": f"{len(train):,} to train on, {len(validation):,} to validate on",
        },
        references={"unigram entropy": unigram_entropy(validation)},
        sample=sample,
    )


def gpt(recipe: GPTRecipe) -> tuple[Callable[..., Any], Callable[[], Any]]:
    """(apply, init) of the recipe's model: `init()` makes its first parameters, `jax.eval_shape(init)` their shapes."""
    if recipe.n_embd % recipe.n_head:
        raise UserError(f"n_embd {recipe.n_embd} is not divisible by n_head {recipe.n_head}: change one of them")
    if not 0 <= recipe.dropout < 1:
        raise UserError(f"dropout {recipe.dropout} is no rate: choose 0 or more, below 1")
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=recipe.seq_len,
        n_embd=recipe.n_embd,
        n_layer=recipe.n_layer,
        n_head=recipe.n_head,
        dropout=recipe.dropout,
        # GPT-2's 0.02 belongs to its width of 768; narrower models learn faster from the wider start.
        initializer_range=0.02 * math.sqrt(768 / recipe.n_embd),
    )

    def model() -> GPT2:
        return GPT2(config, rngs=nnx.Rngs(recipe.seed))

    apply, _ = functional(nnx.eval_shape(model))
    return apply, jax.jit(lambda: functional(model())[1])


def generate(
    apply: Any, params: Any, seq_len: int, prompt: bytes, length: int, *, temperature: float = 0.8, seed: int = 0
) -> Iterator[int]:
    """`length` bytes that follow `prompt`, one by one, each drawn with the last `seq_len` bytes as context.

    `temperature` 0 takes the likeliest byte.
    """

    @jax.jit
    def next_byte(params: Any, window: Any, last: Any, key: Any) -> Any:
        logits = apply(params, window)[0, last].astype(np.float32)
        drawn = jax.random.categorical(key, logits / max(temperature, 1e-6))
        return jnp.where(temperature > 0, drawn, logits.argmax())

    text, keys = list(prompt), jax.random.key(seed)
    for i in range(length):
        context = text[-seq_len:]
        window = np.zeros((1, seq_len), np.int32)
        window[0, : len(context)] = context
        text.append(int(next_byte(params, window, np.int32(len(context) - 1), jax.random.fold_in(keys, i))))
        yield text[-1]


def printable(text: bytes) -> str:
    """`text` for a terminal: bytes that are no UTF-8, and control characters, become "·"."""
    decoded = text.decode("utf-8", "replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "·" for c in decoded).replace("\ufffd", "·")


def _corpus(recipe: GPTRecipe) -> tuple[Any, Any]:
    if recipe.data is not None:
        return split_text(text_files(recipe.data), recipe.data)
    return split_text(stdlib_files(), sysconfig.get_paths()["stdlib"])
