"""Imported models of published families train as PyTorch does, by the harness."""

from typing import Any

import jax
import numpy as np
import pytest
import torch

import jaxtrain as jt
from parity import AdamW, Case, check
from tests.torch_import.families import FAMILIES, ROWS

SLOW = ("image_network", "gpt2", "llama", "bert", "t5", "vit", "lstm")


def case_of(name: str) -> Case:
    """Return the case of a family: the imported module beside the module itself."""
    family = FAMILIES[name]
    torch.manual_seed(0)
    model = jt.from_torch(family.module(), family.inputs(0))

    def torch_loss(module: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        return sum((x * slopes(x, torch.tensor)).sum() for x in module(**batch)), ROWS

    def loss(outputs: Any, batch: Any) -> jt.Loss:
        return jt.Loss(sum((x * slopes(x, np.asarray)).sum() for x in jax.tree.leaves(outputs)), ROWS)

    return Case.of_import(
        name,
        model,
        torch_model=family.module,
        torch_loss=torch_loss,
        loss_fn=model.loss(loss),
        batch=lambda seed, rows: family.inputs(seed),
        rows=ROWS,
        optimizer=AdamW(lr=1e-3),
        clip_norm=1.0,
    )


def slopes(x: Any, array: Any) -> Any:
    """Return the slope of the loss for each element of an output."""
    return array(np.cos(np.arange(1.0, 1.0 + np.prod(x.shape))).reshape(x.shape), dtype=x.dtype)


def hold(name: str, *precisions: str) -> None:
    case = case_of(name)
    for precision in precisions:
        verdict = check(case, precision, steps=3, locate=precision == "fp64")
        assert verdict.passed, verdict.lines


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_imported_models_train_as_in_pytorch(name: str) -> None:
    hold(name, "fp64")


@pytest.mark.nightly
@pytest.mark.parametrize("name", FAMILIES)
def test_all_imported_families_train_as_in_pytorch_in_every_precision(name: str) -> None:
    hold(name, "fp64", "fp32", "bf16")
