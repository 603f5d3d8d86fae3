"""Long attention that cuDNN has no kernel for: kernels of our own, whose traffic is that of their arrays."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.cost.gpu import TARGETS, compile_for_gpu, gpu_devices
from jaxtrain.distributed import make_mesh
from jaxtrain.models.attention import attention

B, T, N, K, H = 2, 2048, 4, 2, 64
PALLAS = "Pallas attention"


def compiled(device, dtype=jnp.bfloat16, **options):
    """Compile the output and the gradients of packed attention."""

    def attend(q, k, v, segments, cotangent):
        attend = partial(attention, segments=(segments, segments), causal=True, **options)
        out, vjp = jax.vjp(attend, q, k, v)
        return out, vjp(cotangent)

    shapes = [((B, T, heads, H), dtype) for heads in (N, K, K, N)]
    shapes.insert(3, ((B, T), np.int32))
    arrays = [jax.ShapeDtypeStruct(*shape, sharding=SingleDeviceSharding(device)) for shape in shapes]
    return compile_for_gpu(lambda: jax.jit(attend).lower(*arrays), TARGETS["h100"])


def test_packed_windows_with_a_soft_cap_are_three_kernels(gpus):
    """They read and write at most 1.7 times the bytes of the arrays, and keep no scores."""
    (device,) = gpus(9)
    program = compiled(device, window=256, softcap=50.0)
    assert program.launch_counts[PALLAS] == 3
    assert program.host_waits == 0
    assert sum(count for _, count in program.launch_counts.items()) <= 24
    queries, keys = (2 * B * T * heads * H for heads in (N, K))
    forward, backward = 2 * queries + 2 * keys, 4 * queries + 4 * keys
    assert program.moved_bytes <= 1.7 * (forward + backward)
    assert program.temporary_bytes <= 0.1 * forward
    assert not any(array.shape[-2:] == (T, T) for launch in program.launches for array in launch.instruction.results)


def test_wide_heads_fit_the_smallest_shared_memory():
    """Compute capability 8.9 has 99 KiB for a block of threads; XLA refuses a kernel that needs more."""
    pytest.importorskip("jax_plugins.xla_cuda12")
    target = dataclasses.replace(TARGETS["a100"], capability=(8, 9), shared_memory=102400)
    shape = jax.ShapeDtypeStruct(
        (1, 512, 2, 256), jnp.bfloat16, sharding=SingleDeviceSharding(gpu_devices(target, 1)[0])
    )

    def loss(q, k, v):
        return attention(q, k, v, causal=True, softcap=50.0).astype(np.float32).sum()

    program = compile_for_gpu(lambda: jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(shape, shape, shape), target)
    assert program.launch_counts[PALLAS] == 3


def test_shard_map_has_kernels_and_an_export_has_none(gpus):
    """JAX does not promise that an exported kernel runs later."""
    mesh = make_mesh("data=2", gpus(9, count=2))
    shape = jax.ShapeDtypeStruct((2, 256, 2, H), jnp.bfloat16, sharding=NamedSharding(mesh, P("data")))
    attend = partial(attention, causal=True, softcap=50.0)
    divided = jax.shard_map(attend, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    mapped = jax.jit(divided).lower(shape, shape, shape).as_text()
    shape = jax.ShapeDtypeStruct(shape.shape, shape.dtype)
    exported = export.export(jax.jit(attend), platforms=["cuda"])(shape, shape, shape).mlir_module()
    assert ["xla.gpu.triton" in text for text in (mapped, exported)] == [True, False]


def test_float32_products_have_the_precision_of_the_trace():
    """A policy sets it while a program is traced, and not while it is lowered."""

    @jax.default_matmul_precision("highest")
    def attend(q):
        return attention(q, q, q, causal=True, softcap=50.0)

    traced = jax.jit(attend).trace(jax.ShapeDtypeStruct((1, 1024, 2, H), np.float32))
    text = traced.lower(lowering_platforms=("rocm",)).as_text()
    assert "precision = [HIGHEST, HIGHEST]" in text
    assert "precision = [DEFAULT, DEFAULT]" not in text
