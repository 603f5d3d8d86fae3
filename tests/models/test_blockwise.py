"""Attention block by block computes visible blocks only, in memory linear in the length."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.models.attention import attention
from jaxtrain.models.attention.attention_options import Operands, Options
from jaxtrain.models.attention.block_pairs import Sizes, visible_pairs, visible_pairs_by_row
from jaxtrain.models.attention.blockwise import backward, forward
from jaxtrain.models.attention.formula import formula


def gradients(fn, *arrays):
    out, vjp = jax.vjp(fn, *arrays)
    return [out, *vjp(jnp.cos(out))]


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


@pytest.mark.parametrize("by_row", [False, True])
def test_masks_biases_and_segments_of_two_heads_and_of_two_rows(by_row):
    rng = np.random.default_rng(0)
    q, k, v, cotangent = (jnp.asarray(rng.standard_normal((2, 17, 2, 4)), np.float32) for _ in range(4))
    bias, mask = jnp.asarray(rng.standard_normal((2, 1, 17, 1)), np.float32), rng.random((1, 2, 1, 17)) > 0.3
    segments = jnp.array([[1] * 17, [1] * 16 + [2]])  # 9 pairs of blocks, and 5
    options, given = Options(0.5), Operands(q_segments=segments, k_segments=segments, mask=mask, bias=bias)
    program = {"blocks": (8, 8), "by_row": by_row}

    @jax.jit
    def both(q, k, v, bias):
        explicit = lambda q, k, v, bias: formula(options, q, k, v, given._replace(bias=bias))  # noqa: E731
        expected, vjp = jax.vjp(explicit, q, k, v, bias)
        out, lse, _ = forward(options, q, k, v, given, **program)
        return (out, *backward(options, q, k, v, given, out, lse, cotangent, **program)[:4]), (
            expected,
            *vjp(cotangent),
        )

    for ours, theirs in zip(*both(q, k, v, bias), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def test_temporaries_are_linear_in_the_length():
    """The memory of XLA's buffers, forward and backward, of 8,192 tokens and one head of 64."""
    like = jax.ShapeDtypeStruct((1, 8192, 1, 64), np.float32)

    def temporaries(attend):
        step = jax.jit(lambda *qkv: gradients(attend, *qkv))
        return step.lower(like, like, like).compile().memory_analysis().temp_size_in_bytes

    options = Options(0.125, causal=True)
    explicit = temporaries(lambda q, k, v: formula(options, q, k, v, Operands()))
    assert temporaries(partial(attention, causal=True)) <= 0.02 * explicit
