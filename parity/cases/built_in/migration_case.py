"""A run of GPT-2 that PyTorch began: stopped at step 50, saved, read by `jaxtrain.interop`, continued by both."""

import copy
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import optax
import torch
from torch.optim.lr_scheduler import OneCycleLR

from jaxtrain.interop import TorchRun, read_torch, torch_run
from jaxtrain.step import train_step
from parity.case import Case
from parity.cases.built_in import gpt2_case
from parity.optimizer import ADAM_MOMENTS, Optimizer
from parity.sides.torch_side import model_of

STOPPED, LAST = 50, 100
CONFIG = replace(gpt2_case.CONFIG, n_layer=1)


def case(rows: int = 16) -> Case:
    """Return AdamW with OneCycleLR, which also changes the momentum, from step 50 of 100 on, for any seed of
    weights."""
    begun = gpt2_case.case(CONFIG, reference=CONFIG, rows=rows)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        _train(begun, path)
        saved = torch.load(path, weights_only=True)
        run = torch_run(read_torch(path), begun.names, begun.params_like)
        optimizer = _from(run, begun)

    def torch_model() -> torch.nn.Module:
        model = begun.torch_model()
        model.load_state_dict(saved["model"])
        return model

    def resumed(optimizer: torch.optim.Optimizer) -> OneCycleLR:
        scheduler = OneCycleLR(optimizer, 3e-3, total_steps=LAST)
        # A copy: PyTorch's optimizer stores the given step counts and updates them in place.
        optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        scheduler.load_state_dict(saved["scheduler"])
        return scheduler

    both = Optimizer("AdamW", _adamw, optimizer, ADAM_MOMENTS, resumed)
    return replace(begun, name="migration", torch_model=torch_model, optimizer=both, clip_norm=0.44)


def _adamw(params: Iterable[tuple[str, torch.nn.Parameter]]) -> torch.optim.AdamW:
    # With the default eps, Adam amplifies the gradient of the key bias, which is rounding noise.
    return torch.optim.AdamW(params, eps=1e-5, weight_decay=0.1)


def _train(case: Case, path: Path) -> None:
    """Run PyTorch up to step 50 and save a checkpoint as in its tutorials."""
    model = model_of(case)
    optimizer = _adamw(model.named_parameters())
    scheduler = OneCycleLR(optimizer, 3e-3, total_steps=LAST)
    for batch in case.batches(0, STOPPED):
        optimizer.zero_grad()
        total, weight = case.torch_loss(model, {name: torch.from_numpy(x) for name, x in batch.items()})
        (total / weight).backward()
        optimizer.step()
        scheduler.step()
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    torch.save({name: part.state_dict() for name, part in parts.items()}, path)


def _from(run: TorchRun, case: Case) -> optax.GradientTransformation:
    """The optimizer of the run, initialized with its state in the dtype of the parameters."""
    optimizer = run.optimizer()
    done = run.state(train_step(case.loss_fn, optimizer)).opt_state

    def init(params: Any) -> Any:
        return jax.tree.map(lambda fresh, x: x.astype(fresh.dtype), optimizer.init(params), done)

    return optax.GradientTransformationExtraArgs(init, optimizer.update)
