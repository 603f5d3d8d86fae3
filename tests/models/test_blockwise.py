"""Attention block by block equals its formula in float64, with all gradients, for combinations of every option."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.models.attention import attention, blockwise
from jaxtrain.models.attention.blocks import Sizes, visible_pairs, visible_pairs_by_row
from jaxtrain.models.attention.dropout_mask import counters
from jaxtrain.models.attention.formula import formula, log_sum_exp
from jaxtrain.models.attention.options import Operands, Options

B, T, S, N, H, V = 2, 21, 37, 4, 8, 5
BOUND = 1e-12
SHAPES = [(1, N, T, S), (B, 1, T, S), (B, N, 1, S), (1, 1, T, 1), (B, 1, 1, S)]


def draw(seed, heads, given):
    """Return q, k, v, a cotangent and the operands that are named, of random numbers."""
    rng = np.random.default_rng(seed)
    packed = lambda n: np.sort(rng.integers(0, 4, (B, n)), axis=1).astype(np.int32)  # noqa: E731
    makers = {
        "mask": lambda shape: rng.random(shape) > 0.3,
        "bias": lambda shape: rng.standard_normal(shape),
        "sinks": lambda _: rng.standard_normal((1, N)),
        "q_segments": lambda _: packed(T),
        "k_segments": lambda _: packed(S),
        "q_positions": lambda _: rng.permutation(S)[None, :T].astype(np.int32),
        "k_positions": lambda _: np.stack([rng.permutation(S) for _ in range(B)]).astype(np.int32),
        "rng": lambda _: np.asarray(counters(jax.random.key(seed), B)),
    }
    shapes = (B, T, N, H), (B, S, heads, H), (B, S, heads, V), (B, T, N, V)
    arrays = [2 * rng.standard_normal(shape) for shape in shapes]
    return *arrays, Operands(**{name: makers[name](shape) for name, shape in given})


@cache
def compiled(options, blocks, by_row):
    def explicit(q, k, v, cotangent, operands):
        def compute(q, k, v, differentiable):
            return formula(options, q, k, v, operands._replace(**differentiable))

        out, vjp = jax.vjp(compute, q, k, v, operands.differentiable())
        return out, log_sum_exp(options, q, k, operands), vjp(cotangent)

    def by_blocks(q, k, v, cotangent, operands):
        of = partial(partial, blocks=blocks, by_row=by_row)
        out, lse = of(blockwise.forward)(options, q, k, v, operands)
        grads = of(blockwise.backward)(options, q, k, v, operands, out, lse, cotangent)
        return out, lse, (*grads[:3], {name: getattr(grads, name) for name in operands.differentiable()})

    return jax.jit(explicit), jax.jit(by_blocks)


def assert_equal(options, given, heads, blocks, by_row, seeds):
    explicit, by_blocks = compiled(options, blocks, by_row)
    for seed in seeds:
        arrays = draw(seed, heads, given)
        theirs, ours = explicit(*arrays), by_blocks(*arrays)
        for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            assert x.dtype == y.dtype == np.float64
            finite = np.asarray(y)[np.isfinite(y)]
            np.testing.assert_allclose(x, y, rtol=0, atol=BOUND * np.abs(finite).max(initial=1.0))


EVERYTHING = (
    *(("mask", (B, N, T, S)), ("bias", (1, N, T, S)), ("sinks", None)),
    *(("q_segments", None), ("k_segments", None), ("rng", None)),
)


def test_all_options_together_equal_the_formula():
    with jax.enable_x64(True):
        options = Options(0.4, causal=True, window=19, softcap=3.0, dropout=0.2)
        assert_equal(options, EVERYTHING, heads=2, blocks=(8, 16), by_row=False, seeds=range(5))


@st.composite
def configurations(draw):
    causal = draw(st.booleans())
    names = draw(st.sets(st.sampled_from(["mask", "bias", "sinks", "segments", "positions", "rng"])))
    given = []
    for name in sorted(names):
        pair = name in ("segments", "positions")
        shape = draw(st.sampled_from(SHAPES)) if name in ("mask", "bias") else None
        given += [(f"{side}_{name}", None) for side in "qk"] if pair else [(name, shape)]
    options = Options(
        draw(st.sampled_from([1.0, 0.35])),
        causal,
        draw(st.sampled_from([None, 1, 9, 30])) if causal else None,
        draw(st.sampled_from([None, None, 2.0])),
        0.3 if "rng" in names else 0.0,
    )
    blocks = draw(st.sampled_from([(8, 8), (8, 16), (16, 8), (24, 40)]))
    return options, tuple(given), draw(st.sampled_from([1, 2, 4])), blocks, draw(st.booleans())


@pytest.mark.nightly
@settings(max_examples=60, deadline=None, derandomize=True)
@given(configurations(), st.integers(0, 2**30))
def test_any_combination_of_options_equals_the_formula(configuration, seed):
    with jax.enable_x64(True):
        assert_equal(*configuration, seeds=range(seed, seed + 40))


def gradients(fn, *arrays):
    out, vjp = jax.vjp(fn, *arrays)
    return [out, *vjp(jnp.cos(out))]


@pytest.mark.slow
def test_long_attention_is_the_short_one_with_the_same_dropout_mask(monkeypatch):
    """Of 1,024 tokens: also under vmap, differentiated twice, and with a key for every mapped row."""
    rng, long = np.random.default_rng(0), 1024
    q, k, v = (rng.standard_normal((2, 1, long, 1, 2)) for _ in range(3))
    segments = np.sort(rng.integers(0, 9, (2, 1, long)), axis=-1)

    def attend(q, k, v, segments, key):
        return attention(q, k, v, segments=(segments, segments), causal=True, dropout=0.1, rng=key)

    def evaluated(q, k, v, segments, keys):
        mapped = jax.vmap(attend)
        once = gradients(lambda q, k, v: mapped(q, k, v, segments, keys), q, k, v)
        one = lambda q: attend(q, k[0], v[0], segments[0], keys[0])  # noqa: E731
        return once, jax.jvp(lambda q: gradients(one, q)[1], (q[0],), (k[0],))

    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(0), 2)
        ours = jax.jit(evaluated)(q, k, v, segments, keys)
        assert "fused_attention_backward" in str(jax.make_jaxpr(evaluated)(q, k, v, segments, keys))
        monkeypatch.setattr("jaxtrain.models.attention.primitives.LONG", long**2 + 1)
        for x, y in zip(
            jax.tree.leaves(ours), jax.tree.leaves(jax.jit(evaluated)(q, k, v, segments, keys)), strict=True
        ):
            np.testing.assert_allclose(x, y, rtol=0, atol=BOUND * np.abs(y).max())


def test_blocks_without_a_visible_pair_are_not_computed():
    sizes, options = Sizes(1024, 1024, 64, 64), Options(1.0, causal=True)
    assert visible_pairs(options, sizes, 3, Operands()).count == 3 * 16 * 17 // 2
    assert visible_pairs(options._replace(window=65), sizes, 1, Operands()).count == 16 + 15
    lengths = 256, 512, 192, 64
    segments = np.repeat(np.arange(4), lengths)[None].astype(np.int32)
    alone = sum(visible_pairs(options, Sizes(n, n, 64, 64), 1, Operands()).count for n in lengths)

    @jax.jit
    def counts(segments):
        packed = Operands(q_segments=segments, k_segments=segments)
        pairs, by_row = visible_pairs(options, sizes, 1, packed), visible_pairs_by_row(options, sizes, 1, packed)
        assert len(pairs.index) == by_row.index.shape[1] == 16 * 17 // 2  # the most that there may be
        return pairs.count, by_row.count.sum()

    assert [*map(int, counts(segments))] == [alone, alone]
    # The last block holds the end of a sequence, and padding of segment 0.
    assert [*map(int, counts(np.where(np.arange(1024) < 1000, segments + 1, 0)))] == [alone, alone]


@pytest.mark.slow
def test_temporaries_are_linear_in_the_length():
    """The memory of XLA's buffers, forward and backward, of 8,192 tokens and one head of 64."""
    like = jax.ShapeDtypeStruct((1, 8192, 1, 64), np.float32)

    def temporaries(attend):
        step = jax.jit(lambda *qkv: gradients(attend, *qkv))
        return step.lower(like, like, like).compile().memory_analysis().temp_size_in_bytes

    options = Options(0.125, causal=True)
    explicit = temporaries(lambda q, k, v: formula(options, q, k, v, Operands()))
    assert temporaries(partial(attention, causal=True)) <= 0.02 * explicit
