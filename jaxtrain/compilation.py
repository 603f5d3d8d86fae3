"""Compilation without JAX's persistent cache, for programs that it cannot give back."""

import contextlib
import threading
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache

_lock = threading.Lock()
_depth = 0
_enabled_outside = True


@contextlib.contextmanager
def without_compilation_cache() -> Iterator[None]:
    """Compile within the context without the persistent compilation cache.

    Contexts may be nested and overlap between threads; the last one that ends restores the setting.

    >>> with without_compilation_cache():
    ...     jax.config.jax_enable_compilation_cache
    False
    """
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _depth, _enabled_outside
    with _lock:
        if _depth == 0:
            _enabled_outside = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
            _set(False)
        _depth += 1


def _leave() -> None:
    global _depth
    with _lock:
        _depth -= 1
        if _depth == 0:
            _set(_enabled_outside)


def _set(enabled: bool) -> None:
    if jax.config.jax_enable_compilation_cache != enabled:  # type: ignore[attr-defined]
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()  # JAX reads the setting once, until it is reset
