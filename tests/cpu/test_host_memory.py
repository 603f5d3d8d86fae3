"""The process retains freed memory: the temporaries of further steps touch no new pages."""

import ctypes
import platform
import subprocess
import sys

import pytest

from jaxtrain.cpu import host_memory
from jaxtrain.cpu.host_memory import keep_host_memory, runs_on_cpu

PROGRAM = """
import resource, statistics, sys
from jaxtrain.cpu.host_memory import keep_host_memory

if "keep" in sys.argv:
    assert keep_host_memory()
import jax, jax.numpy as jnp

# The product's operand and result are temporaries, 32 MiB each.
step = jax.jit(lambda x: (jnp.sin(jnp.arange(2**23, dtype=jnp.float32) * x).reshape(-1, 8) @ jnp.ones((8, 8)))[-1])
faults = []
for i in range(40):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(float(i)).block_until_ready()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
# A small allocation can split the retained block at any step, and the heap then grows once: the median omits it.
print(int(statistics.median(faults)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_the_process_retains_a_steps_temporaries():
    faults = {
        flag: int(subprocess.run([sys.executable, "-c", PROGRAM, flag], capture_output=True, check=True).stdout)
        for flag in ("", "keep")
    }
    assert faults["keep"] < 500 < 4000 < faults[""]


@pytest.mark.parametrize(
    ("platforms", "nodes", "plugin", "expected"),
    [
        (None, [], True, True),
        (None, ["nvidia0", "nvidiactl"], True, False),
        (None, ["nvidiactl"], True, True),  # a driver without a GPU
        (None, ["nvidia0"], False, True),  # JAX without a plugin for it
        (None, ["kfd"], True, False),
        (None, ["accel0"], True, False),
        ("cpu", ["nvidia0"], True, True),
        ("cpu,cuda", ["nvidia0"], True, True),
        ("cuda,cpu", [], True, False),
    ],
)
def test_settings_apply_only_where_jax_runs_on_the_cpu(platforms, nodes, plugin, expected, tmp_path, monkeypatch):
    if platforms is None:
        monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    else:
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
    for node in nodes:
        (tmp_path / node).touch()
    monkeypatch.setattr(host_memory, "_has_plugin", lambda: plugin)
    assert runs_on_cpu(tmp_path) is expected


def test_nothing_is_set_for_an_accelerator(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pytest.fail("mallopt was looked up"))
    assert keep_host_memory() is False
