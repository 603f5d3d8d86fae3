"""The two engines: each a whole training step of a case, from the same weights, on the same batch."""

from collections.abc import Callable
from dataclasses import asdict

import jax
import numpy as np
import torch

import jaxtrain
from jaxtrain.flops import flops
from jaxtrain.optim import adamw
from parity.case import Batch, Case
from parity.torch_side import initial_weights

Step = Callable[[], float]
"""Takes one whole step, to the end of what it started, and returns its loss."""


def jax_engine(case: Case, batch: Batch) -> tuple[Step, int]:
    """(step, the FLOPs of one)."""
    options = case.optimizer
    optimizer = adamw(options.lr, *options.betas, options.eps, options.weight_decay)
    step = jaxtrain.train_step(case.loss_fn, optimizer, clip_norm=case.clip_norm)
    state = step.init(case.names.to_jax(initial_weights(case, seed=0), like=case.params_like))
    arrays = {name: x.astype(np.int32) if x.dtype == np.int64 else x for name, x in batch.items()}
    counted = flops(step.pure, state, arrays)
    compiled = step.jitted.lower(state, arrays).compile()

    def take() -> float:
        nonlocal state
        state, metrics = compiled(state, arrays)
        return float(jax.block_until_ready(metrics)["loss"])

    return take, counted


def torch_eager(case: Case, batch: Batch) -> Step:
    """PyTorch as its users run it: eager, with the fused AdamW."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = case.torch_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), **asdict(case.optimizer), fused=True)
    tensors = {name: torch.from_numpy(x) for name, x in batch.items()}

    def take() -> float:
        optimizer.zero_grad()
        total, weight = case.torch_loss(model, tensors)
        loss = total / weight
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
        optimizer.step()
        return loss.item()

    return take
