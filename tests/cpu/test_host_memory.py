"""The process retains freed memory: the temporaries of further steps touch no new pages."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from jaxtrain.cpu.host_memory import keep_host_memory

if "keep" in sys.argv:
    assert keep_host_memory()
import jax, jax.numpy as jnp

# The product's operand and result are temporaries, 32 MiB each.
step = jax.jit(lambda x: (jnp.sin(jnp.arange(2**23, dtype=jnp.float32) * x).reshape(-1, 8) @ jnp.ones((8, 8)))[-1])
for i in range(30):  # until the heap has its final size
    step(float(i)).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for i in range(3):
    step(float(i)).block_until_ready()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 3)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_the_process_retains_a_steps_temporaries():
    faults = {
        flag: int(subprocess.run([sys.executable, "-c", PROGRAM, flag], capture_output=True, check=True).stdout)
        for flag in ("", "keep")
    }
    assert faults["keep"] < 500 < 4000 < faults[""]
