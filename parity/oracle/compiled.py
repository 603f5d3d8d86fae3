"""How the programs of a check are compiled: fast, since each runs for seconds at most, or as they are written."""

import functools
from collections.abc import Callable
from typing import Any

import jax

QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    # The older emitter of loops compiles in half the time.
    "xla_cpu_use_fusion_emitters": False,
}
"""XLA's options for programs on CPUs. The step of a 2-layer Llama compiles in 0.7 s, not 2.7 s, and is as fast."""


AS_WRITTEN = {"xla_disable_hlo_passes": "algsimp"}
"""XLA's options for programs whose arithmetic is not simplified: it computes x + 1e8 - 1e8 as x."""


def jit(fn: Callable[..., Any], *, optimized: bool = False, **options: Any) -> Any:
    """Return `jax.jit(fn, **options)`, compiled without costly optimizations on CPUs unless it is `optimized`.

    Convolutions in float64 that are not optimized take ten times as long.
    """
    quick = None if optimized else _options(jax.default_backend(), as_written=False)
    return jax.jit(fn, compiler_options=quick, **options)


def jit_as_written(fn: Callable[..., Any]) -> Any:
    """Return `jax.jit(fn)`, which rounds as the same operations do one by one on CPUs."""
    return jax.jit(fn, compiler_options=_options(jax.default_backend(), as_written=True))


@functools.cache
def _options(backend: str, as_written: bool) -> dict[str, Any] | None:
    options: dict[str, Any] = {**QUICK, **(AS_WRITTEN if as_written else {})}
    return {name: value for name, value in options.items() if backend == "cpu" and _is_known(name, value)} or None


def _is_known(name: str, value: Any) -> bool:
    """Return whether the installed XLA has an option: later versions have no older emitter."""
    try:
        jax.jit(lambda: 0.0, compiler_options={name: value}).lower().compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True
