"""PyTorch in float64, whatever its code asks for, as its operations are dispatched."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from jaxtrain.errors import UserError
from parity.oracle.literal import meant

aten = torch.ops.aten

TORCH_WIDER = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
}


class InFloat64(TorchDispatchMode):
    """Inside it whatever PyTorch is asked for in float32, float16 or bfloat16 comes in float64.

    For a model and a batch already in float64. Conversions, `dtype=` of factories and of reductions, autocast's
    regions, the default dtype and tensors kept in a lower dtype are all widened; a backward pass run inside, too.
    Raises `UserError` for what stays low: a float32 tensor that is written to or trained, and a look at bits.

    >>> x = torch.ones(2, dtype=torch.float64)
    >>> with InFloat64():
    ...     (x.float() + torch.ones(2, dtype=torch.bfloat16) / 3).dtype
    torch.float64
    """

    def __enter__(self) -> "InFloat64":
        self.default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)  # of `torch.ones(2)`, and of a quotient of integers
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        torch.set_default_dtype(self.default)
        super().__exit__(exc_type, exc_value, traceback)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        _check_liftable(func, args, kwargs)
        if func is aten.view.dtype:
            return func(*args, **kwargs)
        args, kwargs = tree_map(_lifted_torch, (args, kwargs))
        if func is aten.lift_fresh.default and args[0].ndim == 0 and args[0].is_floating_point():
            # What `torch.tensor(0.1, dtype=torch.float32)` had already rounded.
            return func(torch.full_like(args[0], meant(args[0].item())))
        return func(*args, **kwargs)


def _lifted_torch(x: Any) -> Any:
    if isinstance(x, torch.dtype):
        return TORCH_WIDER.get(x, x)
    if not isinstance(x, torch.Tensor) or x.dtype not in TORCH_WIDER:
        return x
    if x.requires_grad:
        raise UserError(f"a {_shortly(x)} is trained in the float64 run: make it a parameter of the model")
    return x.to(TORCH_WIDER[x.dtype])


def _check_liftable(func: Any, args: Any, kwargs: Any) -> None:
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if func is aten.view.dtype:
        bits_of_a_number = given["self"].is_floating_point() and given["dtype"].itemsize < given["self"].itemsize
        if given["dtype"] in TORCH_WIDER or bits_of_a_number:
            raise UserError(
                f"{func} to {given['dtype']} reads a number's bits, which are others in float64: compute it"
            )
    for argument in func._schema.arguments:
        x = given.get(argument.name)
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written and isinstance(x, torch.Tensor) and x.dtype in TORCH_WIDER:
            raise UserError(f"{func} writes to a {_shortly(x)} in the float64 run: make it a buffer of the model")


def _shortly(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} tensor {list(x.shape)}"
