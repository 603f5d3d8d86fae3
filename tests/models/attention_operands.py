"""Options and operands of the functions below `attention`, and its formula with logarithms and gradients."""

from functools import cache

import jax
import numpy as np
from hypothesis import strategies as st

from jaxtrain.models.attention.attention_options import Operands, Options
from jaxtrain.models.attention.dropout_mask import counters
from jaxtrain.models.attention.formula import formula, log_sum_exp

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
def explicit(options):
    """Return the formula, its logarithms and all its gradients, jitted."""

    @jax.jit
    def evaluate(q, k, v, cotangent, operands):
        def compute(q, k, v, differentiable):
            return formula(options, q, k, v, operands._replace(**differentiable))

        out, vjp = jax.vjp(compute, q, k, v, operands.differentiable())
        return out, log_sum_exp(options, q, k, operands), vjp(cotangent)

    return evaluate


EVERYTHING = (
    *(("mask", (B, N, T, S)), ("bias", (1, N, T, S)), ("sinks", None)),
    *(("q_segments", None), ("k_segments", None), ("rng", None)),
)


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
