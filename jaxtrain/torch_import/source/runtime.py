"""What emitted models call besides operations."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from jaxtrain.torch_import.ops.norm import batch_norm_with_statistics
from jaxtrain.transforms import autocast_disabled


def keys_of(rng: jax.Array | None) -> Iterator[jax.Array | None]:
    """Return the keys of a pass, one for each operation that draws random numbers; without `rng` all are None."""
    if rng is None:
        return itertools.repeat(None)
    return (jax.random.fold_in(rng, i) for i in itertools.count())


def without_autocast(fn: Callable[[], jax.Array]) -> jax.Array:
    """Call a function with autocast disabled, as under `torch.autocast(enabled=False)`."""
    with autocast_disabled():
        return fn()


def of(tree: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the parameters or buffers of a submodule.

    >>> of({"mlp.fc.weight": 1, "norm.weight": 2}, "mlp")
    {'fc.weight': 1}
    """
    return {name[len(path) + 1 :]: x for name, x in tree.items() if name.startswith(f"{path}.")}


def joined(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested dicts as one, with the keys joined by dots.

    >>> joined({"mlp": {"norm": {"mean": 1}}, "count": 2})
    {'mlp.norm.mean': 1, 'count': 2}
    """
    found = {}
    for name, x in tree.items():
        inner = {f"{name}.{key}": value for key, value in joined(x).items()} if isinstance(x, Mapping) else {name: x}
        found.update(inner)
    return found


def batch_norm(
    params: Mapping[str, jax.Array],
    state: Mapping[str, jax.Array],
    x: jax.Array,
    train: bool,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`torch.nn.BatchNorm` and its new statistics, which are empty in evaluation mode."""
    mean, var = state["running_mean"], state["running_var"]
    y, _, _, new_mean, new_var = batch_norm_with_statistics(
        x, params.get("weight"), params.get("bias"), mean, var, train, momentum, eps
    )
    if not train:
        return y, {}
    count = state["num_batches_tracked"] + 1
    return y, {"num_batches_tracked": count, "running_mean": new_mean, "running_var": new_var}
