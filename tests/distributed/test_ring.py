"""Ring attention equals the formula on one device, and its devices compute equally much."""

import json
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.distributed import make_mesh, memory_per_device, ring, ring_steps
from jaxtrain.distributed.constrained_loss import constrain_shardings
from jaxtrain.distributed.long_attention import find_attention
from jaxtrain.models.attention import FORWARD, attention, blockwise, primitives
from jaxtrain.models.attention.attention_options import Operands, Options
from jaxtrain.models.attention.block_pairs import Sizes, visible_pairs
from jaxtrain.models.attention.dropout_mask import counters
from jaxtrain.models.attention.formula import formula
from jaxtrain.passes import autocast, block, remat
from jaxtrain.program.equations import visit
from tests.distributed.deep import ROWS, deep
from tests.distributed.on_rings import RINGS
from tests.distributed.test_sharding_step import NEAR, WITHOUT_LLVM, run_with_devices

B, T, HEADS, SHARED, WIDTH = 2, 32, 4, 2, 8


def operands(*names):
    """Return these operands of attention, packed into segments or masked at random."""
    rng = np.random.default_rng(0)
    segments = np.sort(rng.integers(1, 4, (B, T)), axis=1)
    arrays = {
        "bias": jnp.asarray(rng.normal(size=(1, HEADS, T, T))),
        "row_bias": jnp.asarray(rng.normal(size=(B, 1, 1, T))),
        "sinks": jnp.asarray(rng.normal(size=(1, HEADS))),
        "mask": jnp.asarray(rng.random((B, 1, T, T)) < 0.7),
        "q_segments": jnp.asarray(segments),
        "k_segments": jnp.asarray(segments),
        "rng": counters(jax.random.key(3), B),
    }
    return Operands(**{name.removeprefix("row_"): arrays[name] for name in names})


SEGMENTS = "q_segments", "k_segments"
DROPPED = Options(0.3, causal=True, dropout=0.2)


@pytest.mark.parametrize(
    ("options", "names", "spec"),
    [
        (DROPPED, (*SEGMENTS, "rng", "sinks"), "sequence=4"),
        (DROPPED._replace(window=12, softcap=5.0), ("rng", "bias"), "sequence=4"),
        (Options(0.3), ("mask", "row_bias"), "data=2,sequence=2"),
        (DROPPED, ("mask", "rng", "bias", "sinks"), "sequence=2,tensor=2"),
        (Options(0.3, causal=True, window=7), ("bias", "sinks", "mask"), "sequence=2,tensor=2"),
        (Options(0.3, causal=True), (), "sequence=2,tensor=2"),
    ],
    ids=["packed", "long window", "bidirectional", "heads", "window", "one head of keys"],
)
def test_outputs_and_gradients_equal_those_of_the_formula(options, names, spec, double):
    given, mesh = operands(*names), make_mesh(spec)
    shared = SHARED if names else 1  # which tensor=2 does not divide
    shapes = [(B, T, n, width) for n, width in ((HEADS, WIDTH), (shared, WIDTH), (shared, 6), (HEADS, 6))]
    q, k, v, cotangent = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes))

    def gradients(attend):
        of_arrays = lambda q, k, v, others: attend(options, q, k, v, given._replace(**others))  # noqa: E731
        out, vjp = jax.vjp(of_arrays, q, k, v, given.differentiable())
        return jax.tree.leaves([out, vjp(cotangent)])

    def on_ring(*arrays):
        return ring.ring_attention(ring.Attention(*arrays), mesh)

    expected = jax.jit(lambda: gradients(formula))()
    for one, other in zip(expected, jax.jit(lambda: gradients(on_ring))(), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


def test_only_attention_is_divided_into_a_ring():
    @jax.custom_vjp
    def double(x):
        return 2 * x

    double.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))
    (eqn,) = jax.make_jaxpr(jax.jit(double))(1.0).eqns
    assert find_attention(eqn) is None


def test_devices_compute_equally_many_pairs_of_blocks(monkeypatch):
    """Of causal attention the last of four devices would compute seven times as many as the first in order."""
    work = pairs_per_device("sequence=4", jnp.ones((1, 512), np.int32), monkeypatch)
    assert work.max() <= 1.1 * work.min(), work
    assert work.sum() == sum(range(1, 9))  # of 8 chunks, each of one block: those at or below the diagonal


def pairs_per_device(spec, segments, monkeypatch):
    """Return the number of pairs of blocks that each device computes, with their counts in place of the outputs."""

    def counted(options, q, k, v, operands, blocks, by_row):
        assert blocks is None  # as for a CPU
        assert not by_row
        pairs = visible_pairs(options, Sizes.divided(q.shape[1], k.shape[1], 64, 64), len(q), operands)
        sums = jnp.zeros((len(q), q.shape[2], q.shape[1]))
        return jnp.full(q.shape, pairs.count, q.dtype), sums, sums

    monkeypatch.setattr(blockwise, "forward", counted)
    monkeypatch.setattr(ring_steps, "_combined", lambda one, other: (one[0] + other[0], other[1]))
    mesh, x = make_mesh(spec), jnp.ones((*segments.shape, 1, 8))
    n, given = mesh.shape["sequence"], Operands(q_segments=segments, k_segments=segments)
    attend = jax.jit(lambda x: ring.ring_attention(ring.Attention(Options(1.0, causal=True), x, x, x, given), mesh))
    by_chunk = np.asarray(attend(x))[0, :, 0, 0].reshape(2 * n, -1).mean(1)
    return by_chunk[:n] + by_chunk[: n - 1 : -1]  # chunks i and 2n - 1 - i are on one device


def test_autocast_and_remat_keep_the_ring_and_its_output(monkeypatch):
    monkeypatch.setattr(primitives, "LONG", 0)
    mesh, x = make_mesh("sequence=4"), jnp.ones((B, T, HEADS * WIDTH))

    def layer(x):
        heads = x.reshape(B, T, HEADS, WIDTH)
        return attention(jnp.sin(heads), heads, heads, causal=True).reshape(x.shape)

    def calls(policy):
        loss = constrain_shardings(lambda params, batch: block(layer)(batch * params).sum(), mesh)
        traced = jax.make_jaxpr(jax.grad(remat(autocast(loss, jnp.bfloat16), policy)))(np.float32(1), x)
        found = list(visit(traced.jaxpr))
        parts = [eqn for eqn in found if eqn.primitive in (FORWARD, primitives.BACKWARD)]
        assert {(eqn.params["whole"], eqn.invars[0].aval.dtype.name) for eqn in parts} == {((T, T), "bfloat16")}
        counted = Counter(eqn.primitive.name for eqn in found)
        return [counted[name] for name in ("fused_attention", "log1p", "fused_attention_backward")]

    # Three parts in the first step; two in those of the loop and in the last one. Each is combined with those before.
    assert calls("none") == calls("dots") == [7, 7, 7]
    assert calls("full") == [14, 14, 7]


@pytest.mark.parametrize(
    ("family", "specs"),
    [
        ("packed", ["sequence=8"]),
        *(pytest.param(name, ["sequence=8", "data=2,sequence=4"], marks=pytest.mark.nightly) for name in RINGS),
    ],
)
def test_twenty_steps_equal_those_of_one_device(family, specs):
    distances = json.loads(
        run_with_devices(8, "-m", "tests.distributed.on_rings", family, *specs, double=True, more_flags=WITHOUT_LLVM)
    )
    assert distances.keys() == {*specs}
    assert {spec: d for spec, d in distances.items() if not d < NEAR} == {}


@pytest.mark.nightly
def test_temporaries_decrease_with_the_number_of_devices(monkeypatch):
    monkeypatch.setattr(primitives, "LONG", 0)
    monkeypatch.setattr(blockwise, "Q_BLOCK", 64)
    monkeypatch.setattr(blockwise, "K_BLOCK", 64)
    tokens = {"tokens": np.zeros((2 * ROWS, 1024), np.int32)}
    steps = [deep(f"sequence={n}", positions=1024) for n in (1, 2, 4)]
    one, two, four = (memory_per_device(step, make, tokens).temporaries for step, make in steps)
    assert four < 0.6 * two < 0.36 * one, (one, two, four)
