"""Imported modules beside PyTorch, in float64: outputs, gradients of all parameters and buffers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils import _pytree

from jaxtrain.torch_import import ImportedModel, from_torch


class Differences(NamedTuple):
    """Largest differences, relative to the largest value of the tensor, of a gradient at least of all gradients."""

    outputs: float
    grads: float
    state: float


class Function(torch.nn.Module):
    """A function as a module, with parts and a parameter `w`, a float64 vector."""

    def __init__(self, fn: Callable[..., Any], **parts: torch.nn.Module) -> None:
        super().__init__()
        self.fn, self.w = fn, torch.nn.Parameter(torch.linspace(-1.0, 1.0, 3, dtype=torch.float64))
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: torch.Tensor) -> Any:
        return self.fn(self, x)


def batch_of(*shape: int) -> np.ndarray:
    """Return a batch of standard normal numbers in float64, the same ones for a shape."""
    return np.random.default_rng(0).standard_normal(shape)


def compared(module: torch.nn.Module, x: Any, *, train: bool = True) -> tuple[Differences, ImportedModel]:
    """Import a float64 module and compare a pass and its gradients with PyTorch's."""
    module = module.train(train)
    with jax.enable_x64():
        model = from_torch(module, x)
        rng = jax.random.key(0) if train else None

        def run(params: Any) -> Any:
            outputs, state = model(params, x, rng, model.state)
            return weighted(jax.tree.leaves(outputs), jnp), (outputs, state)

        (_, (outputs, state)), grads = jax.jit(jax.value_and_grad(run, has_aux=True))(model.params)
        outputs, state, grads = jax.device_get((jax.tree.leaves(outputs), state or {}, grads))
    # The module itself: a copy would not copy the functions that it holds.
    module.zero_grad()
    expected = _pytree.tree_leaves(module(*[torch.tensor(x)] if isinstance(x, np.ndarray) else map(torch.tensor, x)))
    weighted([y for y in expected if isinstance(y, torch.Tensor)], torch).backward()
    return (
        Differences(
            max(_relative(a, b.detach().numpy()) for a, b in zip(outputs, expected, strict=True)),
            _worst_gradient(grads, module),
            max([0.0, *(_relative(value, module.get_buffer(name).numpy()) for name, value in state.items())]),
        ),
        model,
    )


def weighted(values: Any, numpy: Any) -> Any:
    """Return a scalar with a different slope for each element."""
    return sum(((y * slopes(y, numpy.asarray)).sum() for y in values), 0.0)


def slopes(x: Any, array: Callable[..., Any]) -> Any:
    """Return the slope of `weighted` for each element of x, in PyTorch in its dtype."""
    # In JAX in the default dtype: the harness lifts a float32 result to float64, but no constant rounded before.
    dtype = {"dtype": x.dtype} if isinstance(x, torch.Tensor) else {}
    return array(np.cos(np.arange(1.0, 1.0 + np.prod(x.shape))).reshape(x.shape), **dtype)


def _worst_gradient(grads: Any, module: torch.nn.Module) -> float:
    params = dict(module.named_parameters())
    assert grads.keys() == params.keys()
    expected = {n: np.zeros(p.shape) if p.grad is None else p.grad.numpy() for n, p in params.items()}
    scale = max((np.abs(g).max() for g in expected.values()), default=0.0)
    return max([0.0, *(float(np.abs(grads[n] - g).max() / (scale or 1.0)) for n, g in expected.items())])


def _relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max() / (np.abs(theirs).max() or 1.0)) if theirs.size else 0.0
