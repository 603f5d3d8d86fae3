"""`torch.autograd.Function` as one operation with a graph of its forward pass and one of its backward pass.

`torch.export` would trace into `forward` and lose `backward`. While a module is traced, `Function.apply` calls an
operation of our own instead; its two passes are traced afterwards.
"""

import contextlib
import inspect
import traceback
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from types import FunctionType
from typing import Any

import torch
import torch.utils.checkpoint
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from jaxtrain.torch_import.capture.gradients.inner_gradients import add_node, user_line
from jaxtrain.torch_import.capture.replaced import replaced
from jaxtrain.torch_import.graph import CUSTOM
from jaxtrain.torch_import.refusals import refusal, source_line
from jaxtrain.torch_internals import plain_setup_context

_LIBRARY = torch.library.Library("jaxtrain", "DEF")
_LIBRARY.define(f"{CUSTOM.split('.')[1]}(int number, Tensor[] tensors) -> Tensor[]")
_CALLS: ContextVar[list["Call"]] = ContextVar("calls of autograd.Function in the module that is traced")


_INDEXING = ("torch._dynamo._trace_wrapped_higher_order_op", "torch._functorch.autograd_function")
"""Modules of PyTorch whose functions are an index inside `torch.vmap`, with the gradient of one."""


@torch.library.register_fake("jaxtrain::custom_function")
def _outputs(number: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the shapes and dtypes of a call's outputs."""
    call = _CALLS.get()[number]
    return list(call.forward(tensors)[: call.outputs])


@contextlib.contextmanager
def recorded_calls() -> Iterator[list["Call"]]:
    """Make each call of `Function.apply` one operation while entered, and list the calls."""
    calls: list[Call] = []
    # A class method of Python, and since PyTorch 2.14 of C.
    own = torch.autograd.Function.__dict__["apply"]

    def original(cls: Any, *args: Any) -> Any:
        return own.__get__(None, cls)(*args)

    def apply(cls: Any, *args: Any) -> Any:
        stack = "".join(traceback.format_list(traceback.extract_stack()[:-1]))
        if cls is torch.utils.checkpoint.CheckpointFunction:
            return _checkpointed(*args, source=source_line(stack))
        if cls.__module__ in _INDEXING:
            return original(cls, *args)
        if _computes_again(cls):
            return _once(cls, args)
        call, number = Call(cls, args, source_line(stack)), len(calls)
        calls.append(call)
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        # Of the function itself the results know their gradients, which `torch.autograd.grad` may ask for.
        with disable_proxy_modes_tracing():
            call.forward(tensors)
            result = original(cls, *args)
            results = (result,) if call.single else tuple(result)
            outputs = [x.view_as(x) if any(x is y for y in tensors) else x for x in results]
        add_node(torch.ops.jaxtrain.custom_function.default, (number, tensors), outputs)
        kept = tuple(x.detach() if i in call.constant else x for i, x in enumerate(outputs))
        return kept[0] if call.single else kept

    token = _CALLS.set(calls)
    try:
        with _apply(apply):
            yield calls
    finally:
        _CALLS.reset(token)


def _checkpointed(function: Any, preserve_rng_state: bool, *args: Any, source: str) -> Any:
    """Return the result of a checkpoint with `use_reentrant=True`, whose backward pass computes it again."""
    if not any(isinstance(x, torch.Tensor) and x.requires_grad for x in args):
        raise refusal(
            "torch.utils.checkpoint with use_reentrant=True has no gradient for an input without one",
            "pass use_reentrant=False",
            source,
        )
    return function(*args)


def _computes_again(function: Any) -> bool:
    """Return whether a backward pass differentiates the forward pass: that of a checkpoint or of reversible layers."""
    backward = function.backward
    names = {*backward.__code__.co_names}
    parts = [x for x in vars(backward).values() if callable(x)]
    for value in backward.__globals__.values():
        own = isinstance(value, type) and value.__module__ == function.__module__
        parts += [x for name, x in vars(value).items() if name in names] if own else []
    codes = [x.__code__ for x in parts if isinstance(x, FunctionType)]
    return "enable_grad" in names.union(*(code.co_names for code in codes))


def _once(function: Any, args: Sequence[Any]) -> Any:
    """Return the result of a forward pass with its own gradient, which the backward pass would compute again."""
    context = _Context(tuple(isinstance(x, torch.Tensor) and x.requires_grad for x in args))
    plain = function.setup_context is plain_setup_context
    with (
        torch.enable_grad(),
        replaced(torch, "no_grad", contextlib.nullcontext),
        replaced(torch, "set_grad_enabled", contextlib.nullcontext),
    ):
        return function.forward(context, *args) if plain else function.forward(*args)


@contextlib.contextmanager
def inlined_calls() -> Iterator[None]:
    """Make `Function.apply` its forward pass while entered: within a pass that is given its gradient."""

    def apply(cls: Any, *args: Any) -> Any:
        call = Call(cls, args, "")
        outputs = call.forward([x for x in args if isinstance(x, torch.Tensor)])[: call.outputs]
        return outputs[0] if call.single else outputs

    with _apply(apply):
        yield


@contextlib.contextmanager
def _apply(apply: Any) -> Iterator[None]:
    before = torch.autograd.Function.__dict__["apply"]
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = before  # type: ignore[method-assign]


class Call:
    """A call of `Function.apply`.

    Attributes:
      function: The class.
      source: Line of the call.
      single: Whether `forward` returns one tensor, not a tuple.
      outputs: Number of tensors that `forward` returns.
      floating: Whether each of them is floating-point.
      constant: Places of the outputs that `forward` marks as not differentiable.
      has_gradient: Whether `backward` returns a gradient, for each tensor of the arguments; known once it was traced.
    """

    def __init__(self, function: Any, args: Sequence[Any], source: str) -> None:
        self.function, self.source = function, source
        self._others = [None if isinstance(x, torch.Tensor) else x for x in args]
        self._places = [i for i, x in enumerate(args) if isinstance(x, torch.Tensor)]
        self.single, self.outputs, self.floating = True, 1, [True]
        self.constant = frozenset[int]()
        self.has_gradient = [True] * len(self._places)
        self._saved: list[bool] = []
        self._attributes: dict[str, Any] = {}

    def names(self) -> dict[str, Any]:
        """Return the names of the class, of the tensors that `forward` takes and of the gradients of `backward`."""
        plain = self.function.setup_context is plain_setup_context
        arguments = _names(self.function.forward, len(self._others) + plain, "x")[plain:]
        return {
            "function": f"{self.function.__module__}.{self.function.__qualname__}",
            "arguments": tuple(arguments[place] for place in self._places),
            "gradients": tuple(_names(self.function.backward, self.outputs + 1, "grad")[1:]),
        }

    def applied(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the outputs of PyTorch's own call."""
        result = self.function.apply(*self._arguments(tensors))
        return [result] if isinstance(result, torch.Tensor) else list(result)

    def forward(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the outputs, then the tensors that `backward` needs."""
        args = self._arguments(tensors)
        context = _Context(tuple(place in self._places for place in range(len(args))))
        if self.function.setup_context is plain_setup_context:
            result = self.function.forward(context, *args)
        else:
            result = self.function.forward(*args)
            self.function.setup_context(context, tuple(args), result)
        self.single = isinstance(result, torch.Tensor)
        outputs = (result,) if self.single else tuple(result)
        self.outputs, self.floating = len(outputs), [x.is_floating_point() for x in outputs]
        marked = {id(x) for x in context.non_differentiable}
        self.constant = frozenset(i for i, x in enumerate(outputs) if id(x) in marked)
        self._saved = [x is not None for x in context.saved_tensors]
        del context.non_differentiable
        # A tensor as an attribute is saved as well; only its name outlives this trace.
        self._attributes = {k: None if isinstance(v, torch.Tensor) else v for k, v in vars(context).items()}
        self._named = [k for k, v in vars(context).items() if isinstance(v, torch.Tensor)]
        saved = [x for x in context.saved_tensors if x is not None]
        return tuple(x.clone() for x in (*outputs, *saved, *(getattr(context, name) for name in self._named)))

    def _arguments(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        args = list(self._others)
        for place, tensor in zip(self._places, tensors, strict=True):
            args[place] = tensor
        return args

    def backward(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the gradients, given what `forward` saved and the gradients of its floating-point outputs."""
        given = iter(tensors)
        context = _Context(())
        vars(context).update(self._attributes)
        context.saved_tensors = tuple(next(given) if kept else None for kept in self._saved)
        for name in self._named:
            setattr(context, name, next(given))
        result = self.function.backward(context, *(next(given) if floating else None for floating in self.floating))
        grads = result if isinstance(result, tuple) else (result,)
        grads = tuple(grads[place] for place in self._places)
        self.has_gradient = [isinstance(grad, torch.Tensor) for grad in grads]
        return tuple(grad.clone() for grad in grads if grad is not None)


def _names(method: Any, count: int, default: str) -> list[str]:
    """Return the names of a method's first arguments."""
    given = [name for name, x in inspect.signature(method).parameters.items() if x.kind == x.POSITIONAL_OR_KEYWORD]
    return [*given[:count], *[default] * (count - len(given))]


class _Context:
    """What `forward` and `backward` receive as `ctx`."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[torch.Tensor | None, ...] = ()
        self.non_differentiable: tuple[torch.Tensor, ...] = ()

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        self.non_differentiable = tensors

    def save_for_forward(self, *tensors: torch.Tensor | None) -> None:
        """Of forward-mode gradients, which `backward` does not read."""

    def set_materialize_grads(self, value: bool) -> None:
        """Missing gradients are zeros here, whatever is set."""

    def mark_dirty(self, *tensors: torch.Tensor) -> None:
        raise refusal("an autograd.Function changes its input in place", "return a new tensor", user_line())
