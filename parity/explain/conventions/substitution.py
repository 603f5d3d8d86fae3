"""Replace the calls of one function in a PyTorch loss by the values of another convention, in some modules.

A module that computes a function by several operations is recognized by its values and counts as a call.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from jaxtrain.torch_internals import DisableTorchFunction
from parity.explain.conventions.torch_functions import OperationConvention
from parity.sides.calls import Arguments, bound, called

LOSS = "loss"
"""Path of calls outside of every module."""


class Substitution(TorchFunctionMode):
    """Replaces the calls of `convention.of` in the given modules, in losses after the first `after`.

    Attributes:
      convention: The convention; None replaces nothing.
      chosen: Paths of the modules.
      after: Number of losses to leave unchanged.
      calls: The calls that occurred, as (function, module).
      arguments: Arguments of the first call that was replaced.
    """

    def __init__(self, convention: OperationConvention | None, modules: Collection[str], after: int) -> None:
        super().__init__()
        self.convention, self.chosen, self.after = convention, modules, after
        self.calls: dict[tuple[str, str], None] = {}
        self.arguments: Arguments = {}
        self.entered: list[str] = []

    def watched(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """Return `loss` with its calls recorded and replaced."""
        count = 0

        def watched(model: torch.nn.Module, batch: Mapping[str, Tensor]) -> Any:
            nonlocal count
            count += 1
            if count <= self.after:
                return loss(model, batch)
            with self._hooks(model), self:
                return loss(model, batch)

        return watched

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self._replaces(name):
            return self._replaced(bound(called(name), args, kwargs))
        return func(*args, **kwargs)

    def _replaces(self, name: str) -> bool:
        module = self.entered[-1] if self.entered else LOSS
        self.calls[name, module] = None
        return self.convention is not None and name == self.convention.of and module in self.chosen

    def _replaced(self, arguments: Arguments) -> Any:
        assert self.convention is not None
        self.arguments = self.arguments or arguments
        return self.convention.computes(called(self.convention.of), arguments)

    @contextmanager
    def _hooks(self, model: torch.nn.Module) -> Iterator[None]:
        names = {module: path or type(model).__name__ for path, module in model.named_modules()}

        def enter(module: torch.nn.Module, *_: Any) -> None:
            self.entered.append(names.get(module, type(module).__name__))

        def leave(module: torch.nn.Module, args: Any, out: Any) -> Any:
            with DisableTorchFunction():
                found = written_out(module, args, out)
                replaced = self._replaced(found[1]) if found and self._replaces(found[0]) else None
            self.entered.pop()
            return replaced

        with ExitStack() as hooks:
            hooks.callback(self.entered.clear)
            hooks.callback(register_module_forward_pre_hook(enter).remove)
            hooks.callback(register_module_forward_hook(leave).remove)
            yield


def written_out(module: torch.nn.Module, args: Any, out: Any) -> tuple[str, Arguments] | None:
    """Return the function, with its arguments, that a module without children computes by other operations.

    >>> class Squash(torch.nn.Module):
    ...     pass
    >>> x = torch.linspace(-1, 1, 3)
    >>> written_out(Squash(), (x,), torch.nn.functional.gelu(x, approximate="tanh"))[1]["approximate"]
    'tanh'
    """
    if type(module).__module__.startswith("torch.nn") or not isinstance(out, Tensor) or not out.is_floating_point():
        return None
    if len(args) != 1 or not isinstance(args[0], Tensor) or args[0].shape != out.shape or any(module.children()):
        return None
    eps = next((getattr(module, name) for name in ("eps", "variance_epsilon") if hasattr(module, name)), None)
    weight = getattr(module, "weight", None)
    shape = () if weight is None else tuple(weight.shape)
    candidates: list[tuple[str, dict[str, Any]]] = [
        ("gelu", {"input": args[0], "approximate": "tanh"}),
        ("gelu", {"input": args[0], "approximate": "none"}),
    ]
    if eps is not None and shape == args[0].shape[-1:]:
        given = {"input": args[0], "normalized_shape": shape, "weight": weight, "eps": eps}
        candidates += [("rms_norm", given), ("layer_norm", {**given, "bias": getattr(module, "bias", None)})]
    for name, arguments in candidates:
        if torch.allclose(called(name)(**arguments), out, rtol=1e-6, atol=1e-12):
            return name, arguments
    return None
