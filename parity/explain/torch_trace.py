"""Record every value that PyTorch computes in training a case, with its module and line.

Nothing is annotated: a dispatch mode receives each operation of the forward pass, the backward pass and the optimizer.
An operation of the backward pass belongs to the module of the forward operation that it differentiates, which the
sequence number of its autograd node identifies. PyTorch exposes this number, the current node and the decompositions
only under private names (`torch._C._current_autograd_node`, `torch.autograd._get_sequence_nr`, `torch._decomp`).
"""

import functools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from jaxtrain.torch_internals import (
    TorchDispatchMode,
    current_autograd_node,
    get_decompositions,
    next_sequence_number,
    pytree,
)
from parity.case import Case
from parity.compare.fingerprint import Fingerprint, Sources, Trace, fingerprint
from parity.sides import torch_side
from parity.sides.jax_lines import is_of_python
from parity.sides.randomness import Masks
from parity.source import is_of_harness, source_line

aten = torch.ops.aten
DECOMPOSED = get_decompositions(
    [
        *(aten.native_layer_norm, aten.native_layer_norm_backward),
        *(aten.native_group_norm, aten.native_group_norm_backward),
        *(aten.native_batch_norm, aten._native_batch_norm_legit, aten.native_batch_norm_backward),
        *(aten.gelu, aten.gelu_backward, aten.silu, aten.silu_backward, aten.softplus, aten.softplus_backward),
        *(aten._softmax, aten._softmax_backward_data, aten._log_softmax, aten._log_softmax_backward_data),
        *(aten.nll_loss_forward, aten.nll_loss_backward, aten.nll_loss2d_forward, aten.nll_loss2d_backward),
        *(aten.mse_loss, aten.mse_loss_backward, aten.smooth_l1_loss, aten.huber_loss),
        *(aten.linalg_vector_norm, aten.addcdiv, aten.addcmul),
    ]
)
"""Fused operations that are evaluated in steps, so that a wrong epsilon differs from the addition on, not from the
mean."""

FILLED = ("new_", "empty", "zeros", "ones", "full", "rand", "bernoulli", "scalar_tensor", "arange")
"""Prefixes of operations whose values depend on no input, as do those that end in _like."""

FRAMEWORK = Path(torch.__file__).parent
INFORMATIVE = (FRAMEWORK / "optim", FRAMEWORK / "nn" / "utils")
"""Parts of PyTorch whose own lines are more informative than the calling line."""


@dataclass(frozen=True)
class Operation:
    """An operation: its stage (forward, backward, clip or update), the path of its module or "loss", and its line;
    `built` is the module with its arguments and the line that constructs it."""

    stage: str
    module: str
    name: str
    source: tuple[str, int] | None
    built: str = ""

    def __str__(self) -> str:
        return f"{self.module}: {self.name}"

    def line(self) -> str:
        """Return file, line number and text of its source."""
        return source_line(*self.source) if self.source else ""


Output = tuple[str, str]
"""A result of a training step, as (kind, name). The kinds are "loss", "raw gradient" (as differentiated), "gradient"
(as the optimizer receives it), "parameter" (new value), the names of the optimizer's state, and "buffer"."""


class Results(NamedTuple):
    """The sources of the results of a training step, and the parameters' raw gradients."""

    sources: Mapping[Output, Sources]
    gradients: Mapping[str, Fingerprint]


def torch_trace(case: Case, *, steps: int, seed: int, masks: list[Masks]) -> tuple[Trace[Operation], list["Results"]]:
    """Train in float64 as `torch_side.run` does and return every value, and the results of each step."""
    recorder = _Recorder(case.buffer_names)
    model = recorder.constructed(case.torch_model)
    watched = replace(case, torch_loss=recorder.watched(case.torch_loss), torch_model=model)
    with recorder.hooks(), sdpa_kernel(SDPBackend.MATH), recorder:
        torch_side.run(watched, "fp64", steps=steps, seed=seed, masks=masks)
    return recorder.trace, recorder.steps


def module_lines(build: Callable[[], torch.nn.Module]) -> dict[str, str]:
    """Return the lines that construct the modules of a model, by their paths.

    Args:
      build: Creates the model.
    """
    recorder = _Recorder(())
    model = recorder.constructed(build)()
    lines = {path: recorder.lines.get(module) for path, module in model.named_modules()}
    return {path: source_line(*line) for path, line in lines.items() if line is not None}


class _Recorder(TorchDispatchMode):
    """Records from the first loss on. Values are identified by their memory, which views and saved tensors share."""

    def __init__(self, shared: Collection[str]) -> None:
        super().__init__()
        self.shared = shared
        self.trace: Trace[Operation] = Trace()
        self.steps: list[Results] = []
        self.model: torch.nn.Module | None = None
        self.names: dict[torch.nn.Module, str] = {}
        self.lines: dict[torch.nn.Module, tuple[str, int] | None] = {}
        self.built: dict[str, str] = {}
        self.outputs: dict[Output, Sources] = {}
        self.gradients: dict[str, Fingerprint] = {}
        self.stage = ""
        self.modules: list[str] = []
        self.fused: list[str] = []
        self.forward: dict[int, Operation] = {}
        self.memory: dict[int, _Memory] = {}
        self.numbers: dict[float, Sources] = {}
        self.last: Sources = frozenset()

    def watched(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        def watched(model: torch.nn.Module, batch: Mapping[str, Tensor]) -> Any:
            self.stage = ""
            for tensor in batch.values():
                self._store(tensor, self.trace.add_batch(_array(tensor)))
            if self.model is None:
                self._record_inputs(model)
            self.stage = "forward"
            return loss(model, batch)

        return watched

    def constructed(self, model: Callable[[], torch.nn.Module]) -> Callable[[], torch.nn.Module]:
        """Return `model` with the lines recorded that construct its modules."""
        init = torch.nn.Module.__init__

        def recorded(module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            self.lines[module] = _line_around(module)
            init(module, *args, **kwargs)

        def constructed() -> torch.nn.Module:
            with mock.patch.object(torch.nn.Module, "__init__", recorded):
                return model()

        return constructed

    def _record_inputs(self, model: torch.nn.Module) -> None:
        self.model = model
        self.names = {module: path or type(model).__name__ for path, module in model.named_modules()}
        leaves = {module: path for module, path in self.names.items() if not any(module.children())}
        self.built = {path: _built(module, self.lines.get(module)) for module, path in leaves.items()}
        for tensor in model.parameters():
            self._store(tensor, self.trace.add_input(_array(tensor)))
        for name, buffer in model.named_buffers():
            if name in self.shared:
                self._store(buffer, self.trace.add_input(_array(buffer)))
            else:
                module, _, attribute = name.rpartition(".")
                where = Operation("forward", module or type(model).__name__, f"buffer {attribute}", None)
                self._store(buffer, self.trace.add(_array(buffer), frozenset(), where))
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            parameter.register_post_accumulate_grad_hook(functools.partial(self._record_gradient, name))

    def _record_gradient(self, name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.outputs["raw gradient", name] = self._sources(parameter.grad)
        self.gradients[name] = fingerprint(_array(parameter.grad))

    @contextmanager
    def hooks(self) -> Iterator[None]:
        def enter(module: torch.nn.Module, *_: Any) -> None:
            self.modules.append(self.names.get(module, type(module).__name__))

        def leave(*_: Any) -> None:
            self.modules.pop()

        def before(*_: Any) -> None:
            self.stage = "update"

        def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            self._record_outputs(optimizer)
            self.stage = ""

        with ExitStack() as hooks:
            for handle in (
                register_module_forward_pre_hook(enter),
                register_module_forward_hook(leave, always_call=True),
                register_optimizer_step_pre_hook(before),
                register_optimizer_step_post_hook(after),
            ):
                hooks.callback(handle.remove)
            yield

    def _record_outputs(self, optimizer: torch.optim.Optimizer) -> None:
        assert self.model is not None
        for name, p in self.model.named_parameters():
            if p.grad is not None:
                self.outputs["gradient", name] = self._sources(p.grad)
            self.outputs["parameter", name] = self._sources(p)
            for key, tensor in optimizer.state[p].items():
                if isinstance(tensor, Tensor) and tensor.shape == p.shape:
                    self.outputs[key, name] = self._sources(tensor)
        for name, buffer in self.model.named_buffers():
            self.outputs["buffer", name] = self._sources(buffer)
        self.steps.append(Results(self.outputs, self.gradients))
        self.outputs, self.gradients = {}, {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.replace("::", ".")
        if self.stage and func in DECOMPOSED:
            self.fused.append(name)
            try:
                with self:
                    return DECOMPOSED[func](*args, **kwargs)
            finally:
                self.fused.pop()
        outs = func(*args, **kwargs)
        if self.stage:
            self._record(func, name, args, kwargs, outs)
        return outs

    def _record(self, func: Any, name: str, args: Any, kwargs: Any, outs: Any) -> None:
        node = current_autograd_node()
        if node is not None and self.stage == "forward" and not _in_loss():
            self.stage = "backward"
            self.outputs["loss", ""] = self.last
        elif node is None and self.stage == "backward":
            self.stage = "clip"
        where = self._where(name, node)
        if node is None:
            self.forward[next_sequence_number() - 1] = where
        filled = name.removeprefix("aten.").startswith(FILLED) or name.endswith("_like")
        given = () if filled else pytree.tree_leaves((args, kwargs))
        sources: Sources = frozenset().union(*(self._given(x, where) for x in given))
        written = _written(func, args, kwargs)
        for tensor in written:
            self._write(tensor, self._add(tensor, sources, where))
        changed = {id(tensor) for tensor in written}
        for tensor in pytree.tree_leaves(outs):
            if isinstance(tensor, Tensor) and id(tensor) not in changed:
                made = self._add(tensor, sources, where)
                self.last = made or self.last  # the gradient of the loss, ones, is made before the backward pass
                self._store(tensor, made)

    def _where(self, name: str, node: Any) -> Operation:
        inner = f"{self.fused[0]} ({name})" if self.fused else name
        if node is not None and (forward := self.forward.get(node._sequence_nr())) is not None:
            return replace(forward, stage=self.stage, name=inner)
        outside = {"update": "optimizer", "clip": "clipping"}.get(self.stage, "loss")
        module = self.modules[-1] if self.modules else outside
        return Operation(self.stage, module, inner, _line(), self.built.get(module, ""))

    def _add(self, tensor: Tensor, sources: Sources, where: Operation) -> Sources:
        return self.trace.add(_array(tensor), sources, where)

    def _given(self, value: Any, where: Operation) -> Sources:
        """Sources of an argument. A tensor that the model holds is recorded where it is first used, a number as an
        input."""
        if isinstance(value, Tensor):
            if where.stage == "forward" and value.untyped_storage().data_ptr() not in self.memory:
                self._store(value, self._add(value, frozenset(), where))
            return self._sources(value)
        if not isinstance(value, float):
            return frozenset()
        if value not in self.numbers:
            self.numbers[value] = self.trace.add(np.asarray(value), frozenset(), None)
        return self.numbers[value]

    def _sources(self, tensor: Tensor | None) -> Sources:
        if tensor is None or (memory := self.memory.get(tensor.untyped_storage().data_ptr())) is None:
            return frozenset()
        return memory.views.get(_view(tensor), memory.sources)

    def _store(self, tensor: Tensor, sources: Sources) -> None:
        storage = tensor.untyped_storage()
        memory = self.memory.setdefault(storage.data_ptr(), _Memory(storage, sources, {}))
        memory.views[_view(tensor)] = sources

    def _write(self, tensor: Tensor, sources: Sources) -> None:
        storage = tensor.untyped_storage()
        old = self.memory.get(storage.data_ptr())
        partly = tensor.numel() * tensor.element_size() < storage.nbytes()
        rest = old.sources if old is not None and partly else frozenset()
        self.memory[storage.data_ptr()] = _Memory(storage, rest | sources, {_view(tensor): sources})


@dataclass
class _Memory:
    """Sources of a storage, which is referenced to keep its address unique; `views` has the sources of parts of it."""

    storage: torch.UntypedStorage
    sources: Sources
    views: dict[tuple[int, int], Sources]


def _view(tensor: Tensor) -> tuple[int, int]:
    return int(tensor.storage_offset()), tensor.numel()


def _array(tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return (tensor.double() if tensor.is_floating_point() else tensor).numpy()


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    written: list[Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            written.extend(x for x in pytree.tree_leaves(given) if isinstance(x, Tensor))
    return written


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _in_loss() -> bool:
    """Whether the loss is being computed; derivatives inside of it belong to the forward pass."""
    return any(frame.f_code.co_name == "watched" and frame.f_code.co_filename == __file__ for frame in _frames())


def _line() -> tuple[str, int] | None:
    for frame in _frames():
        if _is_informative(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
    return None


def _line_around(module: torch.nn.Module) -> tuple[str, int] | None:
    """The line that constructs a module, outside of its constructors."""
    constructors = True
    for frame in _frames():
        constructors = constructors and (frame.f_code.co_filename == __file__ or frame.f_locals.get("self") is module)
        if not constructors and _is_informative(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
    return None


def _built(module: torch.nn.Module, line: tuple[str, int] | None) -> str:
    arguments = repr(module).partition("\n")[0]
    return arguments if line is None else f"{arguments}, constructed at {source_line(*line)}"


@functools.cache
def _is_informative(file: str) -> bool:
    path = Path(file)
    inside = path.is_relative_to(FRAMEWORK) and not any(path.is_relative_to(part) for part in INFORMATIVE)
    return not inside and not is_of_harness(file) and path.is_absolute() and not is_of_python(file)
