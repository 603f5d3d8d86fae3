"""A module of anybody's beside its import: right, refused or wrong.

The judge is PyTorch's own module, run on another batch than the example: outputs, gradients with a weight of its own on
every element, and the buffers after two calls.
"""

import json
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils import _pytree

from jaxtrain import UserError
from jaxtrain.torch_import import from_torch
from tests.torch_import.reference import weighted

BARS = {torch.float64: 1e-9, torch.float32: 2e-3}
"""Largest difference, relative to the largest element of a tensor, of a gradient to that of all gradients. In float32
rounding is amplified by what a module does: that bar is for another number system or another branch."""


def judged(
    factory: Callable[[], tuple[torch.nn.Module, Any]], *, dtype: torch.dtype = torch.float64, bar: float | None = None
) -> str:
    """Return "proved", "refused: …" with the message, "wrong: …" with the tensors that differ, or "invalid: …".

    A module that PyTorch cannot run or differentiate is invalid.

    Args:
      factory: Makes the module and an example batch.
      dtype: PyTorch's default dtype meanwhile, and that of the batch's floats.
      bar: The largest difference; None for that of `BARS`.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        module, example = factory()
        example = in_dtype(example, dtype)
        with jax.enable_x64(dtype == torch.float64):
            try:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always", category=UserWarning)
                    ours = imported(module, example)
            except UserError as error:
                return f"refused: {error}"
        try:
            theirs = own(module, example, [name[7:] for name in ours if name.startswith("buffer ")])
        except RuntimeError as error:
            return f"invalid: {error}"
        if any("have a gradient depends on a condition" in str(x.message) for x in caught):
            # Gradients that PyTorch has not are 0.
            ours = {name: x for name, x in ours.items() if name in theirs or x.any()}
        if not module.training:
            # A gradient of rounding alone may be exactly 0 on one side, which leaves it out.
            gradients = {name: x for name, x in {**ours, **theirs}.items() if name.startswith("gradient")}
            zeros = {name: np.zeros_like(x) for name, x in gradients.items()}
            ours, theirs = zeros | ours, zeros | theirs
        return compared(ours, theirs, BARS[dtype] if bar is None else bar)
    finally:
        torch.set_default_dtype(before)


def compared(ours: dict[str, Any], theirs: dict[str, Any], bar: float) -> str:
    """Return the outcome of values by name."""
    if ours.keys() != theirs.keys():
        return f"wrong: {sorted(ours.keys() ^ theirs.keys())}"
    gradients = [np.abs(x).max() for name, x in theirs.items() if name.startswith("gradient") and x.size]
    largest = max([x for x in gradients if np.isfinite(x)], default=1.0) or 1.0
    worst = {
        name: difference(ours[name], x, largest if name.startswith("gradient") else None) for name, x in theirs.items()
    }
    bad = {name: x for name, x in worst.items() if not x <= bar}
    return f"wrong: {json.dumps(bad)}" if bad else "proved"


def imported(module: torch.nn.Module, example: Any) -> dict[str, np.ndarray]:
    """Return outputs, gradients and buffers of the import, by name."""
    model = from_torch(module, example)
    rng = jax.random.key(0) if module.training else None
    state, found = model.state, {}
    for call, batch in enumerate(others(example)):

        def run(params: Any, batch: Any = batch, state: Any = state) -> Any:
            outputs, new = model(params, batch, rng, state)
            leaves = [x for x in jax.tree.leaves(outputs) if hasattr(x, "dtype")]
            numbers = [x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(float) for x in leaves]
            return weighted(numbers, jnp).real, (leaves, new)

        (_, (leaves, state)), grads = jax.value_and_grad(run, has_aux=True)(model.params)
        found |= {f"output {i} of call {call}": np.asarray(x) for i, x in enumerate(leaves)}
        for name, x in model.names.to_torch(grads).items():
            # A gradient that PyTorch has not is 0 in a pass whose parameters are not those of training.
            if not model.frozen(name) and (module.training or np.any(x)):
                # PyTorch's convention.
                found[f"gradient of {name}, call {call}"] = np.conj(np.asarray(x))
    buffers = {name: x.numpy().copy() for name, x in module.named_buffers()}
    if model.state_names is not None:
        buffers |= {name: np.asarray(x) for name, x in model.state_names.to_torch(state).items()}
    return found | {f"buffer {name}": x for name, x in buffers.items()}


def own(module: torch.nn.Module, example: Any, state: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the same of PyTorch's module, with its state by these names."""
    found: dict[str, np.ndarray] = {}
    for call, batch in enumerate(others(example)):
        module.zero_grad()
        leaves = [x for x in _pytree.tree_leaves(by_key(called(module, batch))) if isinstance(x, torch.Tensor)]
        total = weighted(leaves, torch)
        if total.requires_grad:
            total.real.backward()
        found |= {f"output {i} of call {call}": x.detach().numpy() for i, x in enumerate(leaves)}
        for name, p in module.named_parameters():
            if p.requires_grad and p.grad is not None and (module.training or p.grad.any()):
                found[f"gradient of {name}, call {call}"] = p.grad.numpy().copy()
    buffers = dict.fromkeys((*state, *(name for name, _ in module.named_buffers())))
    return found | {f"buffer {name}": at_path(module, name) for name in buffers}


def at_path(module: torch.nn.Module, path: str) -> np.ndarray:
    """Return a parameter, a buffer, or what an attribute has, by its path."""
    value: Any = module
    for key in path.split("."):
        if isinstance(value, dict):
            value = value[key]
        else:
            value = (
                value[int(key)] if isinstance(value, tuple | list | deque) and key.isdigit() else getattr(value, key)
            )
    return np.asarray(value.detach() if isinstance(value, torch.Tensor) else value)


def others(batch: Any) -> list[Any]:
    """Return two batches of the same kind: floats scaled, the second one with its rows in another order."""

    def scaled(x: np.ndarray) -> np.ndarray:
        return (x * 0.875).astype(x.dtype) if np.issubdtype(x.dtype, np.floating) else x

    def reversed_rows(x: np.ndarray) -> np.ndarray:
        # Integers of one axis may be offsets or lengths, which have an order.
        return x[::-1].copy() if x.ndim > 1 or (x.ndim and np.issubdtype(x.dtype, np.floating)) else x

    return [in_order(batch, scaled), in_order(batch, reversed_rows)]


def in_order(batch: Any, convert: Callable[[Any], Any]) -> Any:
    """Map a batch in PyTorch's structure: dicts keep their order."""
    if isinstance(batch, dict):
        return {key: in_order(x, convert) for key, x in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(in_order(x, convert) for x in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(in_order(x, convert) for x in batch)
    return convert(batch)


def called(module: torch.nn.Module, batch: Any) -> Any:
    """Call PyTorch's module on arrays."""
    batch = in_order(batch, torch.tensor)
    if isinstance(batch, dict):
        return module(**batch)
    return module(*batch) if isinstance(batch, tuple | list) else module(batch)


def by_key(outputs: Any) -> Any:
    """Return dicts in the order of their keys, as JAX's trees are."""
    if isinstance(outputs, dict):
        return tuple(by_key(outputs[key]) for key in sorted(outputs))
    return tuple(map(by_key, outputs)) if isinstance(outputs, tuple | list) else outputs


def in_dtype(batch: Any, dtype: torch.dtype) -> Any:
    """Return a batch whose floats have a dtype."""
    to = np.float64 if dtype == torch.float64 else np.float32
    return in_order(batch, lambda x: x.astype(to) if np.issubdtype(x.dtype, np.floating) else x)


def difference(ours: np.ndarray, theirs: np.ndarray, scale: float | None = None) -> float:
    """Return the largest difference; where both are NaN there is none."""
    if ours.shape != theirs.shape:
        return float("inf")
    if not theirs.size:
        return 0.0
    ours, theirs = (x.astype(np.complex128 if np.iscomplexobj(x) else np.float64) for x in (ours, theirs))
    same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
    with np.errstate(invalid="ignore"):
        gap = np.where(same, 0, np.nan_to_num(np.abs(ours - theirs), nan=np.inf))
    # The mean of what has been normalized is 0 but for rounding.
    scale = scale or max(float(np.abs(np.where(np.isfinite(theirs), theirs, 0)).max()), 1e-3)
    return float(gap.max() / scale)
