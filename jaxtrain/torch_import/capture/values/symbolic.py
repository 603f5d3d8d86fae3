"""Python arithmetic on numbers that are read from tensors, as operations on tensors."""

import operator
from typing import Any

import torch

OF_NUMBERS: dict[Any, tuple[str, dict[str, Any]]] = {
    operator.add: ("aten.add.Tensor", {}),
    operator.sub: ("aten.sub.Tensor", {}),
    operator.mul: ("aten.mul.Tensor", {}),
    operator.truediv: ("aten.div.Tensor", {}),
    operator.neg: ("aten.neg.default", {}),
    operator.mod: ("aten.remainder.Tensor", {}),
    operator.floordiv: ("aten.div.Tensor_mode", {"rounding_mode": "floor"}),
    operator.eq: ("aten.eq.Tensor", {}),
    operator.ne: ("aten.ne.Tensor", {}),
    operator.lt: ("aten.lt.Tensor", {}),
    operator.le: ("aten.le.Tensor", {}),
    operator.gt: ("aten.gt.Tensor", {}),
    operator.ge: ("aten.ge.Tensor", {}),
    operator.and_: ("aten.logical_and.default", {}),
    operator.or_: ("aten.logical_or.default", {}),
    torch.sym_not: ("aten.logical_not.default", {}),
    torch.sym_float: ("aten.clone.default", {}),
    torch.sym_max: ("aten.maximum.default", {}),
    torch.sym_min: ("aten.minimum.default", {}),
}
"""Operations of PyTorch with their keyword arguments, by the function of Python."""
