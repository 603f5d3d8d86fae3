"""Capture a forward pass by `torch.export`.

The training graph of `torch.export` still has the regions without gradient, which are detached before PyTorch turns
operations in place into pure ones. Operations without an entry in our table are replaced by PyTorch's decompositions.
"""

import contextlib
import dataclasses
import functools
import re
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch

from jaxtrain.errors import UserError
from jaxtrain.torch_import.assumptions import assuming
from jaxtrain.torch_import.capture.agreement import Beside, Program, refuse_disagreement
from jaxtrain.torch_import.capture.autocast_regions import Calls, calls_under_autocast, marked, without_marks_of_changed
from jaxtrain.torch_import.capture.convert import Leaf, converted, key_of, source_of, spec_of
from jaxtrain.torch_import.capture.gradients.custom_gradients import Call, inlined_calls, recorded_calls
from jaxtrain.torch_import.capture.gradients.inner_gradients import (
    refuse_lost_gradients,
    refuse_saved_results,
    unused_parameters,
)
from jaxtrain.torch_import.capture.gradients.lifted import Function, with_lifted_constants
from jaxtrain.torch_import.capture.gradients.no_grad import detach_regions_without_gradient
from jaxtrain.torch_import.capture.in_float64 import in_float64
from jaxtrain.torch_import.capture.module.attributes import (
    attributes_of,
    carried_attributes,
    changed,
    same,
    set_values,
    values_of,
)
from jaxtrain.torch_import.capture.module.carried import CARRYING, CarriedError, Carrying, attribute_of
from jaxtrain.torch_import.capture.module.copying import own_tensors
from jaxtrain.torch_import.capture.module.placing import Placing
from jaxtrain.torch_import.capture.module.reached import reached_by
from jaxtrain.torch_import.capture.module.structure import Structure, captured_dtype, converted_to, in_mode
from jaxtrain.torch_import.capture.tracing import hidden, tracing
from jaxtrain.torch_import.capture.values.bincount import check_bins
from jaxtrain.torch_import.capture.values.branches import branched
from jaxtrain.torch_import.capture.values.counted import Counts
from jaxtrain.torch_import.capture.values.known_values import fold_known
from jaxtrain.torch_import.capture.values.numbers import Number, names_numbers, numbers
from jaxtrain.torch_import.capture.values.outside import Unread
from jaxtrain.torch_import.capture.values.questions import Example, Questions
from jaxtrain.torch_import.capture.values.row_selections import RowQuestions, answering, names_rows, with_sizes
from jaxtrain.torch_import.graph import Captured, ModuleCall, Spec, read_state
from jaxtrain.torch_import.insertion_order import check_keys
from jaxtrain.torch_import.ops import RANDOM, TABLE
from jaxtrain.torch_import.refusals import first_line, refusal, source_line
from jaxtrain.torch_import.selected_rows import EqualCountsError, with_selected_rows
from jaxtrain.torch_import.skipped import is_without_effect
from jaxtrain.torch_internals import pytree

Origins = Mapping[str, tuple[ModuleCall, ...]]


def capture(
    structure: Structure,
    call: Callable[[torch.nn.Module, Sequence[torch.Tensor]], Any],
    inputs: Sequence[Spec],
    *,
    train: bool,
    dtype: str | None,
    ops: frozenset[str],
    beside: Beside | None = None,
    example: Callable[[], Example | None] = lambda: None,
) -> Captured:
    """Capture a forward pass.

    Args:
      structure: The module.
      call: From (module, the batch's tensors) to the module's result.
      inputs: Shapes and dtypes of the batch's tensors. Integers are captured as int64, PyTorch's default.
      train: Whether in training mode, else in evaluation mode.
      dtype: Dtype that floating-point parameters and buffers are converted to, as `module.to(dtype)`; None for none.
      ops: Overloads that have a function beyond the table.
      beside: The module and the batch with which the captured program is compared; None compares nothing.
      example: Returns the batch and the tensors of the module for which questions of `forward` are answered.

    Returns:
      The graph with its constants.

    Raises:
      UserError: The module cannot be imported: its control flow depends on values, an operation has no counterpart.
    """
    known = ops | TABLE.keys()
    result: Any = None
    assigned = set[str]()
    unused: frozenset[str] = frozenset()
    frozen: frozenset[str] = frozenset()
    counts = Counts()
    carried = {attribute.path for attribute in structure.carried}
    computes_numbers = any(leaf.kind is not torch.Tensor for x in structure.carried for leaf in x.leaves)

    def flat(module: torch.nn.Module, leaves: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        nonlocal result, unused
        tensors: list[torch.Tensor] = []
        before = attributes_of(module)
        result = _plain(call(module, leaves), tensors)
        unused = unused_parameters(module, tensors)
        # Afterwards `torch.export` sets attributes back.
        assigned.update(changed(before, attributes_of(module)))
        return tuple(tensors)

    def forward(answers: Sequence[Any] | None = None, path: Sequence[bool] = (), train: bool = train) -> _Forward:
        copy = in_mode(structure, train, dtype)
        for name in frozen:
            copy.module.get_parameter(name).requires_grad_(False)
        carrying = Carrying(structure.carried, structure.mode, converted_to(structure, dtype))
        questions = Questions(example, answers, path, counts)
        return _Forward(copy.module, flat, Placing(copy, structure.originals), questions, carrying)

    def run(module: torch.nn.Module, leaves: Sequence[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
        tensors: list[torch.Tensor] = []
        structure = _plain(call(module, leaves), tensors)
        return structure, tensors

    def with_numbers(module: _Forward) -> contextlib.AbstractContextManager[Any]:
        if not computes_numbers:
            return contextlib.nullcontext()
        return numbers(_functions(module.module, call))

    def trace(module: _Forward, under_autocast: Calls | None) -> tuple[Captured, Program]:
        captured, program, rows = trace_with_rows(module, under_autocast, RowQuestions())
        for other in rows.others():
            again = forward(path=module.questions.path, train=module.module.training)
            skipping, _, _ = trace_with_rows(again, under_autocast, other)
            skipped, others = rows.skipped(other.empty), other.skipped(other.empty)
            is_alike = other.count == rows.count
            if not is_alike or not is_without_effect(captured.graph, skipped, skipping.graph, others):
                raise rows.refusal()
        return with_selected_rows(captured), program

    def trace_with_rows(
        module: _Forward, under_autocast: Calls | None, rows: RowQuestions
    ) -> tuple[Captured, Program, RowQuestions]:
        with (
            tracing() as traced,
            with_numbers(module),
            recorded_calls() as calls,
            marked(under_autocast),
            answering(rows),
        ):
            module.questions.calls = calls
            program = _program(module, given)
            exported = _decomposed(program, known, module.module)
        functions, origins = _custom_functions(exported, calls, module.placing, structure, known)
        asked = module.questions.asked
        names = {f"{CARRYING}.{i}": leaf.name for i, leaf in enumerate(module.carrying.leaves)}
        aliases = {**structure.aliases, **structure.buffers, **names}
        captured = converted(exported, result, aliases, known, functions, asked)
        _refuse_changes_of_trained(exported, captured, module.module)
        for name in captured.graph.state.keys() & structure.shared.keys():
            raise refusal(f"buffers {name!r} and {structure.shared[name]!r} share memory and change", "clone one")
        refuse_lost_gradients(captured.graph)
        refuse_saved_results(captured.graph)
        if train:
            module.carrying.refuse_undetached(read_state(captured.graph, {*names.values()}))
        captured = captured._replace(origins={**captured.origins, **origins}, unused=unused)
        changes = {*captured.graph.state}
        return captured, Program(program, result, calls, traced.draws, asked, structure.carried, changes), rows

    def run_once(module: _Forward) -> tuple[torch.Tensor, ...]:
        with tracing(), with_numbers(module), structure.mode:
            outputs: tuple[torch.Tensor, ...] = module(*(x.detach() for x in given))
        return outputs

    def autocast_calls(answers: Sequence[Any] | None = None) -> Calls:
        module = forward(answers)
        found = calls_under_autocast(partial(run_once, module))
        if answers is None and module.questions.is_unanswered:
            asking = forward()
            trace(asking, found)
            return autocast_calls(asking.questions.answers)
        return found

    def path_of(under_autocast: Calls | None, path: Sequence[bool]) -> tuple[Captured, Program]:
        module = forward(path=path)
        found = trace(module, under_autocast)
        if under_autocast is None:
            return found
        both = under_autocast.union(autocast_calls(module.questions.answers))
        return found if both == under_autocast else trace(forward(path=path), both)

    def traced() -> Captured:
        # Other dtypes are those of a run without autocast.
        under_autocast = autocast_calls() if dtype == "float32" else None
        module = forward()
        captured, program = trace(module, under_autocast)
        if assigned - carried:
            again = forward(module.questions.answers)
            changes = _Changes(captured, partial(again_with, under_autocast), train)
            found, left_out = carried_attributes(again.module, partial(run_once, again), changes, structure.carried)
            if found:
                raise CarriedError(found)
            captured = captured._replace(left_out=tuple(left_out))
        captured, programs = with_paths(captured, program, partial(path_of, under_autocast))
        captured = captured._replace(graph=assuming(captured.graph, captured.assumptions))
        if beside is not None:
            refuse_disagreement(programs, beside, run, train=train)
        return captured

    def again_with(under_autocast: Calls | None, train: bool, values: Mapping[str, Any]) -> Captured:
        module = forward(train=train)
        set_values(module.module, values)
        return trace(module, under_autocast if train else None)[0]

    def attempt() -> Captured:
        try:
            return traced()
        except RuntimeError:
            if dtype != "float64":
                raise
            # Code that makes float32 tensors next to float64 parameters fails in PyTorch as well.
            with in_float64():
                return traced()

    given = _fakes(inputs, structure)
    try:
        try:
            return attempt()
        except CarriedError:
            raise
        except Exception as error:
            before = computes_numbers
            computes_numbers = before or names_numbers(_functions(structure.module, call))
            frozen = _without_gradient(forward(), run_once)
            counts.are_read = counts.are_needed or isinstance(error, EqualCountsError)
            if not frozen and before == computes_numbers and not counts.are_read:
                raise
            if (captured := _again(attempt)) is not None:
                return captured
            raise
    except UserError:
        raise
    except Exception as error:
        raise _export_refusal(error, structure.module) from error


def with_paths(
    captured: Captured, program: Program, path_of: Callable[[Sequence[bool]], tuple[Captured, Program]]
) -> tuple[Captured, list[Program]]:
    """Return a pass with the other paths of its first conditions, where they have the same results.

    Args:
      captured: The pass for the example.
      program: Its program.
      path_of: Captures a pass by the answers to its first conditions.

    Returns:
      The pass, which assumes the conditions whose other path raises an error or has other results, and the programs.
    """
    programs = [program]

    def joined(captured: Captured, fixed: int) -> Captured:
        conditions = [x for x in captured.assumptions if x.is_branch][:_MOST_CONDITIONS]
        answers = [bool(x.answer) for x in conditions]
        # The last one first: what follows an earlier condition has its own paths then.
        for i in reversed(range(fixed, len(conditions))):
            known = len(programs)
            try:
                other, program = path_of((*answers[:i], not answers[i]))
                programs.append(program)
                other = joined(other, i + 1)
            except Exception:  # any of the user's code: what raises an error is a check
                del programs[known:]
                continue
            paths = [_without(path, i) for path in (captured, other)]
            found = branched(conditions[i].value, *(paths if answers[i] else reversed(paths)))
            if found is None:
                del programs[known:]
            captured = captured if found is None else found
        return captured

    return joined(captured, 0), programs


def _without(path: Captured, i: int) -> Captured:
    """Return a path without its condition i among what it assumes."""
    condition = [x for x in path.assumptions if x.is_branch][i]
    return path._replace(assumptions=tuple(x for x in path.assumptions if x is not condition))


_MOST_CONDITIONS = 3
"""Conditions of a path whose other answer is captured as well: there are up to 2**3 paths."""


def _without_gradient(module: "_Forward", run: Callable[["_Forward"], tuple[torch.Tensor, ...]]) -> frozenset[str]:
    """Return the trained parameters that no result of a module has a gradient of."""
    params = {name: x for name, x in module.module.named_parameters() if x.requires_grad}
    try:
        ends = [x for x in run(module) if x.requires_grad]
        if not ends or not params:
            return frozenset()
        ones = [torch.ones_like(x) for x in ends]
        found = torch.autograd.grad(ends, [*params.values()], ones, allow_unused=True)
    except Exception:  # it is refused for another reason
        return frozenset()
    return frozenset(name for name, grad in zip(params, found, strict=True) if grad is None)


def _again(attempt: Callable[[], Captured]) -> Captured | None:
    """Return the capture of a second attempt; None if it fails, for which the first one's error says more."""
    try:
        return attempt()
    except CarriedError:
        raise
    except Exception:
        return None


def _functions(*roots: Any) -> list[FunctionType]:
    return [x for x in reached_by(*roots) if isinstance(x, FunctionType)]


class _Changes:
    """Whether a module computes something else for other values of its attributes, in evaluation as well."""

    def __init__(self, captured: Captured, capture: Callable[[bool, Mapping[str, Any]], Captured], train: bool) -> None:
        self._captured, self._capture, self._train = captured, capture, train

    def __call__(self, values: Mapping[str, Any]) -> bool:
        if not same(self._captured, partial(self._capture, self._train, values)):
            return True
        evaluation = self._evaluation if self._train else None
        return evaluation is not None and not same(evaluation, partial(self._capture, False, values))

    @functools.cached_property
    def _evaluation(self) -> Captured | None:
        try:
            return self._capture(False, {})
        except Exception:  # the capture of evaluation says why
            return None


def _fakes(specs: Sequence[Spec], structure: Structure) -> tuple[torch.Tensor, ...]:
    with structure.mode:
        return tuple(torch.empty(spec.shape, dtype=captured_dtype(spec.dtype)) for spec in specs)


def _program(module: torch.nn.Module, leaves: tuple[torch.Tensor, ...]) -> torch.export.ExportedProgram:
    """Return the program of a module, with operations in place."""
    # Of its own: forward may make them require a gradient.
    exported = torch.export.export(module, tuple(x.detach() for x in leaves), strict=False)
    detach_regions_without_gradient(exported)
    without_marks_of_changed(exported)
    _remove_unused_buffers(exported)
    _clone_copied_buffers(exported.graph_module)
    return exported


def _remove_unused_buffers(exported: torch.export.ExportedProgram) -> None:
    """Remove the inputs of buffers that nothing reads: of a part with two names, one input for each buffer is left."""
    graph, specs = exported.graph_module.graph, exported.graph_signature.input_specs
    for node in graph.find_nodes(op="placeholder"):
        (spec,) = (spec for spec in specs if spec.arg.name == node.name)
        if spec.kind.name == "BUFFER" and not node.users:
            graph.erase_node(node)
            specs.remove(spec)
    exported.graph_module.recompile()


def _clone_copied_buffers(module: torch.fx.GraphModule) -> None:
    """Give buffers that are copies of others values of their own: PyTorch counts two with one value as one."""
    for part in module.modules():
        graph = part.graph if isinstance(part, torch.fx.GraphModule) else torch.fx.Graph()
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
            source = node.args[1]
            if isinstance(source, torch.fx.Node) and source.op == "placeholder":
                with graph.inserting_before(node):
                    clone = graph.call_function(torch.ops.aten.clone.default, (source,))
                clone.meta = {**source.meta, "stack_trace": node.meta.get("stack_trace")}
                node.update_arg(1, clone)
        if isinstance(part, torch.fx.GraphModule):
            part.recompile()


def _refuse_changes_of_trained(
    exported: torch.export.ExportedProgram, captured: Captured, module: torch.nn.Module
) -> None:
    """Refuse parameters that both an optimizer and `forward` change."""
    trained = {name for name, x in module.named_parameters() if x.requires_grad}
    if found := [name for name in captured.graph.state if name in trained]:
        values = {node.name: node for node in exported.graph_module.graph.nodes}
        node = values.get(captured.graph.state[found[0]].name)
        raise refusal(
            f"the module changes its parameter {found[0]!r} in place, which is trained",
            "change a clone, or set requires_grad=False if forward alone updates it",
            "" if node is None else source_of(node),
        )


def _decomposed(
    program: torch.export.ExportedProgram, known: Collection[str], module: torch.nn.Module
) -> torch.export.ExportedProgram:
    """Return the program of the operations that are known, none of which is in place."""
    program = with_sizes(program)
    for part in program.graph_module.modules():
        if isinstance(part, torch.fx.GraphModule) and part is not program.graph_module:
            # An interpreter keeps the lines of operations in regions, which generated code does not.
            part.forward = torch.fx.Interpreter(part).run
    try:
        exported = program.run_decompositions(_decompositions(known))
    except RuntimeError as error:
        if found := re.match(r"Constant (\S+) is mutated", str(error)):
            raise _changed_constant(program, found[1], module) from error
        raise
    fold_known(exported, known)
    check_bins(exported)
    return exported


def _changed_constant(exported: torch.export.ExportedProgram, target: str, module: torch.nn.Module) -> UserError:
    """Return the error of a module that changes a tensor which is no buffer, with the line of its last use."""
    (name,) = (spec.arg.name for spec in exported.graph_signature.input_specs if spec.target == target)
    (tensor,) = (node for node in exported.graph_module.graph.nodes if node.name == name)
    source = source_of([*tensor.users][-1])
    for path, value in values_of(module).items():
        is_own = any(x is exported.constants[target] for x in pytree.tree_leaves(value))
        if is_own and (attribute := attribute_of(path, value, value, source)):
            return CarriedError([attribute])
    return refusal("forward changes a tensor that is no buffer", "register it by register_buffer", source)


def _custom_functions(
    exported: torch.export.ExportedProgram,
    calls: Sequence[Call],
    placing: Placing,
    structure: Structure,
    known: Collection[str],
) -> tuple[dict[int, Function], Origins]:
    """Return each call of a function of its own gradient, by its number, and the origins of its passes."""
    functions, origins = dict[int, Function](), dict[str, tuple[ModuleCall, ...]]()
    operation = torch.ops.jaxtrain.custom_function.default
    for node in exported.graph_module.graph.find_nodes(op="call_function", target=operation):
        call = calls[node.args[0]]
        given = [spec_of(x.meta["val"], x) for x in node.args[1]]
        with tracing(), inlined_calls(), answering(RowQuestions()):
            forward = _pass(call.forward, given, placing, structure, known)
            specs = {x.name: x.spec for x in forward.graph.nodes if isinstance(x.spec, Spec)}
            outputs = [specs[ref.name] for ref in forward.graph.outputs]
            grads = [spec for spec, floating in zip(outputs, call.floating, strict=False) if floating]
            backward = _pass(call.backward, [*outputs[call.outputs :], *grads], placing, structure, known)
        names = {"outputs": call.outputs, "has_gradient": tuple(call.has_gradient), **call.names()}
        functions[node.args[0]] = with_lifted_constants(node.name, forward, backward, names, len(outputs))
        for name, found in (("forward", forward.origins), ("backward", backward.origins)):
            origins |= {f"{node.name}.{name}.{operation}": calls for operation, calls in found.items()}
    return functions, origins


def _pass(
    fn: Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]],
    given: Sequence[Spec],
    placing: Placing,
    structure: Structure,
    known: Collection[str],
) -> Captured:
    """Return the graph of a function of tensors."""
    module = _Forward(torch.nn.Module(), lambda _, leaves: fn(leaves), placing, Questions())
    exported = _decomposed(_program(module, _fakes(given, structure)), known, module.module)
    places = tuple(Leaf(i) for i, _ in enumerate(exported.graph_signature.user_outputs))
    captured = with_selected_rows(converted(exported, places, {}, known, {}, ()))
    for node in captured.graph.nodes:
        if node.op in RANDOM:
            raise refusal(
                "an autograd.Function draws random numbers", "draw them before and pass them to apply", node.source
            )
    return captured


class _Forward(torch.nn.Module):
    """A module called on the tensors of a batch, whose result is a flat tuple of tensors."""

    def __init__(
        self,
        module: torch.nn.Module,
        call: Callable[[torch.nn.Module, Sequence[torch.Tensor]], tuple[torch.Tensor, ...]],
        placing: Placing,
        questions: Questions,
        carrying: Carrying | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self._call = call
        self.placing, self.questions = placing, questions
        self.add_module(CARRYING, carrying)

    @property
    def carrying(self) -> Carrying:
        """The buffers of attributes."""
        part: Any = self._modules[CARRYING]
        return part

    def forward(self, *leaves: torch.Tensor) -> tuple[Any, ...]:
        before = [(part, dict(part._buffers)) for part in self.module.modules()]
        carrying = self.carrying.during(self.module) if self.carrying else contextlib.nullcontext()
        questions = self.questions.during(own_tensors(self.module), leaves)
        with hidden(), self.placing.during(self.module), questions, carrying:
            result = self.placing.placed(self._call(self.module, leaves))
        for part, buffers in before:
            self._write_assigned(part, buffers)
        return (*result, *self.questions.values)

    def _write_assigned(self, part: torch.nn.Module, before: Mapping[str, torch.Tensor | None]) -> None:
        """Write what was assigned to buffers, as by `self.mean = mean`, into them: a graph loses such assignments."""
        for name, buffer in before.items():
            value = part._buffers.get(name)
            if value is buffer:
                continue
            if id(buffer) in self.placing.held:
                raise refusal(
                    f"buffer {name!r} of {type(part).__name__} is replaced, and a function reads the one before",
                    "change it in place, as by copy_",
                )
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
    if isinstance(value, Unread):
        raise value.error
    if isinstance(value, Number):
        return _plain(value.like([]), tensors)
    if isinstance(value, Mapping):
        check_keys(value, "the module returns a dict that")
        return {key if type(key) in (str, int) else str(key): _plain(item, tensors) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_plain(item, tensors) for item in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name), tensors) for field in dataclasses.fields(value)}
    node = pytree.SUPPORTED_NODES.get(type(value))
    if node is None:
        is_cache = type(value).__module__.startswith("transformers.")
        remedy = "set config.use_cache = False" if is_cache else "return tensors in dicts, tuples and lists"
        raise refusal(f"the module returns a {type(value).__name__}", remedy)
    return tuple(_plain(item, tensors) for item in node.flatten_fn(value)[0])


def _decompositions(known: Collection[str]) -> Any:
    """Return PyTorch's decompositions of the operations that have no function."""
    return {op: fn for op, fn in torch.export.default_decompositions().items() if key_of(op) not in known}


def _export_refusal(error: Exception, module: torch.nn.Module) -> UserError:
    """Return the error of a module that cannot be traced, with the line of its code."""
    source = source_line("".join(traceback.format_tb(error.__traceback__))) or source_line(str(error))
    kind = type(error).__name__
    if "DataDependent" in kind or "data-dependent" in str(error):
        remedy = "use torch.where and fixed shapes"
        if re.search(r":\d+: (while|for) ", source):
            remedy = "loop a fixed number of times, and keep what is done by torch.where(active, new, old)"
        return refusal("control flow or a shape depends on a tensor's value", remedy, source)
    if names_rows(str(error)):
        return refusal("a shape depends on the number of rows that a mask selects", "use a mask of fixed shape", source)
    problem = f"{type(module).__name__} cannot be traced by torch.export: {first_line(error)}"
    return refusal(problem, "change that line, or import a part of the module without it", source)
