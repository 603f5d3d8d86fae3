"""PyTorch's exported program as a `Graph`."""

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from jaxtrain.data import tensor_to_numpy
from jaxtrain.errors import UserError
from jaxtrain.torch_import.capture.autocast_regions import MARKS, unmarked
from jaxtrain.torch_import.capture.gradients.lifted import Function
from jaxtrain.torch_import.capture.module.structure import dtype_name
from jaxtrain.torch_import.capture.origins import origins_of
from jaxtrain.torch_import.capture.values import known_values
from jaxtrain.torch_import.capture.values.questions import Question
from jaxtrain.torch_import.capture.values.symbolic import OF_NUMBERS
from jaxtrain.torch_import.graph import (
    CUSTOM,
    GETITEM,
    GRADIENT,
    Assumption,
    Captured,
    Dtype,
    Graph,
    Input,
    Node,
    Ref,
    Spec,
)
from jaxtrain.torch_import.ops import RANDOM
from jaxtrain.torch_import.refusals import refusal, source_line
from jaxtrain.torch_import.rewrites.layers import mapped
from jaxtrain.torch_import.selected_rows import PLACES
from jaxtrain.torch_internals import (
    ELEMENTWISE_TYPE_PROMOTION_KIND,
    HigherOrderOperator,
    OpOverload,
    elementwise_dtypes,
)

_DROPPED = frozenset({"device", "layout", "memory_format", "pin_memory", "generator", "non_blocking", "copy"})
"""Keyword arguments without a meaning in JAX."""

_NUMBERS = {torch.SymInt: "int64", torch.SymFloat: "float64", torch.SymBool: "bool"}
"""Dtypes of the values of tensors as Python numbers, which an operation may take."""


_CHOICES = frozenset({"clamp", "clip", "clamp_min", "clamp_max", "fmax", "fmin"})


def _has_shared_ties() -> bool:
    """Return whether equal operands of `fmax`, and of its like, share the gradient, as since PyTorch 2.14."""
    with torch.inference_mode(False), torch.enable_grad():  # whatever the user's code is in
        x, y = (torch.ones((), device="cpu", requires_grad=True) for _ in range(2))
        (gradient,) = torch.autograd.grad(torch.fmax(x, y), x)
    return gradient.item() == 0.5


_shares_ties = _has_shared_ties()


class Leaf(NamedTuple):
    """A tensor of the module's result, by its place among them."""

    place: int


def converted(
    exported: torch.export.ExportedProgram,
    result: Any,
    aliases: Mapping[str, str],
    known: Collection[str],
    functions: Mapping[int, Function],
    asked: Sequence[Question],
) -> Captured:
    """Return the graph of an exported program.

    Args:
      exported: The program.
      result: Structure that its flat outputs fill, with `Leaf` for each.
      aliases: First name of each parameter and buffer, by each of its names.
      known: Operations that have a function.
      functions: Calls of `torch.autograd.Function`, by number.
      asked: The questions whose values are its last outputs.

    Returns:
      The graph, with the tensors that are neither parameters nor buffers, and the calls around each operation.
    """
    inputs, constants = _inputs(exported, aliases)
    needed = [node for node in _needed(exported.graph_module.graph) if node.op == "call_function"]
    folded = {node.name: node.meta["val"] for node in needed if node.target is known_values.known}
    given = [
        _custom(node, functions) if key_of(node.target) == CUSTOM else _node(node, known)
        for node in needed
        if node.name not in folded
    ]
    inputs += tuple(
        Input(name, "constant", f"{name}.value", Spec(tuple(x.shape), dtype_name(x.dtype)))
        for name, x in folded.items()
    )
    constants |= {f"{name}.value": tensor_to_numpy(x) for name, x in folded.items()}
    nodes, names = unmarked(given)
    state, outputs = mapped(_results(exported, aliases), lambda ref: Ref(names.get(ref.name, ref.name)))
    for function in functions.values():
        inputs, constants = (*inputs, *function.inputs), {**constants, **function.constants}
    values, places = outputs[: len(outputs) - len(asked)], outputs[len(outputs) - len(asked) :]
    graph = Graph(inputs, tuple(nodes), _filled(result, values), state)
    assumptions = tuple(map(_assumption, places, asked))
    return Captured(graph, constants, origins_of(exported), assumptions=assumptions)


def _assumption(value: Any, question: Question) -> Assumption:
    return Assumption(value, question.answer, question.source, question.is_branch, question.is_random)


def _inputs(
    exported: torch.export.ExportedProgram, aliases: Mapping[str, str]
) -> tuple[tuple[Input, ...], dict[str, np.ndarray]]:
    """Return the inputs of the graph, and the tensors among them that are neither parameters nor buffers."""
    signature = exported.graph_signature
    mutated = {*signature.buffers_to_mutate.values(), *signature.parameters_to_mutate.values()}
    values = {node.name: node for node in exported.graph_module.graph.find_nodes(op="placeholder")}
    inputs, constants, leaves = [], {}, 0
    for spec in signature.input_specs:
        name, kind, target = spec.arg.name, spec.kind.name, _own_name(spec.target or "")
        if kind == "USER_INPUT":
            role, target, leaves = "input", str(leaves), leaves + 1
        elif kind == "PARAMETER" and spec.target not in mutated:
            role, target = "param", aliases[target]
        else:
            role, target = "state" if spec.target in mutated else "constant", aliases.get(target, target)
        if kind == "CONSTANT_TENSOR":
            constants[target] = tensor_to_numpy(exported.constants[spec.target])
        inputs.append(Input(name, role, target, spec_of(values[name].meta["val"], values[name])))
    return tuple(inputs), constants


def _results(
    exported: torch.export.ExportedProgram, aliases: Mapping[str, str]
) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """Return the new values of the buffers and parameters that change, and the flat outputs."""
    node = exported.graph_module.graph.output_node()
    state, outputs = {}, []
    for spec, value in zip(exported.graph_signature.output_specs, node.args[0], strict=True):
        if spec.kind.name in ("BUFFER_MUTATION", "PARAMETER_MUTATION"):
            if "/torch/utils/checkpoint.py" in (value.meta.get("stack_trace") or ""):
                raise refusal(
                    f"{_own_name(spec.target)!r} changes inside torch.utils.checkpoint, which changes it twice",
                    "leave the checkpoint out, as train_step(remat=…) has it",
                    source_of(value),
                )
            name = _own_name(spec.target)
            state[aliases.get(name, name)] = _argument(value, node)
        elif spec.kind.name == "USER_OUTPUT":
            outputs.append(_argument(value, node))
        else:
            name = _own_name(spec.target)
            raise refusal(f"the module changes its input {name!r} in place", "change a clone", source_of(value))
    return state, tuple(outputs)


def _filled(result: Any, outputs: Sequence[Any]) -> Any:
    if isinstance(result, Leaf):
        return outputs[result.place]
    if isinstance(result, dict):
        return {key: _filled(item, outputs) for key, item in result.items()}
    return tuple(_filled(item, outputs) for item in result) if isinstance(result, tuple) else result


def _needed(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """Return the nodes that the outputs depend on, and those that draw random numbers or select rows, in their order.

    The others only check values.
    """
    needed = {graph.output_node()} | {node for node in graph.nodes if key_of(node.target) in (PLACES, *RANDOM)}
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    return [node for node in graph.nodes if node in needed]


def _own_name(target: str) -> str:
    """Return the name of a tensor in the user's module, which `_Forward` contains."""
    return target.removeprefix("module.")


def _custom(node: torch.fx.Node, functions: Mapping[int, Function]) -> Node:
    """Return the node of a call of `torch.autograd.Function`."""
    number, tensors = cast(tuple[int, Any], node.args)
    spec = _specs(node.meta["val"], node)
    function = functions[number]
    operands = (*_argument(tensors, node), *(Ref(x.name) for x in function.inputs))
    return Node(node.name, CUSTOM, operands, function.kwargs, spec, module=_module(node), source=source_of(node))


def _node(node: torch.fx.Node, known: Collection[str]) -> Node:
    key, source = key_of(node.target), source_line(node.meta.get("stack_trace"))
    if node.target in OF_NUMBERS:
        return _of_numbers(node, source)
    if key == "aten.instance_norm.default" and node.args[3] is not None and node.args[5]:
        raise refusal("torch.instance_norm with running statistics", "use F.instance_norm", source)
    if key.startswith("aten.linalg") and len({x.meta["val"].dtype for x in node.all_input_nodes}) > 1:
        # Shapes alone are computed without an error.
        raise RuntimeError(f"{key} of tensors of different dtypes ({source})")
    if key.startswith("aten.as_strided") and not _is_whole(node.all_input_nodes[0].meta["val"]):
        raise refusal("as_strided of a view", "call contiguous() first", source)
    is_operation = isinstance(node.target, OpOverload | HigherOrderOperator)
    is_known = key in known or key in (GETITEM, GRADIENT, PLACES, *MARKS)
    if not is_known and not is_operation:
        raise refusal(
            "a tensor's value is used as a Python number", "use tensors, or pass the number by itself", source
        )
    if not is_known and known_values.has_shape_of_values(node):
        raise _unknown_shape(node)
    if not is_known:
        raise refusal(f"{key} has no JAX counterpart", 'pass ops={"' + key + '": function}', source)
    return Node(
        node.name,
        key,
        tuple(_argument(arg, node) for arg in node.args),
        {name: _argument(arg, node) for name, arg in node.kwargs.items() if name not in _DROPPED} | _of_ties(node),
        _specs(node.meta.get("val"), node),
        _promoted(node),
        _module(node),
        source,
    )


def _of_ties(node: torch.fx.Node) -> dict[str, bool]:
    """Return the argument of a choice between elements that says which of equal ones has the gradient."""
    is_choice = key_of(node.target).removeprefix("aten.").partition(".")[0] in _CHOICES
    return {"shared_ties": True} if is_choice and _shares_ties and node.meta["val"].is_floating_point() else {}


def _of_numbers(node: torch.fx.Node, source: str) -> Node:
    """Return the node of Python arithmetic on numbers that are read from tensors."""
    key, kwargs = OF_NUMBERS[node.target]
    spec = _specs(node.meta["val"], node)
    args = tuple(_argument(arg, node) for arg in node.args)
    values = [arg.meta["val"] if isinstance(arg, torch.fx.Node) else arg for arg in node.args]
    floats = any(isinstance(x, float | torch.SymFloat) for x in (*values, node.meta["val"]))
    promoted = "float64" if floats else "int64"
    return Node(node.name, key, args, dict(kwargs), spec, promoted, _module(node), source)


def _is_whole(tensor: torch.Tensor) -> bool:
    """Return whether the storage of a tensor has its elements in their order and no others."""
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _module(node: torch.fx.Node) -> str:
    """Return the path of the module that calls an operation."""
    modules = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    # The outermost module is the attribute `module` of `_Forward`.
    return _own_name(modules[-1]) if modules and modules[-1] != "module" else ""


def _argument(value: Any, node: torch.fx.Node) -> Any:
    if isinstance(value, torch.fx.Node):
        return Ref(value.name)
    if isinstance(value, torch.dtype):
        return Dtype(dtype_name(value))
    if isinstance(value, tuple | list):
        return tuple(_argument(item, node) for item in value)
    if value is None or isinstance(value, bool | int | float | complex | str):
        return value
    if isinstance(value, torch.device | torch.layout | torch.memory_format):
        return None
    if isinstance(value, torch.SymInt):
        raise _unknown_shape(node)
    raise refusal(f"{node.target} has an argument {value!r}", "pass tensors and numbers", source_of(node))


def _specs(value: Any, node: torch.fx.Node) -> Any:
    if isinstance(value, tuple | list):
        return tuple(_specs(item, node) for item in value)
    if type(value) in _NUMBERS:
        return Spec((), _NUMBERS[type(value)])
    return spec_of(value, node) if isinstance(value, torch.Tensor) else None


def spec_of(value: torch.Tensor, node: torch.fx.Node) -> Spec:
    """Return the shape and dtype of a value of a node."""
    if not all(isinstance(n, int) for n in value.shape):
        raise _unknown_shape(node)
    return Spec(tuple(value.shape), dtype_name(value.dtype))


def _unknown_shape(node: torch.fx.Node) -> UserError:
    packet = key_of(node.target).split(".")[1:2]
    remedy = _OF_FIXED_SHAPE.get("".join(packet), "use a mask of fixed shape, as torch.where does")
    return refusal("a shape depends on a tensor's value", remedy, source_of(node))


_OF_FIXED_SHAPE = {
    "nonzero": "use torch.where with three arguments, or torch.nonzero_static with a size",
    "one_hot": "give F.one_hot its number of classes",
    "bincount": "use F.one_hot(x, n).sum(0)",
    "repeat_interleave": "use torch.nonzero_static or torch.searchsorted with a fixed number of rows",
}
"""Remedies, by the operation whose shape is not known."""


def source_of(node: torch.fx.Node) -> str:
    """Return the line of the user's code that a node comes from."""
    return source_line(node.meta.get("stack_trace"))


def _promoted(node: torch.fx.Node) -> str | None:
    """Return the dtype that PyTorch computes an elementwise operation in."""
    target, result = node.target, node.meta.get("val")
    if not isinstance(target, OpOverload) or torch.Tag.pointwise not in target.tags:
        return None
    values = [arg.meta["val"] if isinstance(arg, torch.fx.Node) else arg for arg in (*node.args, *node.kwargs.values())]
    operands = [x for x in values if isinstance(x, torch.Tensor | int | float | complex)]
    if target.overloadpacket in (torch.ops.aten.where, torch.ops.aten.masked_fill) or not operands:
        return None
    promotion = ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT
    dtype, _ = elementwise_dtypes(*operands, type_promotion_kind=promotion)
    if (
        isinstance(result, torch.Tensor)
        and result.is_floating_point()
        and not (dtype.is_floating_point or dtype.is_complex)
    ):
        dtype = result.dtype
    return dtype_name(dtype)


def key_of(target: Any) -> str:
    """Return the key of an operation in our table."""
    if target is operator.getitem:
        return GETITEM
    if isinstance(target, OpOverload):
        return str(target)
    return getattr(target, "__name__", str(target))
