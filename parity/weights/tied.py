"""Tied parameters of a PyTorch model: those with several names."""

import torch


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """Return {alias: name} of the parameters with several names."""
    first: dict[int, str] = {}
    every = model.named_parameters(remove_duplicate=False)
    return {name: own for name, p in every if (own := first.setdefault(id(p), name)) != name}
