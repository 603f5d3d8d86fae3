"""Generated texts and sampling equal transformers, the cache does not change logits, and every token costs the same."""

import contextlib
import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax.extend.core import jaxpr_as_fun
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from jaxtrain.cost.flops import flops
from jaxtrain.errors import UserError
from jaxtrain.models import GPT2, T5, GPT2Config, T5Config, functional, generation, gpt2, llama, mixtral, t5
from jaxtrain.models.generation import Sampling, generate, stream
from jaxtrain.models.llama import Llama
from jaxtrain.models.mixtral import Mixtral
from jaxtrain.program.equations import visit
from parity.cases.built_in import gpt2_case, llama_case, mixtral_case, t5_case, token_batches
from parity.oracle.in_torch import InFloat64
from tests.models.programs import widened

GPT2_CONFIG = GPT2Config(vocab_size=61, n_positions=96, n_embd=32, n_layer=2, n_head=4)
# transformers itself cannot generate with the router's logits.
MIXTRAL = dataclasses.replace(mixtral_case.CONFIG, output_router_logits=False, max_position_embeddings=96)
LONGER = {"max_position_embeddings": 96}
PROMPTS = np.random.default_rng(0).integers(61, size=(3, 9))
MASK = np.arange(9)[None] >= np.array([[0], [3], [6]])
NEW = 64


KINDS = {
    GPT2Config: (GPT2, gpt2),
    llama.LlamaConfig: (Llama, llama),
    mixtral.MixtralConfig: (Mixtral, mixtral),
    T5Config: (T5, t5),
}


@functools.cache
def made(config):
    """Return (our model, PyTorch's, PyTorch's parameters in our layout)."""
    kind, module = KINDS[type(config)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if module in (gpt2, t5):
            theirs = (gpt2_case if module is gpt2 else t5_case)._torch_model(config)
        else:
            # Only the eager experts of transformers support float64.
            theirs = token_batches.torch_model({**module.to_hf(config), "experts_implementation": "eager"})
        with torch.no_grad():
            for p in theirs.parameters():
                # As large as in training, so that texts do not repeat one token.
                p.mul_(3 if p.ndim > 1 else 1)
            if module is t5:
                # A tied output layer prefers its input token, less so with a random norm before it.
                theirs.shared.weight.div_(3)
                theirs.decoder.final_layer_norm.weight.normal_()
    model = nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0)))
    _, like = functional(model)
    params = module.torch_names(config).to_jax({k: v.numpy() for k, v in theirs.state_dict().items()}, like=like)
    return model, theirs.eval(), params


DECODERS = {
    "gpt2": GPT2_CONFIG,
    "llama": dataclasses.replace(llama_case.LLAMA, **LONGER),
    "qwen3": dataclasses.replace(llama_case.QWEN3, **LONGER),
    "mistral": dataclasses.replace(llama_case.MISTRAL, **LONGER),
    "qwen2": dataclasses.replace(llama_case.LLAMA, **LONGER, model_type="qwen2"),
    "qwen3-by-layer": dataclasses.replace(
        llama_case.QWEN3, **LONGER, sliding_window=7, layer_types=("full_attention", "sliding_attention")
    ),
    "smollm3": dataclasses.replace(
        llama_case.LLAMA, **LONGER, model_type="smollm3", sliding_window=7,
        layer_types=("full_attention", "sliding_attention"), no_rope_layers=(1, 0),
    ),
    "mixtral": MIXTRAL,
}  # fmt: skip


def torchs_text(theirs, mask=MASK, **options):
    options = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": None, **options}
    tokens, mask = torch.from_numpy(PROMPTS), torch.from_numpy(mask).long()
    with InFloat64() if theirs.dtype == torch.float64 else contextlib.nullcontext():
        text = theirs.generate(tokens, attention_mask=mask, **options).numpy()
    # A decoder's output begins with the prompt, a T5's with its start token.
    return text[:, 1 if theirs.config.is_encoder_decoder else PROMPTS.shape[1] :]


@pytest.mark.parametrize("name", DECODERS)
def test_greedy_texts_of_uneven_prompts_equal_transformers_in_float32_and_float64(name, monkeypatch):
    monkeypatch.setattr(generation, "_BLOCK", 48)  # the cache grows once
    model, theirs, params = made(DECODERS[name])
    ours = np.asarray(generate(model, params, PROMPTS, NEW, mask=MASK))
    np.testing.assert_array_equal(ours, torchs_text(theirs))
    assert max(len(set(row)) for row in ours.tolist()) > 8, "a text that repeats itself shows little"
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        ours = np.asarray(generate(model, widened(params), PROMPTS, NEW, mask=MASK))
    np.testing.assert_array_equal(ours, torchs_text(copy.deepcopy(theirs).double()))


T5S = {
    # The decoder is not deeper than the encoder: transformers sizes its cache by the encoder's layers.
    "t5": dataclasses.replace(t5_case.CONFIG, vocab_size=61, num_layers=3, num_decoder_layers=2),
    "gated": dataclasses.replace(
        t5_case.CONFIG, vocab_size=61, feed_forward_proj="gated-gelu", tie_word_embeddings=False,
        # Distances of a text of 64 tokens fall into all buckets, and beyond.
        relative_attention_num_buckets=32, relative_attention_max_distance=50, decoder_start_token_id=7,
    ),
}  # fmt: skip
SCATTERED = np.random.default_rng(3).random(PROMPTS.shape) > 0.3


@pytest.mark.parametrize("mask", [MASK, MASK[:, ::-1].copy(), SCATTERED], ids=["left", "right", "scattered"])
@pytest.mark.parametrize("name", T5S)
def test_greedy_answers_to_uneven_sources_equal_transformers_in_float32_and_float64(name, mask):
    model, theirs, params = made(T5S[name])
    lengths = {"stop": 1, "min_new_tokens": NEW}
    expected = {"eos_token_id": 1, "min_new_tokens": NEW, "mask": mask}
    ours = np.asarray(generate(model, params, PROMPTS, NEW, mask=mask, **lengths))
    np.testing.assert_array_equal(ours, torchs_text(theirs, **expected))
    assert max(len(set(row)) for row in ours.tolist()) > 5, "a text that repeats itself shows little"
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        ours = np.asarray(generate(model, widened(params), PROMPTS, NEW, mask=mask, **lengths))
    np.testing.assert_array_equal(ours, torchs_text(copy.deepcopy(theirs).double(), **expected))


@pytest.mark.parametrize("name", T5S)
def test_answers_decoded_in_pieces_have_the_logits_of_one_pass(name):
    model, _, params = made(T5S[name])
    apply, _ = functional(model)
    answer = np.random.default_rng(1).integers(61, size=(3, 12))

    @jax.jit
    def piece_by_piece(params):
        model_ = nnx.merge(nnx.split(model)[0], params)
        cache = model_.init_cache(model_.encode(PROMPTS, MASK), MASK, 14)
        pieces = []
        for part in (slice(0, 4), slice(4, 5), slice(5, 12)):
            logits, cache = model_.decode_cached(answer[:, part], cache)
            pieces.append(logits)
        return jnp.concatenate(pieces, axis=1), cache.tokens.length

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        whole = jax.jit(apply)(widened(params), PROMPTS, answer, MASK)
        logits, length = piece_by_piece(widened(params))
    np.testing.assert_allclose(logits, whole, rtol=0, atol=1e-12 * np.abs(whole).max())
    assert int(length) == 12


def flops_of_a_token(name, prompt, new_tokens):
    """Return the FLOPs of one iteration of the program's only loop."""
    config = {**DECODERS, **T5S}[name]
    model, _, params = made(config)
    tokens = np.zeros((1, prompt), np.int32)
    traced = jax.make_jaxpr(lambda params: generate(model, params, tokens, new_tokens))(params)
    (loop,) = [eqn for eqn in visit(traced.jaxpr) if eqn.primitive.name == "while"]
    body = loop.params["body_jaxpr"]
    return flops(jaxpr_as_fun(body), *body.in_avals)


@pytest.mark.parametrize(
    ("name", "width", "weights", "slots"),
    [
        ("gpt2", 32, 12 * 32**2, 3 + 4 - 1),
        ("llama", 32, 2 * 32**2 + 2 * 32 * 16 + 3 * 32 * 48, 3 + 4 - 1),
        # The source's keys and values are cached: their two weights are not used again.
        ("t5", 16, 6 * 16**2 + 2 * 16 * 24, 3 + 4),
    ],
)
def test_the_flops_of_a_token_depend_only_on_the_cache_size(name, width, weights, slots):
    layers, vocabulary = 2, 61
    short, longer, later = (flops_of_a_token(name, *lengths) for lengths in ((3, 4), (3, 24), (23, 4)))
    # Queries by keys, and weights by values; a multiplication and an addition each.
    attention_flops = 2 * 2 * width
    assert short == layers * (2 * weights + slots * attention_flops) + 2 * vocabulary * width
    assert longer == later == short + layers * 20 * attention_flops


@pytest.mark.parametrize("name", ["smollm3", "mistral"])
def test_padded_tokens_read_in_pieces_have_the_logits_that_each_row_has_alone(name):
    model, _, params = made(DECODERS[name])
    total, padding = 290, np.array([0, 3, 200])
    tokens = np.random.default_rng(2).integers(61, size=(3, total))
    real = np.arange(total)[None] >= padding[:, None]

    @jax.jit
    def in_pieces(params):
        decoder = nnx.merge(nnx.split(model)[0], params)
        cache, pieces, start = decoder.empty_cache(3, 0), [], 0
        # One long prompt; pieces that wrap around the ring, and are longer than it.
        for size, slots in ((260, 262), (1, 262), (1, total), (5, total), (1, total), (22, total)):
            part = slice(start, start + size)
            positions = np.maximum(np.arange(total)[None] - padding[:, None], 0)[:, part]
            logits, cache = decoder(tokens[:, part], None, positions, real[:, part].astype(np.int32), cache)
            cache = cache.resized(decoder.empty_cache(3, slots))
            pieces.append(logits)
            start += size
        return jnp.concatenate(pieces, axis=1), cache

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        params = widened(params)
        found, cache = in_pieces(params)
        # What follows a row does not change its logits.
        alone = [np.roll(row, -n) for row, n in zip(tokens, padding, strict=True)]
        expected = jax.jit(functional(model)[0])(params, np.stack(alone))
    for row, n in enumerate(padding):
        np.testing.assert_allclose(found[row, n:], expected[row, : total - n], rtol=0, atol=1e-12)
    assert int(cache.length) == total
    assert cache.sliding.k.shape[2] == DECODERS[name].sliding_window


def test_layers_cache_what_they_attend_to():
    slots = {"llama": [4096, 4096], "mistral": [128, 128], "smollm3": [4096, 128]}
    for name, expected in slots.items():
        config = dataclasses.replace(DECODERS[name], sliding_window=None if name == "llama" else 128)
        cache = jax.eval_shape(lambda config=config: Llama(config, rngs=nnx.Rngs(0)).empty_cache(3, 4096))
        width = config.num_key_value_heads * config.head_dim
        assert sum(x.size for x in jax.tree.leaves(cache) if x.ndim > 2) == 2 * 3 * width * sum(expected)


def test_long_sequences_of_mixed_layers_have_no_array_of_queries_by_keys():
    model, _, params = made(DECODERS["smollm3"])
    tokens, apply, left = np.zeros((1, 300), np.int32), functional(model)[0], np.arange(300)[None] > 7
    train = jax.grad(lambda params: apply(params, tokens, None, None, tokens).sum())
    texts = [functools.partial(generate, model, prompts=tokens, new_tokens=3, mask=mask) for mask in (None, left)]
    for program in (train, *texts):
        found = list(visit(jax.make_jaxpr(program)(params).jaxpr))
        shapes = {getattr(v.aval, "shape", ()) for eqn in found for v in (*eqn.invars, *eqn.outvars)}
        assert not [shape for shape in shapes if sum(size >= 300 for size in shape) > 1]
        # Of a prompt, only the last logits are computed.
        assert ((1, 300, 61) in shapes) == (program is train)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_text_ends_at_the_stop_token_and_is_padded_after_it(name):
    model, theirs, params = made({**DECODERS, **T5S}[name])
    stop = int(generate(model, params, PROMPTS, 8, mask=MASK)[1, 4])
    for options in ({}, {"min_new_tokens": 20}):
        ours = np.asarray(generate(model, params, PROMPTS, NEW, mask=MASK, stop=stop, pad=7, **options))
        expected = torchs_text(theirs, eos_token_id=stop, pad_token_id=7, **options)
        # transformers cuts all texts where the longest ends.
        np.testing.assert_array_equal(ours[:, : expected.shape[1]], expected)
        assert (ours[:, expected.shape[1] :] == 7).all()
        assert (ours[1, 5:] == 7).all() == (not options)
        assert stop not in ours[:, : options.get("min_new_tokens", 0)]


SAMPLINGS = [
    Sampling(0.7), Sampling(1.0, top_k=4), Sampling(1.3, top_p=0.8), Sampling(0.9, top_k=10, top_p=0.6),
    Sampling(1.0, top_p=0.01), Sampling(1.0, top_p=1e-9), Sampling(2.0, top_k=100, top_p=1.0),
]  # fmt: skip


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_scores_equal_transformers(sampling):
    logits = np.random.default_rng(1).standard_normal((5, 31)).astype(np.float32) * 2
    logits[0, :6] = 4.0
    expected = torch.from_numpy(logits)
    warpers = [TemperatureLogitsWarper(sampling.temperature)] if sampling.temperature != 1 else []
    warpers += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    warpers += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p else []
    for warper in warpers:
        expected = warper(None, expected)
    ours = np.asarray(sampling.scores(logits))
    kept, theirs = np.isfinite(ours), np.isfinite(expected.numpy())
    # Among equal logits at the cutoff, either may be removed.
    np.testing.assert_array_equal(kept.sum(axis=1), theirs.sum(axis=1))
    np.testing.assert_array_equal(kept[1:], theirs[1:])
    np.testing.assert_allclose(ours[kept & theirs], expected.numpy()[kept & theirs], rtol=1e-6)


def test_tokens_are_drawn_with_their_probabilities():
    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05]], np.float32))
    n = 20_000
    sampling = Sampling(temperature=1.0, top_k=3)
    drawn = np.bincount(sampling.choose(np.repeat(logits, n, axis=0), jax.random.key(0)), minlength=4) / n
    expected = np.array([0.5, 0.3, 0.15, 0]) / 0.95
    # Five standard deviations of a binomial.
    assert (np.abs(drawn - expected) <= 5 * np.sqrt(expected * (1 - expected) / n)).all()


def test_texts_depend_on_the_seed_and_a_second_call_compiles_nothing():
    model, _, params = made(DECODERS["gpt2"])
    sampling = Sampling(temperature=1.0)
    one, again, other = (np.asarray(generate(model, params, PROMPTS, 8, sampling=sampling, seed=s)) for s in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one, other)
    compiled = generation._generate._cache_size()
    other_model = nnx.eval_shape(lambda: GPT2(GPT2_CONFIG, rngs=nnx.Rngs(1)))
    generate(other_model, jax.tree.map(lambda p: p + 1, params), PROMPTS + 1, 8, sampling=sampling)
    assert generation._generate._cache_size() == compiled
    greedy = generate(model, params, PROMPTS, 8)
    np.testing.assert_array_equal(generate(model, params, PROMPTS, 8, sampling=Sampling(1.0, top_k=1)), greedy)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": ~MASK}, "prompt 0 must be padded on the left only"),
        ({"mask": MASK[:, ::-1]}, "prompt 1 must be padded on the left only"),
        ({"mask": MASK[:2]}, r"mask must have the shape of the prompts, \[3, 9\], got \[2, 9\]"),
        ({"prompts": PROMPTS[0]}, r"prompts must be \[rows, tokens\] with at least one token, got shape \[9\]"),
        ({"new_tokens": 0}, "new_tokens must be at least 1, got 0"),
        ({"new_tokens": 89}, "97 tokens exceed n_positions 96"),
    ],
)
def test_invalid_arguments_of_generate_are_refused(options, message):
    model, _, params = made(GPT2_CONFIG)
    with pytest.raises(UserError, match=message):
        generate(model, params, **{"prompts": PROMPTS, "new_tokens": 2, **options})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1.0}, r"temperature must be at least 0, got -1\.0"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0\.0"),
    ],
)
def test_invalid_sampling_parameters_are_refused(values, message):
    with pytest.raises(UserError, match=message):
        Sampling(**values)


def window_of(i, prompt, context):
    """Return the number of tokens that the i-th token of a stream is computed from."""
    size = min(prompt, context)
    for _ in range(i):
        size = size + 1 if size < context else max(context // 2, 1)
    return size


def by_full_passes(model, params, prompt, new_tokens, context):
    """Return the tokens of a stream drawn at temperature 1, each by a forward pass over its whole window."""
    apply, _ = functional(model)
    apply, text, window = jax.jit(apply), list(prompt), np.zeros((1, context), np.int32)
    for i in range(new_tokens):
        size = window_of(i, len(prompt), context)
        window[0, :size] = text[-size:]
        logits = apply(params, window)[:, size - 1]
        text.append(int(DRAWN.choose(logits, jax.random.fold_in(jax.random.key(1), i))[0]))
    return text[len(prompt) :]


DRAWN = Sampling(temperature=1.0)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral"])
def test_a_stream_has_the_tokens_of_generate(name):
    model, _, params = made(DECODERS[name])
    for sampling, seed in ((generation.GREEDY, 0), (Sampling(1.0, top_k=20), 3)):
        together = np.asarray(generate(model, params, PROMPTS[:1], 24, sampling=sampling, seed=seed))
        assert [*stream(model, params, PROMPTS[0], 24, sampling=sampling, seed=seed)] == together[0].tolist()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("prompt", [1, 3, 7, 8, 9], ids=lambda n: f"prompt-{n}")
def test_a_stream_beyond_the_context_has_the_tokens_of_full_passes_over_its_windows(name, prompt):
    model, _, params = made(DECODERS[name])
    prompt = PROMPTS[0, :prompt].tolist()
    streamed = [*stream(model, params, prompt, 21, context=8, sampling=DRAWN, seed=1)]
    assert streamed == by_full_passes(model, params, prompt, 21, context=8)


@pytest.mark.parametrize("context", [None, 1])
def test_a_stream_takes_a_prompt_longer_than_the_context(context):
    model, _, params = made(GPT2_CONFIG)
    prompt = np.random.default_rng(5).integers(61, size=120).tolist()
    streamed = [*stream(model, params, prompt, 3, context=context, sampling=DRAWN, seed=1)]
    assert streamed == by_full_passes(model, params, prompt, 3, context or 96)


def test_a_stream_yields_a_token_before_it_computes_the_next_and_ends_at_its_stop():
    model, _, params = made(GPT2_CONFIG)
    options = {"context": 33, "sampling": DRAWN}
    whole = [*stream(model, params, PROMPTS[0], 24, **options)]
    tokens = stream(model, params, PROMPTS[0], 10**9, **options)
    assert [next(tokens) for _ in range(24)] == whole
    ended = [*stream(model, params, PROMPTS[0], 24, stop=whole[5], **options)]
    assert ended == whole[: whole.index(whole[5]) + 1]


def test_a_stream_compiles_two_programs_whatever_the_lengths():
    model, _, params = made(GPT2_CONFIG)
    programs = (generation._read_window, generation._read_token)
    [*stream(model, params, PROMPTS[0], 12, context=10)]
    compiled = [program._cache_size() for program in programs]
    [*stream(model, params, PROMPTS[0, :4], 30, context=10, seed=2)]
    assert [program._cache_size() for program in programs] == compiled


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": []}, r"prompts must be \[rows, tokens\] with at least one token, got shape \[1, 0\]"),
        ({"new_tokens": 0}, "new_tokens must be at least 1, got 0"),
        ({"context": 0}, r"context must be in \[1, 96\], got 0"),
        ({"context": 97}, r"context must be in \[1, 96\], got 97"),
    ],
)
def test_invalid_arguments_of_a_stream_are_refused_before_the_first_token(options, message):
    model, _, params = made(GPT2_CONFIG)
    with pytest.raises(UserError, match=message):
        stream(model, params, **{"prompt": [1, 2], "new_tokens": 2, **options})


def test_a_stream_of_a_t5_is_refused():
    model, _, params = made(T5S["t5"])
    with pytest.raises(UserError, match="stream needs a decoder, got a T5"):
        stream(model, params, [1], 2)
