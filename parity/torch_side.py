"""The reference: a training loop as PyTorch's users write it, watched through the optimizer's own hooks.

It runs on the CPU wherever it runs, so that the reference is the same on every machine.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from jaxtrain.errors import UserError
from parity.case import Case
from parity.randomness import GivenMasks, Masks, reordered
from parity.record import Record, Snapshot, Tensors

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
WHOLE = {"fp64": torch.float64, "bf16_params": torch.bfloat16}
"""Model and batch are taken to it, as `model.to(dtype)` does."""


def initial_weights(case: Case, seed: int) -> Tensors:
    """The float32 weights, and buffers, that every run of `case` from `seed` starts with."""
    return {name: tensor.numpy() for name, tensor in seeded_model(case, seed).state_dict().items()}


def run(
    case: Case,
    precision: str,
    *,
    accumulate: int = 1,
    steps: int = 20,
    seed: int = 0,
    masks: Sequence[Masks] | None = None,
    reorder: int | None = None,
    skip: frozenset[int] = frozenset(),
) -> Record:
    """Train for `steps` windows of `accumulate` micro-batches each.

    `masks`, of each micro-batch, are what its dropout keeps; PyTorch draws its own if none are given. `reorder`, a
    seed, permutes the rows of every micro-batch: the same mathematics, rounded otherwise. `skip`: the steps whose
    update is left out, as a run that overflowed there left it out. Raises `UserError` where the micro-batches of a
    window weigh differently, and where the masks are not those that the model needs.
    """
    model = seeded_model(case, seed)
    model = model.to(WHOLE.get(precision, torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), **asdict(case.optimizer))
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    autocast = torch.autocast("cpu", AUTOCAST[precision]) if precision in AUTOCAST else nullcontext()
    first = _FirstUpdate(case, model, optimizer)
    losses, scales = [], [scaler.get_scale()]

    for step, window in enumerate(_windows(case, precision, accumulate, steps, seed, masks, reorder)):
        optimizer.zero_grad()
        window_loss, weights = torch.zeros([]), set()
        for micro_batch, kept in window:
            with autocast, nullcontext() if kept is None else GivenMasks(kept):
                total, weight = case.torch_loss(model, micro_batch)
                loss = total / weight / accumulate
            scaler.scale(loss).backward()
            window_loss = window_loss + loss.detach()
            weights.add(int(weight))
        _check_alike(weights, case)
        scaler.unscale_(optimizer)
        if case.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
        if step not in skip:
            scaler.step(optimizer)
        scaler.update()
        losses.append(window_loss.item())
        scales.append(scaler.get_scale())

    last = _snapshot(case, model, optimizer)
    return Record(np.array(losses), first.grads, first.snapshot or last, last, np.array(scales))


class _FirstUpdate:
    """Listens to an optimizer: what its first update was fed (NaN until there is one) and what it made.

    The hooks run inside `optimizer.step()`, which GradScaler does not call where it skips.
    """

    def __init__(self, case: Case, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.grads = {name: np.full(p.shape, np.nan) for name, p in model.named_parameters()}
        self.snapshot: Snapshot | None = None

        def fed(*_: Any) -> None:
            if self.snapshot is None:
                self.grads = {name: _array(p, p.grad) for name, p in model.named_parameters()}

        def made(*_: Any) -> None:
            self.snapshot = self.snapshot or _snapshot(case, model, optimizer)

        optimizer.register_step_pre_hook(fed)
        optimizer.register_step_post_hook(made)


def seeded_model(case: Case, seed: int) -> torch.nn.Module:
    """The case's model in training mode, its weights drawn from `seed`; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return case.torch_model().train()


def _windows(
    case: Case,
    precision: str,
    accumulate: int,
    steps: int,
    seed: int,
    masks: Sequence[Masks] | None,
    reorder: int | None,
) -> Iterator[list[tuple[dict[str, torch.Tensor], Masks | None]]]:
    """The micro-batches of each window, with their dropout masks."""
    shuffle = None if reorder is None else np.random.default_rng(reorder)
    for step, batch in enumerate(case.batches(seed, steps)):
        # Within micro-batches, of which BatchNorm takes the statistics.
        rows = np.arange(case.rows).reshape(accumulate, -1)
        orders = rows if shuffle is None else shuffle.permuted(rows, axis=1)
        window = []
        for i, order in enumerate(orders, start=step * accumulate):
            kept = None if masks is None else masks[i]
            if kept is not None and shuffle is not None:
                kept = reordered(kept, order % len(order))
            window.append(({name: _tensor(x[order], precision) for name, x in batch.items()}, kept))
        yield window


def _tensor(array: np.ndarray, precision: str) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.to(WHOLE[precision]) if tensor.is_floating_point() and precision in WHOLE else tensor


def _check_alike(weights: set[int], case: Case) -> None:
    # The loop's mean over k is the window's mean only then.
    if len(weights) > 1:
        raise UserError(f"micro-batches of {case.name} weigh {sorted(weights)}: draw batches that split evenly")


def _snapshot(case: Case, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Snapshot:
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    names = [] if case.buffers is None else [param.name for param in case.buffers.params.values()]
    return Snapshot(
        params={name: _array(p, p) for name, p in params.items()},
        mu={name: _array(p, optimizer.state[p].get("exp_avg")) for name, p in params.items()},
        nu={name: _array(p, optimizer.state[p].get("exp_avg_sq")) for name, p in params.items()},
        buffers={name: _array(buffers[name], buffers[name]) for name in names},
    )


def _array(p: torch.Tensor, tensor: torch.Tensor | None) -> np.ndarray:
    """A copy of `tensor`; zeros like `p` for the gradient and the moments of a parameter the loss does not reach."""
    tensor = (torch.zeros_like(p) if tensor is None else tensor).detach()
    # NumPy has no bfloat16, all of which float32 holds.
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy().copy()
