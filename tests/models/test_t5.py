"""T5 equals `transformers`' in cases that training on padded sentences (`parity run t5`) does not cover."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from transformers.models.t5.modeling_t5 import T5Attention

import jaxtrain as jt
from jaxtrain.losses import cross_entropy
from jaxtrain.models import T5, T5Config, functional
from jaxtrain.models.t5 import from_hf, shift_right, to_hf, torch_names
from jaxtrain.models.t5.relative_position import relative_position_bucket
from parity.oracle.in_torch import InFloat64
from tests.models.programs import assert_float64_throughout

CONFIG = T5Config(
    vocab_size=31, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_decoder_layers=2, num_heads=2, dropout=0.25
)
GATED = dataclasses.replace(CONFIG, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
RNG = np.random.default_rng(0)
TOKENS, DECODER_TOKENS = RNG.integers(2, 31, size=(3, 9)), RNG.integers(2, 31, size=(3, 7))


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (16, 64), (8, 20), (32, 256), (4, 3)])
def test_buckets_of_distances_equal_transformers(bidirectional, buckets, distance):
    distances = np.arange(-1500, 1500)
    expected = T5Attention._relative_position_bucket(torch.tensor(distances), bidirectional, buckets, distance)
    ours = relative_position_bucket(distances, bidirectional=bidirectional, num_buckets=buckets, max_distance=distance)
    np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize("side", ["right", "left"])
def test_logits_with_padding_on_either_side_equal_transformers(side):
    """Labels are never padded on the left; there the decoder has fully masked rows."""
    torch.manual_seed(0)
    theirs = transformers.T5ForConditionalGeneration(transformers.T5Config(**to_hf(CONFIG))).double().eval()
    lengths, decoder_lengths = np.array([9, 4, 6]), np.array([7, 3, 5])
    place, decoder_place = np.arange(9)[None], np.arange(7)[None]
    if side == "left":
        place, decoder_place = place[:, ::-1], decoder_place[:, ::-1]
    mask, decoder_mask = place < lengths[:, None], decoder_place < decoder_lengths[:, None]
    with torch.no_grad(), InFloat64():
        expected = theirs(
            torch.tensor(TOKENS),
            attention_mask=torch.tensor(mask),
            decoder_input_ids=torch.tensor(DECODER_TOKENS),
            decoder_attention_mask=torch.tensor(decoder_mask),
        ).logits.numpy()
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        apply, like = functional(nnx.eval_shape(lambda: T5(CONFIG, rngs=nnx.Rngs(0))))
        params = torch_names(CONFIG).to_jax({n: x.numpy() for n, x in theirs.state_dict().items()}, like)
        ours = jax.jit(apply)(params, TOKENS, DECODER_TOKENS, mask, decoder_mask)
        padded = np.where(mask, TOKENS, 0)
        again = jax.jit(apply)(params, padded, np.where(decoder_mask, DECODER_TOKENS, 0), mask, decoder_mask)
    np.testing.assert_allclose(ours[decoder_mask], expected[decoder_mask], rtol=0, atol=1e-12 * np.abs(expected).max())
    np.testing.assert_array_equal(again[decoder_mask], ours[decoder_mask])


def test_shift_right_equals_transformers():
    config = dataclasses.replace(CONFIG, decoder_start_token_id=3, pad_token_id=2)
    labels = np.array([[5, 6, 1], [7, -100, -100]])
    theirs = transformers.T5ForConditionalGeneration(transformers.T5Config(**to_hf(config)))
    expected = theirs.prepare_decoder_input_ids_from_labels(torch.tensor(labels))
    np.testing.assert_array_equal(shift_right(jnp.asarray(labels, jnp.int32), config), expected)


def test_the_decoder_is_causal_and_attends_to_the_whole_source():
    apply, params = functional(T5(CONFIG, rngs=nnx.Rngs(0)))
    logits = jax.jit(apply)
    changed = DECODER_TOKENS.copy()
    changed[:, 4:] = 1
    a, b = (np.asarray(logits(params, TOKENS, x)) for x in (DECODER_TOKENS, changed))
    np.testing.assert_array_equal(a[:, :4], b[:, :4])
    assert not np.array_equal(a[:, 4:], b[:, 4:])
    source = TOKENS.copy()
    source[:, -1] = 1
    assert (np.asarray(logits(params, source, DECODER_TOKENS)) != a).any(-1).all()


def test_dropout_is_determined_by_the_key():
    apply, params = functional(T5(GATED, rngs=nnx.Rngs(0)))
    logits = jax.jit(apply)
    one, again, other = (logits(params, TOKENS, DECODER_TOKENS, None, None, jax.random.key(k)) for k in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one, other)


def test_every_dropout_in_every_layer_has_a_separate_mask(drawn_masks):
    apply, params = functional(T5(CONFIG, rngs=nnx.Rngs(0)))
    with jax.disable_jit():
        apply(params, TOKENS, DECODER_TOKENS, None, None, jax.random.key(0))
    # Before and after each stack; four in the encoder's layer, six in each of the decoder's two.
    keys = [key for key, _ in drawn_masks]
    assert len(keys) == len(set(keys)) == 2 * 2 + 4 + 2 * 6


def test_float64_stays_float64_throughout():
    apply, params = functional(T5(GATED, rngs=nnx.Rngs(0)))

    def loss(params, rng):
        logits = apply(params, TOKENS, DECODER_TOKENS, TOKENS > 5, DECODER_TOKENS > 5, rng)
        return cross_entropy(logits, DECODER_TOKENS).sum()

    assert_float64_throughout(jax.value_and_grad(loss), params, jax.random.key(0))


@pytest.mark.parametrize("config", [CONFIG, GATED])
def test_configs_round_trip_through_transformers(config):
    theirs = transformers.T5Config(**to_hf(config))
    assert from_hf(to_hf(config)) == config
    assert from_hf(theirs.to_dict()) == config
    assert theirs.scale_decoder_outputs == config.tie_word_embeddings


def test_missing_fields_of_a_configuration_have_transformers_defaults():
    assert from_hf({}) == dataclasses.replace(T5Config(), dropout=0.1)
    assert from_hf({"num_layers": 3}).num_decoder_layers == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"feed_forward_proj": "gated-silu"}, "feed_forward_proj must be one of relu, gated-gelu, got 'gated-silu'"),
        ({"dense_act_fn": "gelu_new"}, "dense_act_fn 'gelu_new' is not supported: only 'relu' is"),
        ({"feed_forward_proj": "gated-gelu", "is_gated_act": False}, "is_gated_act False is not supported"),
        ({"is_causal": False}, "is_causal False is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config {'bits': 4} is not supported"),
    ],
)
def test_an_unsupported_configuration_is_refused(changes, message):
    with pytest.raises(jt.UserError, match=message):
        from_hf(changes)
