"""Compute PyTorch code in float64, whatever dtypes it requests, when operations are dispatched."""

import functools
from typing import Any

import torch

from jaxtrain.errors import UserError
from jaxtrain.torch_internals import TorchDispatchMode
from parity.oracle.literal import written_number

aten = torch.ops.aten

TORCH_WIDER = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
}


class InFloat64(TorchDispatchMode):
    """Makes PyTorch compute in float64 whatever is requested in float32, float16 or bfloat16, while entered.

    It requires a model and a batch in float64. Conversions, `dtype=` of factories and reductions, autocast regions, the
    default dtype, tensors in a lower dtype and a backward pass run inside are all converted.

    Raises:
      UserError: A float32 tensor is written to or trained, or the bits of a float are read.

    >>> x = torch.ones(2, dtype=torch.float64)
    >>> with InFloat64():
    ...     (x.float() + torch.ones(2, dtype=torch.bfloat16) / 3).dtype
    torch.float64
    """

    def __enter__(self) -> "InFloat64":
        self.default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)  # the dtype of `torch.ones(2)` and of a quotient of integers
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        torch.set_default_dtype(self.default)
        super().__exit__(exc_type, exc_value, traceback)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        float8 = next((kind for kind in types if kind.__module__.startswith("torchao.")), None)
        if float8 is not None:
            with InFloat64():  # the operations that one of a quantized tensor consists of
                return float8.__torch_dispatch__(func, types, args, kwargs)
        _check_liftable(func, args, kwargs)
        if func is aten.view.dtype:
            return func(*args, **kwargs)
        args, kwargs = _lifted(args), {name: _lifted(x) for name, x in kwargs.items()}
        if func is aten.lift_fresh.default and args[0].ndim == 0 and args[0].is_floating_point():
            # `torch.tensor(0.1, dtype=torch.float32)` has already rounded its value.
            return func(torch.full_like(args[0], written_number(args[0].item())))
        return func(*args, **kwargs)


def _lifted(x: Any) -> Any:
    """An argument of an operation, or the elements of a list or tuple; `tree_map` would take most of a step's time."""
    if isinstance(x, torch.Tensor):
        if x.dtype not in TORCH_WIDER:
            return x
        if x.requires_grad:
            raise UserError(f"a {_shortly(x)} is trained in the float64 run: make it a parameter of the model")
        return x.to(TORCH_WIDER[x.dtype])
    if isinstance(x, torch.dtype):
        return TORCH_WIDER.get(x, x)
    return type(x)(map(_lifted, x)) if type(x) in (list, tuple) else x


@functools.cache
def _written_names(func: Any) -> tuple[str, ...]:
    """The names of the arguments that an operation writes to."""
    arguments = func._schema.arguments
    return tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)


def _check_liftable(func: Any, args: Any, kwargs: Any) -> None:
    written = _written_names(func)
    if not written and func is not aten.view.dtype:
        return
    names = [argument.name for argument in func._schema.arguments]
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    if func is aten.view.dtype:
        bits_of_a_number = (
            arguments["self"].is_floating_point() and arguments["dtype"].itemsize < arguments["self"].itemsize
        )
        if arguments["dtype"] in TORCH_WIDER or bits_of_a_number:
            raise UserError(
                f"{func} to {arguments['dtype']} reads the bits of a number, which differ in float64: "
                "compute the value instead"
            )
    for name in written:
        x = arguments.get(name)
        if isinstance(x, torch.Tensor) and x.dtype in TORCH_WIDER:
            raise UserError(f"{func} writes to a {_shortly(x)} in the float64 run: make it a buffer of the model")


def _shortly(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} tensor {list(x.shape)}"
