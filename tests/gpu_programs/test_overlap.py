"""Computation that overlaps with the collectives of a step on a mesh of H100s."""

import pytest

from benchmarks.predicted import case_program
from benchmarks.workloads import WORKLOADS

pytest.importorskip("jax_plugins.xla_cuda12", reason="compiling for GPUs requires the extra gpu-programs")


@pytest.mark.slow
def test_gathers_and_scatters_of_fsdp_have_a_product_beside_them():
    workload = WORKLOADS["gpt2-124m"]
    compiled = case_program(workload.case({}), unroll=False, mesh="fsdp=8", rules=workload.sharding())
    assert compiled.overlap.by_count >= 0.8
    assert compiled.overlap.by_bytes >= 0.8
    # The blocks' matrices forwards and backwards, the table once: in bfloat16. The vectors and positions are float32.
    matrices, table = 12 * 12 * 768**2, 50304 * 768
    gathered = sum(t.sent for t in compiled.communication.traffic if t.kind == "all-gather")
    assert gathered <= 1.02 * 7 / 8 * 2 * (2 * matrices + table)
