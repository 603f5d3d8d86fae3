"""Values of tensors that `forward` computes from constants alone, which are known while it is traced.

PyTorch's fake tensors carry such values for tensors of one element, and follow what is written to them and to views of
them: what is written with an unknown value is unknown from then on. Here they carry them for masks and indices as well,
such as `~torch.eye(n, dtype=torch.bool)`, so that shapes and Python numbers may depend on them as in eager PyTorch.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from jaxtrain.torch_internals import FakeTensor, FakeTensorMode, OpOverload, no_dispatch, pytree

_LIMIT = 2**22
"""Elements of the largest tensor whose value is followed."""

_ATEN = torch.ops.aten
_MADE = frozenset(
    getattr(packet, name)
    for packet in (
        *(_ATEN.arange, _ATEN.eye, _ATEN.full, _ATEN.linspace, _ATEN.logspace, _ATEN.ones, _ATEN.scalar_tensor),
        *(_ATEN.tril_indices, _ATEN.triu_indices, _ATEN.zeros),
    )
    for name in packet.overloads()
    if "out" not in name
)
"""Operations that make a tensor of numbers."""
_FILLED: dict[Any, Any] = {
    _ATEN.zeros_like.default: lambda *_: 0,
    _ATEN.ones_like.default: lambda *_: 1,
    _ATEN.full_like.default: lambda _, value: value,
    _ATEN.new_zeros.default: lambda *_: 0,
    _ATEN.new_ones.default: lambda *_: 1,
    _ATEN.new_full.default: lambda _, size, value: value,
}
"""Operations that fill a tensor of the shape of another one, with a function from their arguments to the number."""


def known_value(tensor: Any) -> torch.Tensor | None:
    """Return the value of a fake tensor, which is not to be changed; None if it is not known."""
    value: torch.Tensor | None = tensor.constant if isinstance(tensor, FakeTensor) else None
    return value


def is_unknown(tensor: Any) -> bool:
    """Return whether a value is a fake tensor whose value is not known."""
    return isinstance(tensor, FakeTensor) and tensor.constant is None


def places(mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the indices that a mask of known value stands for, one for each of its axes."""
    with no_dispatch():
        return tuple(x.contiguous() for x in mask.bool().nonzero().unbind(1))


def is_mask(tensor: Any) -> bool:
    """Return whether an index is a mask."""
    return isinstance(tensor, torch.Tensor) and tensor.dtype in (torch.bool, torch.uint8) and tensor.ndim > 0


_dispatch = FakeTensorMode.dispatch


def _dispatch_with_values(
    mode: FakeTensorMode, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    if func is _ATEN.index.Tensor:
        args = (args[0], [y for x in args[1] for y in _as_places(mode, x)])
    result = _dispatch(mode, func, types, args, kwargs or {})
    value = _made(func, args, kwargs or {}, result)
    return result if value is None else _known(mode, value)


def _as_places(mode: FakeTensorMode, index: Any) -> tuple[Any, ...]:
    value = known_value(index)
    return (index,) if value is None or not is_mask(index) else tuple(_known(mode, x) for x in places(value))


def _made(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> torch.Tensor | None:
    """Return the value of a new tensor whose elements are known."""
    if not (func in _MADE or func in _FILLED) or known_value(result) is not None or not _is_followed(result):
        return None
    with no_dispatch():
        if func in _FILLED:
            return torch.empty_strided(result.shape, result.stride(), dtype=result.dtype).fill_(_FILLED[func](*args))
        made: torch.Tensor = func(*args, **kwargs)
        return made


def _is_followed(tensor: torch.Tensor) -> bool:
    fixed = all(isinstance(n, int) for n in tensor.shape)
    return fixed and tensor.numel() <= _LIMIT and tensor.device.type == "cpu" and tensor.layout is torch.strided


def _known(mode: FakeTensorMode, value: torch.Tensor) -> FakeTensor:
    return mode.fake_tensor_converter.from_real_tensor(mode, value, make_constant=True)


def _may_be_known(mode: FakeTensorMode | None, tensor: torch.Tensor) -> bool:
    """`FakeTensorMode.may_turn_const` for tensors of more than one element."""
    return not isinstance(tensor, FakeTensor) and _is_followed(tensor)


def known(value: torch.Tensor) -> torch.Tensor:
    """Return a known value: the operation of a constant in a graph, whose value is its `meta["val"]`."""
    return value


def fold_known(exported: torch.export.ExportedProgram, operations: Collection[str]) -> None:
    """Make constants of known values in a pure program.

    These are tensors whose shape depends on values, places of masks, and what operations without a function in
    `operations` make of numbers, such as `torch.fft.rfftfreq`.
    """
    graph = exported.graph_module.graph
    for node in [*graph.nodes]:
        if isinstance(node.target, OpOverload) and str(node.target) not in operations and _is_made(node):
            value = _evaluated(node, {}).to(node.meta["val"].dtype)
            node.replace_all_uses_with(_constant(node, value))
    values = _values(exported)
    for node in [*graph.nodes]:
        if node.target in _INDEXED:
            node.args = (node.args[0], [y for x in node.args[1] for y in _places_of(x, values)], *node.args[2:])
        elif node in values and has_shape_of_values(node):
            several = not isinstance(values[node], torch.Tensor)
            for result in [*node.users] if several else [node]:
                value = values[node][result.args[1]] if several else values[node]
                result.replace_all_uses_with(_constant(result, value))
    exported.graph_module.recompile()


def _is_made(node: torch.fx.Node) -> bool:
    """Return whether an operation makes one tensor of numbers alone, the same one each time."""
    is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    result = node.meta.get("val")
    return not node.all_input_nodes and not is_random and isinstance(result, torch.Tensor) and _is_followed(result)


_INDEXED = frozenset(
    (_ATEN.index.Tensor, _ATEN._unsafe_index.Tensor, _ATEN.index_put.default, _ATEN._unsafe_index_put.default)
)
"""Operations with indices as their second argument."""


def has_shape_of_values(node: torch.fx.Node) -> bool:
    """Return whether the shape of an operation's result depends on the values of its arguments."""
    args: Any = node.args
    if node.target is _ATEN.one_hot.default:
        return len(args) < 2 or bool(args[1] == -1)
    if node.target in _INDEXED:
        return node.target is _ATEN.index.Tensor and any(map(_is_mask_node, args[1]))
    return torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ())


def _is_mask_node(index: Any) -> bool:
    return isinstance(index, torch.fx.Node) and is_mask(index.meta["val"])


def _places_of(index: Any, values: Mapping[torch.fx.Node, Any]) -> Sequence[Any]:
    if index not in values or not is_mask(values[index]):
        return (index,)
    return [_constant(index, x) for x in places(values[index])]


def _constant(node: torch.fx.Node, value: torch.Tensor) -> torch.fx.Node:
    """Return a new node with a value, after the node that it is of."""
    with node.graph.inserting_after(node):
        constant = node.graph.call_function(known, ())
    constant.meta = {**node.meta, "val": value}
    return constant


def _values(exported: torch.export.ExportedProgram) -> dict[torch.fx.Node, Any]:
    """Return the known values, of those that masks and shapes depend on."""
    graph = exported.graph_module.graph
    needed = {node for node in graph.nodes if has_shape_of_values(node)}
    needed |= {x for node in graph.nodes if node.target in _INDEXED for x in node.args[1] if _is_mask_node(x)}
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    specs = exported.graph_signature.input_specs
    made = {x.arg.name: exported.constants[x.target] for x in specs if x.kind.name == "CONSTANT_TENSOR"}
    made = {name: x for name, x in made.items() if _may_be_known(None, x)}
    values: dict[torch.fx.Node, Any] = {}
    for node in graph.nodes:
        if node.name in made and node.op == "placeholder":
            values[node] = made[node.name]
        elif node in needed and node.op == "call_function" and _is_evaluated(node, values):
            values[node] = _evaluated(node, values)
    return values


def _is_evaluated(node: torch.fx.Node, values: Mapping[torch.fx.Node, Any]) -> bool:
    """Return whether the value of an operation is known and can be computed."""
    if node.target not in _MADE and node.target not in _FILLED:
        inputs, tags = node.all_input_nodes, getattr(node.target, "tags", ())
        if not inputs or torch.Tag.nondeterministic_seeded in tags or not all(x in values for x in inputs):
            return False
    results = [x for x in pytree.tree_leaves(node.meta.get("val")) if isinstance(x, torch.Tensor)]
    return bool(results) and all(map(_is_followed, results))


def _evaluated(node: torch.fx.Node, values: Mapping[torch.fx.Node, Any]) -> Any:
    if node.target in _FILLED:
        like = node.meta["val"]
        return torch.full(like.shape, _FILLED[node.target](*node.args), dtype=like.dtype)
    target: Any = node.target
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    return target(*args, **kwargs)


def _masked_select(input: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`torch.masked_select` as an index."""
    x, mask = torch.broadcast_tensors(input, mask)
    return x[mask]


KNOWN_VALUES: tuple[tuple[Any, str, Any], ...] = (
    (FakeTensorMode, "dispatch", _dispatch_with_values),
    (FakeTensorMode, "may_turn_const", _may_be_known),
    (torch, "masked_select", _masked_select),
    (torch.Tensor, "masked_select", _masked_select),
)
"""Replacements while a module is traced: owner, name and value."""
