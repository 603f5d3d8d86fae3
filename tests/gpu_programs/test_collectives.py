"""The collectives of a step on a mesh of H100s: their bytes, and the computation that overlaps with them."""

import math

import jax
import pytest

from benchmarks.predicted import case_program
from benchmarks.workloads import WORKLOADS
from tests.gpu_programs.families import FAMILIES, Settings, program

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


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_gradients_are_reduced_once_a_window_in_float32(family):
    compiled = program(Settings(family, mesh="data=8", accumulate=4))
    (traffic,) = compiled.communication.traffic
    assert traffic.kind == "all-reduce"
    gradients = 4 * sum(math.prod(x.shape) for x in jax.tree.leaves(FAMILIES[family]().params))
    assert 1 <= traffic.sent / (2 * 7 / 8 * gradients) <= 1.02
    assert compiled.host_waits == 0
