"""PyTorch's side of a check: the plain run, and the runs that measure its noise."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from parity.case import Case
from parity.compare.trajectory import JUDGED, RUNS
from parity.record import Record, Tensors
from parity.settings import Settings, in_double
from parity.unexercised.coverage import Coverage

if TYPE_CHECKING:
    from parity.sides.randomness import Masks

REORDERINGS = 3
"""Number of PyTorch's runs over permuted rows. The farthest of them and the plain run measure a precision's noise.

Where rows cannot be permuted (a single row, or rows that are folded into others before a dropout), runs from weights
one ulp off take their place. They are not used everywhere: one ulp of float32 is an additional error of the inputs,
which doubles the noise of the MLP's parameters and would hide smaller bugs.
"""


@dataclass(frozen=True)
class Reference:
    """PyTorch's side of a check.

    Attributes:
      weights: Initial weights and buffers.
      theirs: The plain run.
      reordered: Runs over permuted rows.
      one_ulp: Runs from weights one ulp off.
      truth: The float64 run.
    """

    weights: Tensors
    theirs: Record
    reordered: Sequence[Record]
    one_ulp: Sequence[Record]
    truth: Record


def live_reference(
    case: Case, precision: str, settings: Settings, coverage: Coverage | None = None, judged: int = JUDGED
) -> Reference:
    """Run PyTorch's side; also from weights one ulp off if there are more than `judged` steps."""
    # Imported here, so that listing the cases or reporting a mistyped one is fast.
    from parity.attestation import check_matmul_precision
    from parity.sides import torch_side
    from parity.sides.randomness import dropout_masks
    from parity.sides.torch_side import Variant

    check_matmul_precision(precision)
    k, steps, seed = settings.accumulate, settings.steps, settings.seed
    masks = dropout_masks(case, precision, accumulate=k, steps=steps, seed=seed)
    torch_run = partial(torch_side.run, case, accumulate=k, steps=steps, seed=seed, masks=masks)
    weights, long = torch_side.initial_weights(case, seed), steps > judged
    if in_double(precision):
        theirs = torch_run(precision, watch=coverage)
        one_ulp = [torch_run(precision, variant=Variant(one_ulp=i)) for i in range(RUNS if long else 0)]
        return Reference(weights, theirs, [], one_ulp, truth=theirs)
    theirs = torch_run(precision)
    permuted = REORDERINGS if _permutable(masks[0], case.rows // k) else 0
    reordered = [torch_run(precision, variant=Variant(reorder=i)) for i in range(permuted)]
    one_ulp = [torch_run(precision, variant=Variant(one_ulp=i)) for i in range(int(long) if permuted else REORDERINGS)]
    return Reference(weights, theirs, reordered, one_ulp, truth=torch_run("fp64", variant=Variant(skip=theirs.skipped)))


def _permutable(masks: "Masks", rows: int) -> bool:
    """Whether the rows of a micro-batch with these dropout masks can be permuted."""
    from jaxtrain.errors import UserError
    from parity.sides.randomness import permute_masks

    try:
        permute_masks(masks, np.arange(rows))
    except UserError:
        return False
    return rows > 1
