"""Modules as people write them are proved or refused by line, never silently wrong.

The judge is PyTorch's own module in float64 on another batch than the example: outputs, gradients with a weight of its
own on every element, changed buffers.
"""

import copy
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.utils import _pytree

from jaxtrain import UserError
from jaxtrain.torch_import import from_torch
from tests.torch_import.by_hand import Factory
from tests.torch_import.by_hand.generative import GENERATIVE
from tests.torch_import.by_hand.language import LANGUAGE
from tests.torch_import.by_hand.learning import LEARNING
from tests.torch_import.by_hand.science import SCIENCE
from tests.torch_import.by_hand.sequences import SEQUENCES
from tests.torch_import.by_hand.tabular import TABULAR
from tests.torch_import.by_hand.tricks import TRICKS
from tests.torch_import.by_hand.vision import VISION
from tests.torch_import.reference import weighted

STYLES: dict[str, Factory] = {
    **LANGUAGE,
    **VISION,
    **GENERATIVE,
    **TABULAR,
    **SEQUENCES,
    **SCIENCE,
    **LEARNING,
    **TRICKS,
}
BAR = 1e-9


def other(batch: Any) -> Any:
    """Return another batch of the same kind: floats scaled, rows in another order, integers among those of a row."""

    def changed(x: np.ndarray) -> np.ndarray:
        if np.issubdtype(x.dtype, np.floating):
            return (0.9 * x + 0.01 * (x != 0)).astype(np.float64)
        return x

    return jax.tree.map(changed, batch)


def in_order(batch: Any, convert: Any) -> Any:
    """Map a batch in PyTorch's structure: dicts keep their order."""
    if isinstance(batch, dict):
        return {key: in_order(x, convert) for key, x in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(in_order(x, convert) for x in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(in_order(x, convert) for x in batch)
    return convert(batch)


def called(module: torch.nn.Module, batch: Any) -> Any:
    batch = in_order(batch, torch.tensor)
    if isinstance(batch, dict):
        return module(**batch)
    return module(*batch) if isinstance(batch, tuple | list) else module(batch)


def tensors_of(outputs: Any) -> list[torch.Tensor]:
    return [x for x in _pytree.tree_leaves(by_key(outputs)) if isinstance(x, torch.Tensor)]


def by_key(outputs: Any) -> Any:
    """Return dicts in the order of their keys, as JAX's trees are."""
    if isinstance(outputs, dict):
        return tuple(by_key(outputs[key]) for key in sorted(outputs))
    return tuple(map(by_key, outputs)) if isinstance(outputs, tuple | list) else outputs


def judged(factory: Factory) -> str:
    """Return "proved", "refused: …" or "wrong: …"."""
    torch.manual_seed(1)
    module, example = factory()
    example = jax.tree.map(lambda x: x.astype(np.float64) if np.issubdtype(x.dtype, np.floating) else x, example)
    module = in_double(module)
    train = module.training
    names = {name for name, p in module.named_parameters() if p.requires_grad}
    with jax.enable_x64():
        try:
            model = from_torch(module, example)
            batch = other(example)
            rng = jax.random.key(0) if train else None

            def run(params: Any) -> Any:
                outputs, state = model(params, batch, rng, model.state)
                return weighted([x for x in jax.tree.leaves(outputs) if hasattr(x, "dtype")], jnp), (outputs, state)

            (_, (outputs, state)), grads = jax.value_and_grad(run, has_aux=True)(model.params)
            grads = model.names.to_torch(grads)
            state = {} if model.state_names is None else model.state_names.to_torch(state)
        except UserError as error:
            return f"refused: {error}"
    state_before = {name: x.clone() for name, x in module.named_buffers()}
    module.zero_grad()
    expected = tensors_of(called(module, batch))
    total = weighted(expected, torch)
    if total.requires_grad:
        total.backward()
    found = [np.asarray(x) for x in jax.tree.leaves(outputs) if hasattr(x, "dtype")]
    if len(found) != len(expected):
        return f"wrong: {len(found)} outputs, not {len(expected)}"
    worst = {
        f"output {i}": difference(a, b.detach().numpy()) for i, (a, b) in enumerate(zip(found, expected, strict=True))
    }
    params = dict(module.named_parameters())
    largest = max([np.abs(p.grad.numpy()).max() for p in params.values() if p.grad is not None], default=1.0) or 1.0
    for name in names:
        want = np.zeros(params[name].shape) if params[name].grad is None else params[name].grad.numpy()
        ours = np.asarray(grads[name]) if name in grads else np.zeros(want.shape)
        if np.iscomplexobj(want):
            ours = ours.conj()
        worst[f"gradient of {name}"] = difference(ours, want, largest)
    for name, x in module.named_buffers():
        if name in state:
            worst[f"buffer {name}"] = difference(np.asarray(state[name]), x.detach().numpy())
        elif not torch.equal(x, state_before[name]):
            worst[f"buffer {name}"] = np.inf
    bad = {name: x for name, x in worst.items() if not x <= BAR}
    return "wrong: " + json.dumps(bad) if bad else "proved"


def in_double(module: torch.nn.Module) -> torch.nn.Module:
    """Convert a module to float64, complex numbers to complex128, and plain tensors among its attributes."""
    module._apply(lambda x: x.to(torch.complex128) if x.is_complex() else x.double() if x.is_floating_point() else x)
    return module


def difference(ours: np.ndarray, theirs: np.ndarray, scale: float | None = None) -> float:
    if ours.shape != theirs.shape:
        return float("inf")
    if not theirs.size:
        return 0.0
    both = np.isnan(ours) & np.isnan(theirs)
    same = (ours == theirs) | both
    scale = scale or np.abs(np.where(np.isfinite(theirs), theirs, 0)).max() or 1.0
    return float(np.max(np.where(same, 0, np.nan_to_num(np.abs(ours - theirs), nan=np.inf)) / scale))


if __name__ == "__main__":
    chosen = sys.argv[1:] or [*STYLES]
    for name in chosen:
        try:
            outcome = judged(STYLES[name])
        except Exception as error:
            outcome = f"CRASH {type(error).__name__}: {str(error)[:200]}"
        print(f"{name:38s} {outcome[:300]}", flush=True)
