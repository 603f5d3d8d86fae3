"""Programs of attention, compiled once for many arrays, on either path: the formula, or block by block."""

import os
from contextlib import contextmanager
from functools import cache, partial
from typing import NamedTuple

import jax
import numpy as np
import pytest

from jaxtrain.models.attention import attention, primitives
from jaxtrain.models.attention.attention_options import Operands, Options
from jaxtrain.models.attention.dropout_mask import counters
from jaxtrain.models.attention.primitives import fused_attention
from tests.models.explicit_attention import Given

B, N = 2, 4
FORMER_EMITTERS = "--xla_cpu_use_fusion_emitters=false"  # conftest.py sets it where jaxlib has them
USERS = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
    **({"xla_cpu_use_fusion_emitters": True} if FORMER_EMITTERS in os.environ.get("XLA_FLAGS", "") else {}),
}
"""What the tests change to compile faster, which rounds float32 otherwise: up to twice as far from the truth."""


class Program(NamedTuple):
    """What is fixed when a program is compiled: the shapes, the options, and the blocks; None for the formula."""

    t: int = 21
    s: int = 37
    heads: int = 2
    width: int = 8
    value_width: int = 5
    bias: tuple[int, ...] | None = None
    mask: tuple[int, ...] | None = None
    segments: int | None = None
    positions: bool = False
    sinks: bool = False
    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    dropout: float = 0.0
    blocks: tuple[int, int] | None = (8, 16)
    by_row: bool = False


EVERYTHING = Program(
    **{"bias": (1, N, 21, 37), "mask": (B, N, 21, 37), "segments": B, "sinks": True},
    **{"causal": True, "window": 19, "softcap": 3.0, "scale": 0.4, "dropout": 0.2},
)


def drawn(program, seed, dtype=np.float64):
    """Draw what differs between calls of a program: values, masks, lengths, segments, positions; and a cotangent.

    The dropout mask is that of a dtype, since JAX draws other bits in float64.
    """
    rng = np.random.default_rng(seed)
    t, s, heads = program.t, program.s, program.heads
    mask = None
    if program.mask is not None:
        lengths = rng.integers(0, s + 1, (*program.mask[:3], 1))
        random = rng.random(program.mask) < rng.choice([0.2, 0.7, 0.95])
        mask = np.arange(s) < lengths if program.mask[3] == s and rng.random() < 0.5 else random
    count = rng.integers(1, 6)
    packed = lambda n: np.sort(rng.integers(0, count, (program.segments, n)), axis=1)  # noqa: E731
    places = lambda rows, n: np.stack([rng.permutation(max(t, s))[:n] for _ in range(rows)])  # noqa: E731
    keep = None
    if program.dropout:
        with jax.enable_x64(dtype == np.float64):
            keep = np.asarray(_bernoulli(jax.random.key(seed), 1 - program.dropout, (B, N, t, s)))
    return Given(
        rng.choice([0.5, 2.0, 6.0]) * rng.standard_normal((B, t, N, program.width)),
        rng.standard_normal((B, s, heads, program.width)),
        rng.standard_normal((B, s, heads, program.value_width)),
        bias=None if program.bias is None else 2 * rng.standard_normal(program.bias),
        sinks=2 * rng.standard_normal(N) if program.sinks else None,
        mask=mask,
        segments=None if program.segments is None else (packed(t), packed(s)),
        positions=(places(1, t), places(B, s)) if program.positions else None,
        keep=keep,
        causal=program.causal,
        window=program.window,
        softcap=program.softcap,
        scale=program.scale or program.width**-0.5,
        dropout=program.dropout,
    ), rng.standard_normal((B, t, N, program.value_width))


_bernoulli = jax.jit(jax.random.bernoulli, static_argnums=(1, 2))


def attend(program, trained, mask, segments, positions, key):
    """Call attention, as a program and `drawn` say."""
    q, k, v, bias, sinks = (trained.get(name) for name in ("q", "k", "v", "bias", "sinks"))
    options = {name: getattr(program, name) for name in ("causal", "window", "softcap", "scale", "dropout")}
    if positions is None:
        return attention(q, k, v, mask=mask, bias=bias, segments=segments, sinks=sinks, rng=key, **options)
    # As ring attention calls it, the only user of positions.
    operands = Operands(mask, bias, None if sinks is None else sinks[None], *(segments or (None, None)), *positions)
    rng = counters(key, B) if program.dropout else None
    static = Options(**{**options, "scale": program.scale or program.width**-0.5})
    return fused_attention(static, q, k, v, operands._replace(rng=rng))


def with_gradients(program, trained, cotangent, *others):
    """Return the output of attention and the gradients of its trained arrays."""
    out, vjp = jax.vjp(lambda trained: attend(program, trained, *others), trained)
    return {"out": out, **vjp(cotangent)[0]}


@cache
def _compiled(program, as_for_users):
    return jax.jit(partial(with_gradients, program), compiler_options=USERS if as_for_users else None)


@contextmanager
def on_path(program):
    """Compile attention for the path and the blocks of a program while entered."""
    loop = {"by_row": program.by_row, "blocks": program.blocks}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(primitives, "LONG", 2**30 if program.blocks is None else 1)
        patch.setattr(primitives.Target, "loop", property(lambda _: loop))
        yield


def evaluated(program, given, cotangent, seed, dtype=np.float64):
    """Return the output of attention and the gradients of its trained arrays, computed in a dtype, in float64."""
    with on_path(program), jax.enable_x64(dtype == np.float64):
        trained = {name: x.astype(dtype) for name, x in given.trained.items()}
        others = given.mask, given.segments, given.positions, jax.random.key(seed)
        found = _compiled(program, dtype != np.float64)(trained, cotangent.astype(dtype), *others)
    assert all(x.dtype == dtype for x in found.values())
    return {name: np.asarray(x, np.float64) for name, x in found.items()}
