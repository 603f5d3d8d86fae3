"""The kernels of attention, interpreted, equal its formula; their errors in low precision are those of PyTorch."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.models.attention import pallas_gpu
from jaxtrain.models.attention.attention_options import Operands, Options
from jaxtrain.models.attention.formula import visible
from jaxtrain.models.attention.pallas_gpu import Blocks, Schedule
from tests.models.attention_operands import BOUND, EVERYTHING, configurations, draw, explicit


@cache
def interpreted(options, blocks):
    schedule = Schedule(*[Blocks(*blocks)] * 4)

    def by_kernels(q, k, v, cotangent, operands):
        of = partial(partial, schedule=schedule, interpret=True)
        out, lse = of(pallas_gpu.forward)(options, q, k, v, operands)
        dq, dk, dv, *others = of(pallas_gpu.backward)(options, q, k, v, operands, out, lse, cotangent)
        return out, lse, (dq, dk, dv, dict(zip(operands.differentiable(), others, strict=True)))

    return jax.jit(by_kernels)


def assert_equal(options, given, heads, blocks, seeds):
    for seed in seeds:
        arrays = draw(seed, heads, given)
        ours, theirs = interpreted(options, blocks)(*arrays), explicit(options)(*arrays)
        for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            assert x.dtype == y.dtype == np.float64
            finite = np.asarray(y)[np.isfinite(y)]
            np.testing.assert_allclose(x, y, rtol=0, atol=BOUND * np.abs(finite).max(initial=1.0))


def test_all_options_together_equal_the_formula():
    with jax.enable_x64(True):
        options = Options(0.4, causal=True, window=9, softcap=3.0, dropout=0.2)
        positions = ("q_positions", None), ("k_positions", None)  # without them, segments and causality hide most
        assert_equal(options, (*EVERYTHING, *positions), heads=2, blocks=(16, 16), seeds=range(5))


@pytest.mark.nightly
@settings(max_examples=40, deadline=None)
@given(configurations(), st.sampled_from([(16, 16), (16, 32), (32, 16)]), st.integers(0, 2**30))
def test_any_combination_of_options_equals_the_formula(configuration, blocks, seed):
    options, operands, heads, *_ = configuration
    if ("bias", (1, 4, 21, 37)) not in operands:  # of the shapes of a bias there, the one that kernels differentiate
        operands = tuple(x for x in operands if x[0] != "bias")
    with jax.enable_x64(True):
        assert_equal(options, operands, heads, blocks, seeds=range(seed, seed + 5))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_low_precision_error_is_at_most_twice_pytorchs(dtype):
    rng, n, window = np.random.default_rng(1), 2, 24
    shapes = (4, 64, n, 16), (4, 64, 1, 16), (4, 64, 1, 16), (4, 64, n, 16)
    low = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]
    out, _, (*grads, _) = interpreted(Options(0.25, causal=True, window=window), (32, 16))(*low, Operands())
    mask = torch.tensor(visible(64, 64, window))

    def by_torch(dtype):
        tensors = [torch.tensor(np.asarray(x, np.float64), dtype=dtype, requires_grad=i < 3) for i, x in enumerate(low)]
        heads_first = [x.transpose(1, 2) for x in tensors]
        theirs = F.scaled_dot_product_attention(*heads_first[:3], mask, enable_gqa=True)
        of = torch.autograd.grad(theirs, tensors[:3], heads_first[3])
        return [x.detach().double().numpy() for x in (theirs.transpose(1, 2), *of)]

    truth, theirs = by_torch(torch.float64), by_torch(getattr(torch, dtype))
    for mine, yours, true in zip((out, *grads), theirs, truth, strict=True):
        assert mine.dtype == dtype
        error, reference = (np.sqrt(np.mean((x - true) ** 2)) for x in (np.asarray(mine, np.float64), yours))
        assert error <= 2 * reference
