"""A perceptron of three layers in plain JAX, with parameters under the names of PyTorch's `Sequential`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from torch.nn import Linear, Module, Sequential

from jaxtrain.interop import LINEAR, NameTable, TorchParam

Sizes = Sequence[tuple[int, int]]


def torch_model(sizes: Sizes, activation: Callable[[], Module]) -> Sequential:
    """Return linear layers of `sizes` with an activation between them."""
    first, *rest = (Linear(*size) for size in sizes)
    return Sequential(first, *(layer for linear in rest for layer in (activation(), linear)))


def params_like(sizes: Sizes) -> dict[str, Any]:
    """Return the abstract parameters of `forward`."""
    return {
        f"layer{i}": {
            "kernel": jax.ShapeDtypeStruct(size, np.float32),
            "bias": jax.ShapeDtypeStruct(size[1:], np.float32),
        }
        for i, size in enumerate(sizes)
    }


def torch_names(sizes: Sizes) -> NameTable:
    """Every second module of the `Sequential` is an activation."""
    layers = range(len(sizes))
    return NameTable(
        {f"layer{i}/kernel": TorchParam(f"{2 * i}.weight", LINEAR) for i in layers}
        | {f"layer{i}/bias": TorchParam(f"{2 * i}.bias") for i in layers}
    )


def forward(params: Any, x: jax.Array, activation: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Return the outputs, [..., n] to [..., m]."""
    *hidden, last = (params[f"layer{i}"] for i in range(len(params)))
    for layer in hidden:
        x = activation(_linear(layer, x))
    return _linear(last, x)


def _linear(layer: Any, x: jax.Array) -> jax.Array:
    return x @ layer["kernel"] + layer["bias"].reshape((1,) * (x.ndim - 1) + (-1,))
