"""Long attention that cuDNN has no kernel for: kernels of our own, whose traffic is that of their arrays."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jaxtrain.cost.gpu import TARGETS, compile_for_gpu
from jaxtrain.models.attention import attention

pytestmark = pytest.mark.slow
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
