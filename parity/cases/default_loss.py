"""The loss of a module that comes without one, in both frameworks.

It is the module's own if that returns a scalar, alone or as "loss". Otherwise it is the mean squared distance of its
floating-point outputs from fixed targets: the cosines of 1, 2, 3, … along the axes of a row, in units of 1/64, from
another angle on for each output's name. Each element of a row then has a gradient of its own, and rows can be
reordered.
"""

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxtrain.errors import UserError
from parity.cases.named_outputs import named_outputs


def in_torch(outputs: Any, rows: int | None) -> Any:
    """Return the loss of a PyTorch module's outputs.

    Args:
      outputs: What the module returns.
      rows: Rows of the batch; None if its arrays have no common first axis.

    Raises:
      UserError: No output is floating-point.
    """
    import torch

    named = named_outputs(outputs)
    own = _own(named)
    if own is not None:
        return own
    real = {name: torch.view_as_real(x) if x.is_complex() else x for name, x in named.items()}
    floating = {name: x for name, x in real.items() if x.is_floating_point()}
    wide = {name: x.to(torch.promote_types(x.dtype, torch.float32)) for name, x in floating.items()}
    return _distance(wide, rows, lambda targets, like: torch.tensor(targets, dtype=like.dtype))


def in_jax(outputs: Any, rows: int | None) -> Any:
    """Return the loss of an imported module's outputs, as `in_torch`."""
    import jax.numpy as jnp

    named = named_outputs(outputs)
    own = _own(named)
    if own is not None:
        return own
    real = {name: jnp.stack([x.real, x.imag], -1) if jnp.iscomplexobj(x) else x for name, x in named.items()}
    floating = {name: x for name, x in real.items() if jnp.issubdtype(x.dtype, np.floating)}
    wide = {name: x.astype(jnp.promote_types(x.dtype, np.float32)) for name, x in floating.items()}
    return _distance(wide, rows, lambda targets, like: jnp.asarray(targets, like.dtype))


def _own(named: Mapping[str, Any]) -> Any:
    """Return the loss that a module computes; None if it computes none."""
    value = named.get("loss", named.get("") if len(named) == 1 else None)
    # Both libraries write their dtypes like this: torch.float32, float32.
    is_scalar = value is not None and getattr(value, "shape", None) == ()
    return value if is_scalar and "float" in str(value.dtype) else None


def _distance(outputs: Mapping[str, Any], rows: int | None, array: Callable[[np.ndarray, Any], Any]) -> Any:
    if not outputs:
        raise UserError("the module returns no floating-point tensor: pass torch_loss and loss_fn to model.case")
    # Added in one order on both sides.
    terms = (((x - array(_targets(name, tuple(x.shape), rows), x)) ** 2).mean() for name, x in sorted(outputs.items()))
    return sum(terms) / len(outputs)


def _targets(name: str, shape: tuple[int, ...], rows: int | None) -> np.ndarray:
    """Return the targets of an output, the same for each row."""
    of_row = (1, *shape[1:]) if shape[:1] == (rows,) else shape
    first = 1.0 + zlib.crc32(name.encode()) % 1000
    # Exact in every dtype, bfloat16 included.
    return np.round(np.cos(np.arange(first, first + np.prod(of_row))) * 64).reshape(of_row) / 64
