"""GPT-2 is causal, deterministic without a key, and computes in float64 with float64 parameters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxtrain import autocast
from jaxtrain.errors import UserError
from jaxtrain.losses import cross_entropy
from jaxtrain.models import GPT2, GPT2Config, functional
from jaxtrain.models.gpt2 import _dropout, torch_names
from tests.models.programs import assert_float64_throughout, enlarged, widened

CONFIG = GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2, dropout=0.25)
TOKENS = np.random.default_rng(0).integers(0, 11, size=(3, 6)).astype(np.int32)


def model(**changes):
    return enlarged(GPT2(dataclasses.replace(CONFIG, **changes), rngs=nnx.Rngs(0)))


def test_tokens_give_logits_and_blocks_are_stacked():
    apply, params = model(n_layer=3)
    assert apply(params, TOKENS).shape == (3, 6, 11)
    assert params["blocks"]["qkv"]["kernel"].shape == (3, 8, 24)
    assert params["blocks"]["fc"]["bias"].shape == (3, 32)
    assert params["wte"].shape == (11, 8)
    assert params["wpe"].shape == (8, 8)


def test_layers_have_different_initial_weights():
    _, params = model()
    first, second = params["blocks"]["qkv"]["kernel"]
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("position", range(6))
def test_a_token_changes_only_its_own_and_later_logits(position):
    apply, params = model()
    changed = TOKENS.copy()
    changed[:, position] = (changed[:, position] + 1) % 11
    before, after = apply(params, TOKENS), apply(params, changed)
    np.testing.assert_array_equal(after[:, :position], before[:, :position])
    # This position and all later ones attend to it.
    assert (np.abs(after - before)[:, position:].max(axis=-1) > 0).all()


def test_rows_of_a_batch_are_independent():
    apply, params = model()
    changed = TOKENS.copy()
    changed[1] = (changed[1] + 1) % 11
    before, after = apply(params, TOKENS), apply(params, changed)
    np.testing.assert_array_equal(after[::2], before[::2])


def test_without_a_key_there_is_no_dropout():
    apply, params = model()
    plain, _ = model(dropout=0.0)
    np.testing.assert_array_equal(apply(params, TOKENS), apply(params, TOKENS))
    np.testing.assert_array_equal(apply(params, TOKENS), plain(params, TOKENS))
    np.testing.assert_array_equal(plain(params, TOKENS, jax.random.key(0)), plain(params, TOKENS))


def test_dropout_is_determined_by_the_key():
    apply, params = model()
    one, again, other = (apply(params, TOKENS, jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one, other)
    assert not np.array_equal(one, apply(params, TOKENS))


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_drops_at_its_rate_and_keeps_the_mean(rate):
    n = 1_000_000
    dropped = np.asarray(_dropout(jnp.ones(n), rate, jax.random.key(0)))
    assert set(np.unique(dropped)) == {np.float32(0), np.float32(1 / (1 - rate))}
    # Five standard deviations of a binomial.
    assert abs((dropped == 0).mean() - rate) < 5 * np.sqrt(rate * (1 - rate) / n)


def test_every_dropout_in_every_layer_has_a_separate_mask(drawn_masks):
    apply, params = functional(GPT2(CONFIG, rngs=nnx.Rngs(0)))
    with jax.disable_jit():
        apply(params, TOKENS, jax.random.key(0))
    # The embedding; in each of the two layers the attention weights, the attention's output and the MLP's.
    hidden, weights = (3, 6, 8), (3, 2, 6, 6)
    keys, shapes = zip(*drawn_masks, strict=True)
    assert shapes == (hidden, *[weights, hidden, hidden] * 2)
    assert len(set(keys)) == 7


def test_float64_stays_float64_throughout():
    apply, params = model()

    def loss(params, rng):
        return cross_entropy(apply(params, TOKENS[:, :-1], rng), TOKENS[:, 1:]).sum()

    assert_float64_throughout(jax.value_and_grad(loss), params, jax.random.key(0))


def test_packed_sequences_equal_separate_sequences():
    apply, params = model()
    segments, positions = np.array([[1, 1, 1, 1, 2, 2]] * 3), np.array([[0, 1, 2, 3, 0, 1]] * 3)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        params = widened(params)
        packed = apply(params, TOKENS, None, positions, segments)
        alone = [apply(params, TOKENS[:, part]) for part in (slice(0, 4), slice(4, 6))]
    np.testing.assert_allclose(packed, np.concatenate(alone, axis=1), rtol=0, atol=1e-13)


def test_more_tokens_than_positions_are_refused():
    apply, params = functional(GPT2(CONFIG, rngs=nnx.Rngs(0)))
    with pytest.raises(UserError, match="9 tokens exceed n_positions 8"):
        apply(params, np.zeros((1, 9), np.int32))


def test_torch_names_cover_every_parameter():
    _, params = model()
    tensors = torch_names().to_torch(params)
    # Twelve tensors per layer, two embeddings, and the scale and bias of the last norm.
    assert len(tensors) == 2 * 12 + 4
    assert tensors["transformer.h.1.attn.c_attn.weight"].shape == (8, 24)
    back = torch_names().to_jax({**tensors, "lm_head.weight": tensors["transformer.wte.weight"]}, like=params)
    jax.tree.map(np.testing.assert_array_equal, back, params)


def test_under_autocast_a_block_keeps_its_activations_in_low_precision_and_two_of_the_residual_stream():
    apply, params = model(dropout=0.0)
    pull = jax.eval_shape(lambda p: jax.vjp(autocast(lambda p: apply(p, TOKENS), jnp.bfloat16), p)[1], params)
    stacked = [x for x in jax.tree.leaves(pull) if x.shape[:1] == (2,) and x.size > 2 * 3 * 6]  # of two layers
    activations = [x for x in stacked if x.shape[1:3] == (3, 6) or x.shape[1] == 18]
    wide = [x.shape for x in activations if x.dtype == np.float32]
    assert {x.dtype for x in activations if x.shape[-1] == 32} == {jnp.dtype(jnp.bfloat16)}
    assert wide == [(2, 3, 6, 8)] * 2
