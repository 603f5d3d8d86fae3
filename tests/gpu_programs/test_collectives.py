"""The collectives of a step on a mesh of H100s: their bytes, and the computation that overlaps with them."""

import math

import jax
import numpy as np
import pytest
from flax import nnx

from benchmarks.predicted import case_program
from benchmarks.workloads import WORKLOADS
from jaxtrain import Loss, train_step
from jaxtrain.distributed import parse_mesh
from jaxtrain.losses import cross_entropy
from jaxtrain.models import Llama, LlamaConfig, functional, llama
from jaxtrain.optim import adamw
from jaxtrain.planning import gpu_program
from tests.gpu_programs.families import FAMILIES, HEADS, LAYERS, SIZES, VOCABULARY, WIDTH, Settings, program

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
@pytest.mark.parametrize(("family", "mesh"), [("gpt2", "fsdp=8"), ("gpt2", "dcn=2,data=4"), ("llama", "dcn=2,fsdp=4")])
def test_gradients_are_reduced_once_a_window_in_float32(family, mesh):
    compiled = program(Settings(family, mesh=mesh, accumulate=4))
    assert compiled.host_waits == 0
    leaves, sizes = jax.tree.leaves(FAMILIES[family]().params), parse_mesh(mesh)
    params, n, nodes = sum(math.prod(x.shape) for x in leaves), sizes["fsdp"], sizes["dcn"]
    traffic = compiled.communication.traffic
    # Each device of a node receives its part of the node's sums, and sends it to the other nodes.
    in_node, over_network = 4 * params * (7 / 8 if nodes == 1 else 3 / 4), 4 * params / 4 * 2 * (nodes - 1) / nodes
    reduced = sum(t.sent for t in traffic if t.kind in ("reduce-scatter", "all-reduce"))
    assert 1 <= reduced / (in_node + over_network) <= 1.02
    assert over_network <= sum(t.sent for t in traffic if t.axes == ("dcn",)) <= 1.02 * over_network
    assert sum(t.sent for t in traffic if t.kind == "all-gather" and t.axes == ("data",)) in (0, in_node)
    # In every micro-batch the layers are gathered forwards and backwards, the head's table once, in bfloat16; vectors
    # and positions in float32. Of the table that is looked up only rows are exchanged.
    matrices, table = sum(math.prod(x.shape) for x in leaves if len(x.shape) == 3), VOCABULARY * WIDTH
    others = sum(math.prod(x.shape) for x in leaves if len(x.shape) < 3 and VOCABULARY not in x.shape)
    gathered = sum(t.sent for t in traffic if t.kind == "all-gather" and t.axes == ("fsdp",))
    assert gathered <= 1.02 * 4 * (n - 1) / n * (2 * (2 * matrices + table) + 4 * 2 * others)


@pytest.mark.slow
def test_gradients_of_one_micro_batch_are_reduced_within_a_node_first():
    """In bfloat16, of which each device sends its quarter over the network; only those of lookups are in float32."""
    compiled = program(Settings("gpt2", mesh="dcn=2,data=4"))
    params = sum(math.prod(x.shape) for x in jax.tree.leaves(FAMILIES["gpt2"]().params))
    sent = {(t.kind, t.axes): t.sent for t in compiled.communication.traffic}
    assert sent["reduce-scatter", ("data",)] <= 1.2 * 2 * params * 3 / 4
    assert sent["all-reduce", ("dcn",)] <= 1.2 * 2 * params / 4
    assert ("all-reduce", ("data",)) not in sent


@pytest.mark.slow
def test_a_ring_sends_keys_while_cudnn_computes():
    """Each of 8 devices has two chunks of 384 tokens: 3 parts in the first step, 2 in each of the 7 others."""
    length, chunk = 6144, 384
    config = LlamaConfig(**SIZES | {"max_position_embeddings": length})
    apply, params = functional(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))

    def loss_fn(params, batch, rng):
        return Loss.of(cross_entropy(apply(params, batch["tokens"], rng), batch["tokens"])), {}

    batch = {"tokens": jax.ShapeDtypeStruct((1, length), np.int32)}
    step = train_step(loss_fn, adamw(1e-3), precision="bf16")
    compiled = gpu_program(step, params, batch, mesh="sequence=8", rules=llama.SHARDING)
    assert compiled.launch_counts["cuDNN attention"] == LAYERS * 2 * (3 + 7 * 2)
    assert compiled.host_waits == 0
    assert {transfer.kind for transfer in compiled.transfers} == {"collective-permute", "all-reduce"}
    in_loops = [transfer for transfer in compiled.transfers if transfer.times >= 6]
    assert len(in_loops) >= 2  # of the forward and of the backward pass
    assert all(transfer.launches for transfer in in_loops)
    assert sum(transfer.products for transfer in in_loops) >= 4  # two kernels in each pass
    arrays = [array for launch in compiled.launches for array in launch.instruction.results]
    assert not any(len(x.shape) > 1 and not any(n % chunk for n in x.shape[-2:]) for x in arrays)  # no scores
    assert {x.dtype for x in arrays if x.shape == (LAYERS, 1, 2 * chunk, HEADS, WIDTH // HEADS)} == {"bf16"}  # outputs
