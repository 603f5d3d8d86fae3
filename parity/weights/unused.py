"""Parameters of PyTorch that the loss does not depend on, and buffers that it does not change."""

from collections.abc import Collection
from dataclasses import replace

import torch

from parity.case import Case
from parity.oracle.in_torch import InFloat64
from parity.sides.torch_side import in_dtype, seeded_model, tensor, trained_parameters


def unused_parameters(case: Case) -> set[str]:
    """Return the names of the trained parameters that have no gradient in the case's first batch."""
    batch = {name: tensor(x, "fp64") for name, x in case.batch(0, case.rows).items()}
    with seeded_model(case, 0) as model:
        in_dtype(case, model, torch.float64)
        with torch.random.fork_rng(devices=[]), InFloat64():
            total, _ = case.torch_loss(model, batch)
            total.backward()
        return {name for name, p in trained_parameters(case, model) if p.requires_grad and p.grad is None}


def constant_buffers(case: Case) -> set[str]:
    """Return the names of the buffers that the case's first batch does not change, such as a mask."""
    batch = {name: tensor(x, "fp64") for name, x in case.batch(0, case.rows).items()}
    with seeded_model(case, 0) as model:
        in_dtype(case, model, torch.float64)
        before = {name: x.clone() for name, x in model.named_buffers()}
        with torch.random.fork_rng(devices=[]), InFloat64():
            case.torch_loss(model, batch)
        return {name for name, x in model.named_buffers() if name in before and torch.equal(x, before[name])}


def without_tensors(case: Case, names: Collection[str]) -> Case:
    """Return the case with these parameters and buffers as constants, which are neither trained nor compared."""

    def torch_model() -> torch.nn.Module:
        model = case.torch_model()
        for name in names:
            path, _, own = name.rpartition(".")
            module = model.get_submodule(path)
            value = getattr(module, own).detach()
            delattr(module, own)
            module.register_buffer(own, value, persistent=False)
        return model

    return replace(case, torch_model=torch_model)
