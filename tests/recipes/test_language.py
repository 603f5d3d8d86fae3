"""Packed rows: a decoder gives the same loss for a packed row as for its separate texts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxtrain.data import unigram_entropy
from jaxtrain.errors import UserError
from jaxtrain.losses import cross_entropy
from jaxtrain.models import functional
from jaxtrain.recipes.gpt import GPTRecipe
from jaxtrain.recipes.language import LanguageRecipe
from jaxtrain.recipes.llama import LlamaRecipe

LENGTH = 24
GPT = GPTRecipe(n_layer=1, n_embd=8, n_head=2, seq_len=LENGTH, packing=True, eval_sequences=3)
LLAMA = LlamaRecipe(
    num_hidden_layers=1, hidden_size=8, intermediate_size=8, num_attention_heads=2, num_key_value_heads=1,
    seq_len=LENGTH, packing=True, eval_sequences=3,
)  # fmt: skip


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Files of different lengths, some longer than a row."""
    for i in range(30):
        (tmp_path / f"{i:02}.txt").write_text("abcdefghijklmnopqrstuvwxyz"[i % 7 : 3 + i % 24] + "!" * (i % 3) * 9)
    return tmp_path


def apply_of(recipe: LanguageRecipe) -> Callable[..., Any]:
    """Return the function that computes the logits of the recipe's model."""
    return functional(nnx.eval_shape(lambda: recipe.model(256)))[0]


def rows_of(source) -> dict[str, np.ndarray]:
    return {name: np.stack([source[i][name] for i in range(len(source))]) for name in source[0]}


@pytest.mark.parametrize("recipe", [GPT, LLAMA], ids=["gpt", "llama"])
def test_the_loss_of_packed_rows_equals_that_of_their_separate_texts(recipe: LanguageRecipe, texts: Path) -> None:
    task = type(recipe)(**{**vars(recipe), "data": texts}).task()
    apply = apply_of(recipe)
    packed = rows_of(task.train)
    loss, _ = jax.jit(task.loss_fn)(task.params, packed, None)

    @jax.jit
    def alone(tokens, targets, real):
        return jnp.where(real, cross_entropy(apply(task.params, tokens), targets), 0).sum()

    total, weight = 0.0, 0
    for row in range(len(packed["tokens"])):
        for segment in range(1, packed["segments"][row].max() + 1):
            places = packed["segments"][row] == segment
            tokens, targets = (np.resize(packed[name][row][places], (1, LENGTH)) for name in ("tokens", "targets"))
            real = np.arange(LENGTH)[None] < places.sum()
            total += float(alone(tokens, targets, real))
            weight += places.sum()
    assert float(loss.weight) == weight
    assert packed["segments"].max() > 1  # at least one row holds two texts
    np.testing.assert_allclose(loss.total, total, rtol=1e-5)


def test_the_loss_of_unpacked_windows_is_the_sum_over_their_tokens(texts: Path) -> None:
    settings = {**vars(GPT), "data": texts, "packing": False}
    task = GPTRecipe(**settings).task()
    apply = apply_of(GPT)
    tokens = rows_of(task.validation)["tokens"]
    loss, _ = task.loss_fn(task.params, {"tokens": tokens}, None)
    losses = cross_entropy(apply(task.params, tokens[:, :-1]), jnp.asarray(tokens[:, 1:]))
    np.testing.assert_allclose(loss.total, losses.sum(), rtol=1e-5)
    assert float(loss.weight) == tokens[:, 1:].size


def test_the_rows_of_a_table_are_packed(write_table) -> None:
    path = write_table({"body": [f"text {i}" for i in range(40)]})
    task = LlamaRecipe(**{**vars(LLAMA), "data": path, "text_column": "body", "packing": False}).task()
    rows = rows_of(task.train)
    found = sorted(
        bytes(rows["tokens"][r][rows["segments"][r] == s].tolist())
        for r in range(len(rows["tokens"]))
        for s in range(1, rows["segments"][r].max() + 1)
    )
    assert len(found) == 36
    assert all(text.startswith(b"text") for text in found)
    held_out = rows_of(task.validation)
    assert task.references["unigram entropy"] == unigram_entropy(held_out["targets"][held_out["segments"] > 0])
    for name, bound in task.bounds.items():
        assert rows[name].max() < bound


def test_the_vocabulary_is_that_of_the_tokenizer(texts: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.train_from_iterator(["abcdefghijklmnopqrstuvwxyz def "], tokenizers.trainers.BpeTrainer(vocab_size=40))
    made.save(str(tmp_path / "tokenizer.json"))
    settings = {**vars(GPT), "data": texts, "seq_len": 5}
    task = GPTRecipe(**settings | {"tokenizer": tmp_path / "tokenizer.json"}).task()
    assert task.classes == made.get_vocab_size() == task.params["wte"].shape[0]
    assert rows_of(task.train)["tokens"].max() < task.classes
    assert GPTRecipe(**settings).task().classes == 256


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (
            LlamaRecipe(hidden_size=10, num_attention_heads=4),
            "hidden_size 10 is not divisible by 2 × num_att",
        ),
        (LlamaRecipe(num_key_value_heads=3), "num_attention_heads 4 is not divisible by num_key_value_heads 3"),
        (GPTRecipe(n_embd=10), "n_embd 10 is not divisible by n_head 4"),
    ],
)
def test_invalid_sizes_are_named(recipe: LanguageRecipe, message: str) -> None:
    with pytest.raises(UserError, match=message):
        recipe.model(256)
