"""Costs of an assignment of tensors to leaves by the effects of both on the loss."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from jaxtrain.interop import Layout, unflatten
from parity.record import Tensors
from parity.weights.assignment import Costs, Side, Unit
from parity.weights.probe import Probe, generator, random_perturbation, relative_distance
from parity.weights.tied import tied_names


def by_values(model: torch.nn.Module, sides: Sequence[Side], probe: Probe) -> Costs:
    """Costs by the changes of the two losses, from values under which every assignment is equal."""
    flattened = {lookalikes for side in sides for lookalikes in side.flattened}
    shared = {
        unit.name: [_shared_value(unit, unit.lookalikes in flattened)] * len(unit.tensors)
        for s in sides
        for unit in s.units
    }
    state = model.state_dict()
    weights = {name: np.asarray(x, np.complex128 if x.is_complex() else np.float64) for name, x in state.items()}
    for side in sides:
        for unit in side.units:
            weights |= dict(zip(unit.tensors, shared[unit.name], strict=True))
    aliases = tied_names(model)
    trees: list[dict[str, Any]] = []
    for side in sides:
        fits = {path: next((u, ls[0]) for u in side.units if (ls := side.layouts(u, path))) for path in side.leaves}
        trees.append({path: _filled(unit, layout, shared[unit.name]) for path, (unit, layout) in fits.items()})

    def by_torch(perturbed: Tensors) -> float:
        now = {**weights, **perturbed}
        return probe.torch_loss({name: now[aliases.get(name, name)] for name in weights})

    def by_jax(side: Side | None = None, **perturbed: Any) -> float:
        now = [{**tree, **perturbed} if own is side else tree for own, tree in zip(sides, trees, strict=True)]
        params, state = [*(unflatten(tree, side.like) for tree, side in zip(now, sides, strict=True)), None][:2]
        return probe.jax_loss(params, state)

    theirs, ours = by_torch({}), by_jax()
    torch_changes: dict[str, float] = {}
    jax_changes: dict[tuple[str, bytes], float] = {}

    def costs(side: Side, unit: Unit, path: str, layouts: list[Layout]) -> list[float]:
        perturbed = [x + perturbation for x, perturbation in zip(shared[unit.name], _perturbations(unit), strict=True)]
        if unit.name not in torch_changes:
            torch_changes[unit.name] = by_torch(dict(zip(unit.tensors, perturbed, strict=True))) - theirs
        found = []
        for layout in layouts:
            leaf = _filled(unit, layout, perturbed)
            key = path, leaf.tobytes()
            if key not in jax_changes:
                jax_changes[key] = by_jax(side, **{path: leaf}) - ours
            apart = relative_distance(jax_changes[key], torch_changes[unit.name], theirs)
            # On a logarithmic scale: models that differ slightly still distinguish their tensors.
            found.append(float(np.clip(1 + np.log10(apart + 1e-12) / 9, 0, 1)))
        return found

    return costs


def _shared_value(unit: Unit, flattened: bool) -> np.ndarray:
    """The value shared by all of the unit's lookalikes: equal to its transpose, and constant over a flattened image."""
    if len(unit.shape) != 2:
        low, high = (0.2, 1.0) if len(unit.shape) < 2 else (-1.0, 1.0) / np.sqrt(np.prod(unit.shape[1:]))
        return generator(unit.lookalikes).uniform(low, high, unit.shape)
    rows, columns = sorted(unit.shape)
    x = generator(unit.lookalikes).standard_normal((rows, columns)) / np.sqrt(columns)
    x = x if unit.shape == (rows, columns) else x.T
    if rows == columns:
        x = (x + x.T) / 2
    # Either axis of a lookalike may be the flattened one.
    return np.full(x.shape, np.abs(x).mean() / np.sqrt(columns)) if flattened else x.copy()


def _perturbations(unit: Unit) -> list[np.ndarray]:
    """The perturbation of each tensor of the unit: the same for all its lookalikes, and not equal to its transpose."""
    rows, columns = sorted(unit.shape) if len(unit.shape) == 2 else (0, 0)
    perturbations = []
    for i in range(len(unit.tensors)):
        perturbation = random_perturbation(f"{unit.lookalikes} {i}", (rows, columns) if rows else unit.shape)
        perturbations.append(perturbation if perturbation.shape == unit.shape else perturbation.T)
    return perturbations


def _filled(unit: Unit, layout: Layout, tensors: Sequence[np.ndarray]) -> np.ndarray:
    layers = [layout.to_jax(x) for x in tensors]
    return np.stack(layers) if unit.stacked else layers[0]
