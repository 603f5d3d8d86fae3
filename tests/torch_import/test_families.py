"""Imported models of published families train as PyTorch does, by the harness."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

import jaxtrain as jt
from parity import AdamW, Case, check
from tests.torch_import.families import FAMILIES
from tests.torch_import.reference import weighted


def case_of(name: str) -> Case:
    """Return the case of a family: the imported module beside the module itself."""
    family = FAMILIES[name]
    torch.manual_seed(0)
    model = jt.from_torch(family.module(), example := family.inputs(0))
    rows = len(next(iter(example.values())))

    def torch_loss(module: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        return weighted(module(**batch), torch), rows

    def loss(outputs: Any, batch: Any) -> jt.Loss:
        return jt.Loss(weighted(jax.tree.leaves(outputs), jnp), rows)

    return model.case(
        name,
        torch_loss,
        model.loss(loss),
        torch_model=family.module,
        batch=lambda seed, rows: family.inputs(seed),
        rows=rows,
        optimizer=AdamW(lr=3e-4),
        clip_norm=1.0,
    )


def hold(case: Case, precision: str, steps: int = 3) -> None:
    verdict = check(case, precision, steps=steps, locate=precision == "fp64")
    assert verdict.passed, verdict.lines


@pytest.mark.parametrize("name", ["image_network", "lstm"])
def test_imported_models_train_as_in_pytorch(name: str) -> None:
    hold(case_of(name), "fp64")


@pytest.mark.parametrize("name", ["qwen3"])
def test_imported_models_are_as_precise_as_pytorch_in_bfloat16(name: str) -> None:
    hold(case_of(name), "bf16", steps=2)


@pytest.mark.nightly
@pytest.mark.parametrize("name", FAMILIES)
def test_all_imported_families_train_as_in_pytorch_in_every_precision(name: str) -> None:
    case = case_of(name)
    hold(case, "fp64", steps=20)
    hold(case, "fp32")
    hold(case, "bf16")
