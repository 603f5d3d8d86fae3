"""What the files of models contain besides the modules' functions; the emitter copies it, with these line lengths."""

from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
Tensors = dict[str, Any]


def of(tensors: Tensors, path: str) -> Tensors:
    """Return the tensors of a submodule, by their names in it."""
    start = f"{path}."
    return {k[len(start) :]: x for k, x in tensors.items() if k.startswith(start)}


def joined(tensors: Tensors) -> Tensors:
    """Return nested dicts as one, with the keys joined by dots."""
    found: Tensors = {}
    for name, x in tensors.items():
        inner = joined(x) if isinstance(x, dict) else {"": x}
        found |= {f"{name}.{key}".strip("."): value for key, value in inner.items()}
    return found


class Keys:
    """Keys of a pass, one for each operation that draws random numbers."""

    def __init__(self, rng: Array | None, drawn: Any = 0) -> None:
        self.rng, self.drawn = rng, drawn

    def __next__(self) -> Array | None:
        key = None if self.rng is None else jax.random.fold_in(self.rng, self.drawn)
        self.drawn = self.drawn + 1
        return key

    def layer(self, i: Array, count: int) -> "Keys":
        """Return the keys of layer i of a loop whose layers take `count` keys each."""
        return Keys(self.rng, self.drawn + i * count)


LAYERS: dict[str, tuple[str, range]] = {}


def stacked(tensors: Tensors) -> Tensors:
    """Return PyTorch's parameters or buffers with those of repeated layers stacked."""
    tensors = {name: jnp.asarray(x) for name, x in tensors.items()}
    for path, (layer, numbers) in LAYERS.items():
        for name in of(tensors, layer.format(numbers[0])):
            parts = [tensors.pop(f"{layer.format(i)}.{name}") for i in numbers]
            tensors[f"{path}.{name}"] = jnp.stack(parts)
    return tensors


def unstacked(tensors: Tensors) -> Tensors:
    """Return tensors, and those of each repeated layer by PyTorch's names."""
    found = dict(tensors)
    for path, (layer, numbers) in LAYERS.items():
        for name, x in of(tensors, path).items():
            for i, number in enumerate(numbers):
                part = jax.lax.index_in_dim(x, i, keepdims=False)
                found[f"{layer.format(number)}.{name}"] = part
    return found
