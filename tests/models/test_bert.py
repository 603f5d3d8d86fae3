"""BERT: padding, order of tokens, both heads, and conversion of the config.json of `transformers`."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.models import functional
from jaxtrain.models.bert import Bert, BertConfig, Embeddings, from_hf, to_hf, torch_names
from tests.models.programs import assert_float64_throughout, enlarged

CONFIG = BertConfig(
    vocab_size=11,
    hidden_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=12,
    hidden_dropout_prob=0.25,
    attention_probs_dropout_prob=0.25,
    max_position_embeddings=8,
)
TOKENS = np.random.default_rng(0).integers(1, 11, size=(3, 6)).astype(np.int32)
ONES = np.ones_like(TOKENS)


def model(**changes):
    return enlarged(Bert(dataclasses.replace(CONFIG, **changes), rngs=nnx.Rngs(0)))


def test_tokens_give_logits_of_either_head_and_blocks_are_stacked():
    apply, params = model()
    assert apply(params, TOKENS).shape == (3, 6, 11)
    assert params["blocks"]["intermediate"]["kernel"].shape == (2, 8, 12)
    classify, params = model(num_labels=5)
    assert classify(params, TOKENS).shape == (3, 5)
    first, second = params["blocks"]["attention"]["query"]["kernel"]
    assert not np.array_equal(first, second)


def test_padding_does_not_change_the_logits_of_other_tokens():
    apply, params = model()
    mask = np.array([[1, 1, 1, 1, 0, 0]] * 3)
    changed = TOKENS.copy()
    changed[:, 4:] = 0
    plain = apply(params, TOKENS[:, :4])
    for tokens in (TOKENS, changed):
        padded = apply(params, tokens, mask)[:, :4]
        np.testing.assert_allclose(padded, plain, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(apply(params, TOKENS, mask), apply(params, TOKENS, mask.astype(bool)))
    assert np.abs(apply(params, TOKENS)[:, :4] - plain).max() > 1e-2


def test_a_token_changes_every_logit_of_its_row_and_no_other_row():
    apply, params = model()
    changed = TOKENS.copy()
    changed[1, 5] = changed[1, 5] % 10 + 1
    before, after = apply(params, TOKENS), apply(params, changed)
    assert (np.abs(after - before)[1].max(axis=-1) > 0).all()
    np.testing.assert_array_equal(after[::2], before[::2])


def test_token_types_change_logits_and_default_to_zero():
    apply, params = model()
    np.testing.assert_array_equal(apply(params, TOKENS), apply(params, TOKENS, None, 0 * ONES))
    assert not np.array_equal(apply(params, TOKENS), apply(params, TOKENS, None, ONES))


@pytest.mark.parametrize("pad_token_id", [0, None])
def test_the_embedding_of_an_input_gets_a_gradient_unless_it_is_padding(pad_token_id):
    config = dataclasses.replace(CONFIG, pad_token_id=pad_token_id)
    apply, params = functional(Embeddings(config, rngs=nnx.Rngs(0)))
    tokens, weights = np.array([[0, 3, 0, 5]]), np.arange(8.0, dtype=np.float32)[None, None]
    gradient = jax.jit(jax.grad(lambda params: (apply(params, tokens, 0 * tokens, None) * weights).sum()))(params)
    assert np.flatnonzero(np.abs(gradient["word"]).sum(axis=1)).tolist() == ([3, 5] if pad_token_id == 0 else [0, 3, 5])


def test_the_padding_embedding_is_zero_and_has_a_gradient_only_as_a_target():
    tokens = TOKENS.copy()
    tokens[:, 0] = 0
    for changes, learns in ({"num_labels": 3}, False), ({}, True), ({"num_labels": 3, "pad_token_id": None}, True):
        apply, params = model(**changes)
        assert params["embeddings"]["word"][0].any() == (changes.get("pad_token_id", 0) is None)
        gradient = jax.grad(lambda params, apply=apply: ((apply(params, tokens) + 1) ** 2).sum())(params)
        assert gradient["embeddings"]["word"][0].any() == learns
        assert gradient["embeddings"]["word"][tokens[0, 1]].any()


def test_dropout_is_applied_only_with_a_key():
    apply, params = model(num_labels=3)
    one, again, other = (apply(params, TOKENS, None, None, jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one, other)
    plain, _ = model(num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    np.testing.assert_array_equal(apply(params, TOKENS), plain(params, TOKENS, None, None, jax.random.key(0)))
    # The classifier's rate is hidden_dropout_prob unless it is specified.
    own, _ = model(num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout=0.5)
    assert not np.array_equal(own(params, TOKENS, None, None, jax.random.key(0)), own(params, TOKENS))


def test_float64_stays_float64_throughout():
    apply, params = model()

    def loss(params, rng):
        return (apply(params, TOKENS, ONES, ONES, rng) ** 2).sum()

    assert_float64_throughout(jax.value_and_grad(loss), params, jax.random.key(0))


@pytest.mark.parametrize("num_labels", [None, 3])
def test_names_and_configuration_equal_transformers(num_labels):
    config = dataclasses.replace(CONFIG, num_labels=num_labels, pad_token_id=3)
    written = json.loads(json.dumps(to_hf(config)))
    theirs = getattr(transformers, written["architectures"][0])(transformers.BertConfig(**written)).eval()
    apply, like = functional(Bert(config, rngs=nnx.Rngs(0)))
    names = torch_names(config)
    assert names.torch_order(like) == [name for name, _ in theirs.named_parameters()]
    assert from_hf(theirs.config.to_dict() | {"architectures": written["architectures"]}) == config
    tensors = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    mask = np.array([[1, 1, 1, 1, 0, 0], [1] * 6, [1] * 6])
    with torch.no_grad():
        expected = theirs(torch.tensor(TOKENS), attention_mask=torch.tensor(mask), token_type_ids=torch.tensor(ONES))
    ours = apply(names.to_jax(tensors, like=like), TOKENS, mask, ONES)
    np.testing.assert_allclose(ours, expected.logits, rtol=1e-4, atol=1e-6)


def test_initial_weights_are_drawn_as_transformers_draws_them():
    config = dataclasses.replace(CONFIG, hidden_size=64, vocab_size=500, intermediate_size=256)
    theirs = dict(transformers.BertForMaskedLM(transformers.BertConfig(**to_hf(config))).named_parameters())
    ours = torch_names(config).to_torch(functional(Bert(config, rngs=nnx.Rngs(0)))[1])
    for name, tensor in theirs.items():
        expected = tensor.detach().numpy()
        # The sample standard deviation of more than a thousand draws is within a tenth.
        assert ours[name].std() == pytest.approx(expected.std(), rel=0.1 if expected.size > 1000 else 0.5), name
        if expected.std() == 0:
            np.testing.assert_array_equal(ours[name], expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu_new"}, "hidden_act 'gelu_new'"),
        ({"is_decoder": True}, "is_decoder True"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        ({"architectures": ["BertForQuestionAnswering"]}, "'BertForQuestionAnswering'"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings False"),
        ({"model_type": "roberta"}, "model_type 'roberta'"),
    ],
)
def test_an_unsupported_configuration_is_refused(change, message):
    with pytest.raises(UserError, match=message):
        from_hf(to_hf(CONFIG) | change)


def test_more_tokens_than_positions_are_refused():
    apply, params = functional(Bert(CONFIG, rngs=nnx.Rngs(0)))
    with pytest.raises(UserError, match="9 tokens exceed max_position_embeddings 8"):
        apply(params, jnp.ones((1, 9), int))
