"""A kernel of attention on a mesh: each device computes its rows and heads, without exchanging any."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.models.attention.attention_options import Operands, Options
from jaxtrain.models.attention.formula import formula
from jaxtrain.models.attention.partitioned import partitioned
from tests import lowering

B, T = 4, 8


@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (4, 1), (2, 2)])
def test_devices_compute_their_rows_and_heads(heads, groups, monkeypatch):
    # The compiler calls back to lower the kernel, in a context of its own.
    monkeypatch.setattr(lowering.mlir, "make_ir_context", lowering.make_context)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rng, seen = np.random.default_rng(0), []
    q, k, v = (rng.standard_normal((B, T, n, 4)).astype(np.float32) for n in (heads, groups, groups))
    segments = np.repeat(np.arange(4, dtype=np.int32), 2)[None]

    def kernel(q, k, v, segments):
        seen.append((q.shape[0], q.shape[2], k.shape[2]))
        return [formula(Options(0.5, causal=True), q, k, v, Operands(q_segments=segments, k_segments=segments))]

    def attend(*arrays):
        return partitioned(kernel, ("q", "k", "v", "q_segments"), ("out",), *arrays)[0]

    expected = kernel(q, k, v, segments)[0]
    over_heads = groups % 2 == 0
    for spec in (P("data"), P("data", None, "tensor")):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in (q,)]
        placed += [jax.device_put(x, NamedSharding(mesh, spec if over_heads else P("data"))) for x in (k, v)]
        compiled = jax.jit(attend).lower(*placed, segments).compile()
        np.testing.assert_allclose(compiled(*placed, segments), expected, rtol=0, atol=1e-6)
        share = 2 if over_heads and len(spec) > 1 else 1
        assert seen[-1] == (B // 2, heads // share, groups // share)
        assert bool(re.search("all-|collective-", compiled.as_text())) == (len(spec) > 1 and not over_heads)
