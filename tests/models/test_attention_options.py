"""Attention equals its explicit form in float64, with all gradients, for combinations of every option."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.models.attention.dropout_mask import is_counter_based
from tests.models.attention_programs import EVERYTHING, B, N, Program, attend, drawn, evaluated, on_path, with_gradients
from tests.models.explicit_attention import eager, query_by_query

BOUND = 1e-12


@st.composite
def programs(draw):
    t, s = draw(st.sampled_from([(21, 37), (37, 21), (24, 24), (1, 19), (13, 40)]))
    shapes = st.tuples(*(st.sampled_from([size, 1]) for size in (B, N, t, s)))
    causal, blocks = draw(st.booleans()), draw(st.sampled_from([(8, 8), (8, 16), (16, 8), (24, 40), None]))
    return Program(
        *(t, s, draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([3, 8])), draw(st.sampled_from([5, 8]))),
        bias=draw(shapes | st.none()),
        mask=draw(shapes | st.just((B, 1, 1, s)) | st.none()),
        segments=draw(st.sampled_from([1, B, None])),
        positions=causal and blocks is not None and draw(st.booleans()),
        sinks=draw(st.booleans()),
        causal=causal,
        window=draw(st.sampled_from([1, 7, 16, 30, None])) if causal else None,
        softcap=draw(st.sampled_from([2.0, 30.0, None])),
        scale=draw(st.sampled_from([1.0, None])),
        dropout=draw(st.sampled_from([0.3, 0.0])),
        blocks=blocks,
        by_row=draw(st.booleans()),
    )


def assert_explicit(program, seeds):
    for seed in seeds:
        arrays, cotangent = drawn(program, seed)
        ours, theirs = evaluated(program, arrays, cotangent, seed), eager(arrays, cotangent)
        assert ours.keys() == theirs.keys()
        if seed == seeds[0]:
            np.testing.assert_allclose(theirs["out"], query_by_query(arrays), rtol=0, atol=BOUND)
        for name, y in theirs.items():
            np.testing.assert_allclose(ours[name], y, rtol=0, atol=BOUND * np.abs(y).max(initial=1.0), err_msg=name)


def test_all_options_together_equal_the_explicit_form():
    assert_explicit(EVERYTHING, range(5))


def test_the_mask_of_a_block_is_drawn_alone_only_if_each_bit_depends_on_its_index():
    keys = {impl: jax.random.key(0, impl=impl) for impl in ("threefry2x32", "rbg", "unsafe_rbg")}
    assert [impl for impl, key in keys.items() if is_counter_based(key)] == ["threefry2x32"]
    assert is_counter_based(jax.random.key_data(keys["threefry2x32"]))
    with jax.threefry_partitionable(False):
        assert not any(map(is_counter_based, keys.values()))


@settings(max_examples=10, deadline=None)
@given(programs(), st.integers(0, 2**30))
def test_any_combination_of_options_equals_the_explicit_form(program, seed):
    """10 programs, each for 16 arrays."""
    assert_explicit(program, range(seed, seed + 16))


def transformed(program, given, cotangent):
    """Return second derivatives, forward over reverse and reverse over reverse, and gradients under vmap."""
    masks, key = (given.mask, given.segments, None), jax.random.key(0)

    def gradients(trained, key=key):
        return with_gradients(program, trained, cotangent, *masks, key)

    def penalty(trained):
        return sum(jnp.square(x).sum() for x in gradients(trained).values())

    @jax.jit
    def evaluate(trained):
        tangents = jax.tree.map(jnp.cos, trained)
        batch = {name: jnp.stack([x, x + 0.1, jnp.sin(x)]) for name, x in trained.items() if name not in ("k", "bias")}
        axes = {name: 0 if name in batch else None for name in trained}
        mapped = jax.vmap(gradients, (axes, 0))({**trained, **batch}, jax.random.split(key, 3))
        return jax.jvp(gradients, (trained,), (tangents,))[1], jax.grad(penalty)(trained), mapped

    with on_path(program), jax.enable_x64(True):
        return evaluate(given.trained)


def test_second_derivatives_and_mapped_gradients_are_those_of_the_formula():
    given, cotangent = drawn(EVERYTHING, 0)
    ours, theirs = (transformed(EVERYTHING._replace(blocks=blocks), given, cotangent) for blocks in ((8, 16), None))
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=BOUND * np.abs(y).max())


def test_forward_mode_of_long_attention_is_refused():
    program = Program()
    given, _ = drawn(program, 0)
    with on_path(program), jax.enable_x64(True), pytest.raises(TypeError, match="can't apply forward-mode"):
        jax.jvp(lambda trained: attend(program, trained, None, None, None, None), (given.trained,), (given.trained,))
