"""Mistakes in a case that show before anything is compared."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from jaxtrain.errors import UserError
from parity.case import Case
from parity.oracle.in_torch import InFloat64
from parity.sides.nonfinite_loss import cause_of_nonfinite
from parity.sides.torch_side import checked_loss, few_threads, in_dtype, seeded_model, tensor


def check_case(case: Case) -> None:
    """Check the first batch of a case, and PyTorch's loss of it.

    Raises:
      UserError: The batch is not of arrays with as many rows, the model is no module, or PyTorch's loss is not a finite
        sum with a weight.
    """
    batch = case.batch(0, case.rows)
    check_batch(batch, case.rows)
    tensors = {name: tensor(x, "fp64") for name, x in batch.items()}
    with seeded_model(case, 0) as model:
        in_dtype(case, model, torch.float64)
        with torch.random.fork_rng(devices=[]), few_threads(model), InFloat64():
            total, weight = checked_loss(case.torch_loss(model, tensors))
    if not weight > 0:
        raise UserError(f"torch_loss returned the weight {weight:g}: return one above 0, as the number of rows")
    if not torch.isfinite(total):
        raise UserError(f"PyTorch's loss is {total.item()} in float64 too: {cause_of_nonfinite(batch)}")


def check_batch(batch: Any, rows: int) -> None:
    """Raise `UserError` if a batch is not of arrays by name, with the rows on the first axis."""
    if not isinstance(batch, Mapping) or not batch:
        what = "an empty batch" if isinstance(batch, Mapping) else type(batch).__name__
        raise UserError(f"batch returned {what}: return arrays by name, as {{'x': array}}")
    for name, x in batch.items():
        if not isinstance(x, np.ndarray) or x.dtype.kind not in "fiubc":
            kind = f"an array of {x.dtype}" if isinstance(x, np.ndarray) else f"a {type(x).__name__}"
            raise UserError(f"{name} of the batch is {kind}: return NumPy arrays of numbers")
        if x.shape[:1] != (rows,):
            shape = list(x.shape)
            raise UserError(
                f"{name} of the batch has the shape {shape}: put the {rows} rows on the first axis, or leave what is "
                "not of the rows out of the batch, closed over by both losses"
            )
