"""Compile programs with collectives for CPU devices without JAX's persistent compilation cache.

XLA:CPU orders the collectives of a program that it compiles itself. In a program that it loads from the cache the order
may differ between devices, and each then waits for another one forever.
"""

import contextlib
from collections.abc import Iterator

from jax.sharding import Mesh

from jaxtrain.compilation import without_compilation_cache


def needs_fresh_programs(mesh: Mesh | None) -> bool:
    """Return whether programs for `mesh` must not come from the persistent cache: it has several CPU devices."""
    return mesh is not None and mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"


@contextlib.contextmanager
def bypass_compilation_cache(mesh: Mesh | None) -> Iterator[None]:
    """Compile within the context without the persistent compilation cache, if `mesh` has several CPU devices.

    For other meshes, and for None, the context does nothing. Contexts may be nested and overlap between threads; the
    last one that ends restores the setting. `shard` enters it by itself whenever a step is compiled; enter it around
    other programs that compute on sharded arrays.

    >>> import jax
    >>> from jaxtrain.distributed import make_mesh
    >>> with bypass_compilation_cache(make_mesh("data=1", jax.devices()[:1])):
    ...     jax.config.jax_enable_compilation_cache
    True
    """
    if not needs_fresh_programs(mesh):
        yield
        return
    with without_compilation_cache():
        yield
