"""Capture a forward pass by `torch.export`.

The training graph of `torch.export` still has the regions without gradient, which are detached before PyTorch turns
operations in place into pure ones. Operations without an entry in our table are replaced by PyTorch's decompositions.
"""

import dataclasses
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree

from jaxtrain.errors import UserError
from jaxtrain.torch_import.capture.attributes import attributes_of, changed, refuse_state
from jaxtrain.torch_import.capture.autocast import Calls, calls_under_autocast, marked, without_marks_of_changed
from jaxtrain.torch_import.capture.bincount import check_bins
from jaxtrain.torch_import.capture.convert import Leaf, converted, key_of, spec_of
from jaxtrain.torch_import.capture.custom_gradients import Call, inlined_calls, recorded_calls
from jaxtrain.torch_import.capture.in_float64 import in_float64
from jaxtrain.torch_import.capture.known_values import fold_known_shapes
from jaxtrain.torch_import.capture.no_grad import detach_regions_without_gradient
from jaxtrain.torch_import.capture.structure import Structure, in_mode
from jaxtrain.torch_import.capture.tracing import tracing
from jaxtrain.torch_import.graph import Captured, Graph, ModuleCall, Spec
from jaxtrain.torch_import.ops import RANDOM, TABLE
from jaxtrain.torch_import.refusals import first_line, refusal, source_line

Origins = Mapping[str, tuple[ModuleCall, ...]]


def capture(
    structure: Structure,
    call: Callable[[torch.nn.Module, Sequence[torch.Tensor]], Any],
    inputs: Sequence[Spec],
    *,
    train: bool,
    dtype: str | None,
    ops: frozenset[str],
) -> Captured:
    """Capture a forward pass.

    Args:
      structure: The module.
      call: From (module, the batch's tensors) to the module's result.
      inputs: Shapes and dtypes of the batch's tensors. Integers are captured as int64, PyTorch's default.
      train: Whether in training mode, else in evaluation mode.
      dtype: Dtype that floating-point parameters and buffers are converted to, as `module.to(dtype)`; None for none.
      ops: Overloads that have a function beyond the table.

    Returns:
      The graph with its constants.

    Raises:
      UserError: The module cannot be imported: its control flow depends on values, an operation has no counterpart.
    """
    known = ops | TABLE.keys()
    result: Any = None
    assigned: list[str] = []

    def flat(module: torch.nn.Module, leaves: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        nonlocal result
        tensors: list[torch.Tensor] = []
        before = attributes_of(module)
        result = _plain(call(module, leaves), tensors)
        # Afterwards `torch.export` sets attributes back.
        assigned.extend(changed(before, attributes_of(module)))
        return tuple(tensors)

    def forward() -> _Forward:
        return _Forward(in_mode(structure, train, dtype), flat)

    def trace(module: _Forward, under_autocast: Calls | None) -> Captured:
        with tracing(), recorded_calls() as calls, marked(under_autocast):
            exported = _exported(module, given, known)
        functions, origins = _custom_functions(exported, calls, structure, known)
        captured = converted(exported, result, structure.aliases, known, functions)
        return captured._replace(origins={**captured.origins, **origins})

    def traced() -> Captured:
        # Other dtypes are those of a run without autocast.
        under_autocast = (
            calls_under_autocast(partial(_run, forward(), given, structure)) if dtype == "float32" else None
        )
        captured = trace(forward(), under_autocast)
        if assigned:
            again = forward()
            run = partial(_run, again, given, structure)
            refuse_state(captured, again.module, run, lambda: trace(again, under_autocast))
        return captured

    given = _fakes(inputs, structure)
    try:
        try:
            return traced()
        except RuntimeError:
            if dtype != "float64":
                raise
            # Code that makes float32 tensors next to float64 parameters fails in PyTorch as well.
            with in_float64():
                return traced()
    except UserError:
        raise
    except Exception as error:
        raise _export_refusal(error, structure.module) from error


def _run(forward: "_Forward", leaves: tuple[torch.Tensor, ...], structure: Structure) -> None:
    with tracing(), structure.mode:
        forward(*leaves)


def _fakes(specs: Sequence[Spec], structure: Structure) -> tuple[torch.Tensor, ...]:
    with structure.mode:
        return tuple(torch.empty(spec.shape, dtype=_captured_dtype(spec.dtype)) for spec in specs)


def _exported(
    module: torch.nn.Module, leaves: tuple[torch.Tensor, ...], known: Collection[str]
) -> torch.export.ExportedProgram:
    """Return the pure program of a module, of the operations that are known."""
    exported = torch.export.export(module, leaves, strict=False)
    detach_regions_without_gradient(exported)
    without_marks_of_changed(exported)
    exported = exported.run_decompositions(_decompositions(known))
    fold_known_shapes(exported)
    check_bins(exported)
    return exported


def _custom_functions(
    exported: torch.export.ExportedProgram, calls: Sequence[Call], structure: Structure, known: Collection[str]
) -> tuple[dict[int, dict[str, Any]], Origins]:
    """Return the keyword arguments of each `CUSTOM` node, by the number of its call, and the origins of its passes."""
    functions, origins = {}, dict[str, tuple[ModuleCall, ...]]()
    operation = torch.ops.jaxtrain.custom_function.default
    for node in exported.graph_module.graph.find_nodes(op="call_function", target=operation):
        call = calls[node.args[0]]
        given = [spec_of(x.meta["val"], x) for x in node.args[1]]
        with tracing(), inlined_calls():
            forward, forward_origins = _pass(call.forward, given, structure, known)
            specs = {x.name: x.spec for x in forward.nodes if isinstance(x.spec, Spec)}
            outputs = [specs[ref.name] for ref in forward.outputs]
            grads = [spec for spec, floating in zip(outputs, call.floating, strict=False) if floating]
            backward, backward_origins = _pass(call.backward, [*outputs[call.outputs :], *grads], structure, known)
        functions[node.args[0]] = {
            "forward": forward,
            "backward": backward,
            "outputs": call.outputs,
            "has_gradient": tuple(call.has_gradient),
            **call.names(),
        }
        for name, found in (("forward", forward_origins), ("backward", backward_origins)):
            origins |= {f"{node.name}.{name}.{operation}": calls for operation, calls in found.items()}
    return functions, origins


def _pass(
    fn: Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]],
    given: Sequence[Spec],
    structure: Structure,
    known: Collection[str],
) -> tuple[Graph, Origins]:
    """Return the graph of a function of tensors, and where its operations come from."""
    exported = _exported(_Forward(torch.nn.Module(), lambda _, leaves: fn(leaves)), _fakes(given, structure), known)
    places = tuple(Leaf(i) for i, _ in enumerate(exported.graph_signature.user_outputs))
    graph, constants, origins = converted(exported, places, {}, known, {})
    if constants or any(node.op in RANDOM for node in graph.nodes):
        raise refusal("an autograd.Function has tensors or random numbers of its own", "pass them as arguments")
    return graph, origins


class _Forward(torch.nn.Module):
    """A module called on the tensors of a batch, whose result is a flat tuple of tensors."""

    def __init__(
        self,
        module: torch.nn.Module,
        call: Callable[[torch.nn.Module, Sequence[torch.Tensor]], tuple[torch.Tensor, ...]],
    ) -> None:
        super().__init__()
        self.module = module
        self._call = call

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = [(part, dict(part._buffers)) for part in self.module.modules()]
        result = self._call(self.module, leaves)
        for part, buffers in before:
            _write_assigned(part, buffers)
        return result


def _write_assigned(part: torch.nn.Module, before: Mapping[str, torch.Tensor | None]) -> None:
    """Write what was assigned to buffers, as by `self.mean = mean`, into them: a graph loses such assignments."""
    for name, buffer in before.items():
        value = part._buffers.get(name)
        if value is buffer:
            continue
        if buffer is not None and value is not None:
            if (value.shape, value.dtype) != (buffer.shape, buffer.dtype):
                raise refusal(
                    f"buffer {name!r} of {type(part).__name__} is replaced by another shape or dtype",
                    "keep its shape and dtype",
                )
            buffer.detach().copy_(value.detach())
        part._buffers[name] = buffer


def _plain(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a result as dicts and tuples with indices into `tensors`, which receives its tensors."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return Leaf(len(tensors) - 1)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, tensors) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_plain(item, tensors) for item in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name), tensors) for field in dataclasses.fields(value)}
    node = _pytree.SUPPORTED_NODES.get(type(value))
    if node is None:
        raise refusal(
            f"the module returns a {type(value).__name__}", "return tensors in dicts, tuples and lists, without caches"
        )
    return tuple(_plain(item, tensors) for item in node.flatten_fn(value)[0])


def _captured_dtype(dtype: str) -> torch.dtype:
    found: torch.dtype = torch.int64 if dtype in ("int32", "int64", "uint32") else getattr(torch, dtype)
    return found


def _decompositions(known: Collection[str]) -> Any:
    """Return PyTorch's decompositions of the operations that have no function."""
    return {op: fn for op, fn in torch.export.default_decompositions().items() if key_of(op) not in known}


def _export_refusal(error: Exception, module: torch.nn.Module) -> UserError:
    """Return the error of a module that cannot be traced, with the line of its code."""
    source = source_line("".join(traceback.format_tb(error.__traceback__))) or source_line(str(error))
    kind = type(error).__name__
    if "DataDependent" in kind or "data-dependent" in str(error):
        return refusal(
            "control flow or a shape depends on a tensor's value", "use torch.where and fixed shapes", source
        )
    problem = f"{type(module).__name__} cannot be traced by torch.export: {first_line(error)}"
    return refusal(problem, "change that line, or import a part of the module without it", source)
