"""The two engines: each a whole training step of a case, from the same weights, on the same batch."""

from collections.abc import Callable
from dataclasses import asdict

import jax
import torch

import jaxtrain
from jaxtrain.flops import flops
from parity import jax_side, torch_side
from parity.case import Batch, Case

Step = Callable[[], float]
"""Takes one whole step, to the end of what it started, and returns its loss."""


def jax_engine(case: Case, batch: Batch) -> tuple[Step, int]:
    """(step, the FLOPs of one)."""
    step = jaxtrain.train_step(case.loss_fn, case.optimizer.jax, clip_norm=case.clip_norm)
    state = step.init(case.tables[0].to_jax(torch_side.initial_weights(case, seed=0), like=case.params_like))
    arrays = jax_side.arrays(batch, "fp32")
    counted = flops(step.pure, state, arrays)
    compiled = step.jitted.lower(state, arrays).compile()

    def take() -> float:
        nonlocal state
        state, metrics = compiled(state, arrays)
        return float(jax.block_until_ready(metrics)["loss"])

    return take, counted


def torch_eager(case: Case, batch: Batch) -> Step:
    """PyTorch as its users run it: eager, with the fused AdamW."""
    model = torch_side.seeded_model(case, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), **asdict(case.optimizer), fused=True)
    tensors = {name: torch.from_numpy(x) for name, x in batch.items()}

    def take() -> float:
        optimizer.zero_grad()
        total, weight = case.torch_loss(model, tensors)
        loss = total / weight
        loss.backward()
        if case.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
        optimizer.step()
        return loss.item()

    return take
