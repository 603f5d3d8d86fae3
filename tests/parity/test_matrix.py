"""Every feature is combined with every other: precision, accumulation, remat, clipping, dropout and model.

`CELLS` holds every pair of levels of any two factors; every other combination is nightly, and so are `FP8_CELLS`, the
pairs with products in 8 bits.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from parity import check
from parity.case import Case
from parity.cases.built_in import cnn_bn_case, gpt2_case, mlp_case
from parity.settings import EXACT, FP8
from parity.sides import torch_side

STEPS = 5


class Cell(NamedTuple):
    precision: str
    accumulate: int
    remat: str
    clip: bool
    dropout: float
    case: str

    def __str__(self) -> str:
        clip, drop = "clip" if self.clip else "noclip", f"drop{self.dropout}" if self.dropout else "nodrop"
        return f"{self.case}-{self.precision}-k{self.accumulate}-remat_{self.remat}-{clip}-{drop}"


CASES: dict[str, Callable[..., Case]] = {"mlp": mlp_case.case, "cnn-bn": cnn_bn_case.case, "gpt2": gpt2_case.case}
LEVELS = (("fp64", "fp32", "bf16", "fp16"), (1, 4), ("none", "full", "dots"), (True, False), (0.0, 0.1), tuple(CASES))
ALL = [Cell(*levels) for levels in itertools.product(*LEVELS)]
CELLS = [
    Cell("fp64", 1, "dots", True, 0.1, "mlp"),
    Cell("fp64", 4, "none", True, 0.0, "cnn-bn"),
    Cell("fp64", 1, "full", False, 0.0, "gpt2"),
    Cell("fp32", 4, "none", True, 0.1, "mlp"),
    Cell("fp32", 1, "full", False, 0.0, "cnn-bn"),
    Cell("fp32", 4, "dots", False, 0.1, "gpt2"),
    Cell("bf16", 1, "full", False, 0.1, "mlp"),
    Cell("bf16", 1, "dots", True, 0.0, "cnn-bn"),
    Cell("bf16", 4, "none", False, 0.1, "gpt2"),
    Cell("fp16", 4, "full", True, 0.0, "mlp"),
    Cell("fp16", 1, "none", False, 0.1, "cnn-bn"),
    Cell("fp16", 1, "dots", True, 0.0, "gpt2"),
]
FP8_CELLS = [
    Cell(EXACT + precision, (1, 4)[(i + j) % 2], remat, (j + i // 2) % 2 == 0, (0.0, 0.1)[(i + j // 2) % 2], "gpt2")
    for (i, precision), (j, remat) in itertools.product(enumerate(FP8), enumerate(LEVELS[2]))
]
LOSS_FACTORS = {"mlp": 32, "cnn-bn": 8, "gpt2": 32}
"""Factors of the losses in fp16, with which the first loss scales overflow."""


def with_scaled_loss(case: Case, factor: int) -> Case:
    def torch_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        total, weight = case.torch_loss(model, batch)
        return total * factor, weight

    def loss_fn(*args: object) -> tuple[object, ...]:
        loss, *rest = case.loss_fn(*args)
        return loss._replace(total=loss.total * factor), *rest

    return dataclasses.replace(case, torch_loss=torch_loss, loss_fn=loss_fn, clip_norm=case.clip_norm * factor)


def pairs(cell: Cell) -> set[tuple[tuple[int, object], ...]]:
    return set(itertools.combinations(enumerate(cell), 2))


def test_every_pair_of_levels_is_in_a_cell() -> None:
    assert len(ALL) == 288
    assert set().union(*map(pairs, CELLS)) == set().union(*map(pairs, ALL))
    in_fp8 = itertools.starmap(Cell, itertools.product([EXACT + name for name in FP8], *LEVELS[1:-1], ["gpt2"]))
    assert set().union(*map(pairs, FP8_CELLS)) == set().union(*map(pairs, in_fp8))


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("name", CASES)
def test_the_fp16_cells_skip_some_steps_and_apply_others(name: str, accumulate: int) -> None:
    run = torch_side.run(
        with_scaled_loss(CASES[name](), LOSS_FACTORS[name]), "fp16", accumulate=accumulate, steps=STEPS
    )
    assert 0 in run.skipped
    assert len(run.skipped) < STEPS - 1


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, id=str(cell)) for cell in (*ALL, *FP8_CELLS)],
)
def test_jax_trains_as_pytorch_does(cell: Cell, record_property: Callable[[str, object], None]) -> None:
    case = CASES[cell.case](dropout=cell.dropout)
    if cell.precision == "fp16":
        case = with_scaled_loss(case, LOSS_FACTORS[cell.case])
    if not cell.clip:
        case = dataclasses.replace(case, clip_norm=None)
    verdict = check(case, cell.precision, accumulate=cell.accumulate, remat=cell.remat, steps=STEPS)
    for name, value in dataclasses.asdict(verdict).items():
        record_property(name, value)
    assert verdict.passed, verdict.faults
