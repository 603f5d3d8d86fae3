"""Regions under `torch.no_grad`, which later passes merge with their surroundings, and changes without a gradient."""

import operator
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from jaxtrain.torch_import.capture.convert import key_of, source_of
from jaxtrain.torch_import.refusals import refusal


def detach_regions_without_gradient(exported: torch.export.ExportedProgram) -> None:
    """Detach what regions under `torch.no_grad` compute, in place."""
    graph, trained = exported.graph_module.graph, _depending_on_parameters(exported)
    _refuse_changes_of_detached(graph, trained)
    for node in list(graph.nodes):
        if key_of(node.target) != "wrap_with_set_grad_enabled":
            continue
        enabled, region, *operands = node.args
        if enabled:
            continue
        body = getattr(exported.graph_module, region.target).graph
        _refuse_changes_without_gradient(body, operands, node, trained)
        results = body.output_node().args[0]
        for user in list(node.users):
            if user.target is operator.getitem and results[user.args[1]].op != "placeholder":
                with graph.inserting_after(user):
                    detached = graph.call_function(torch.ops.aten.detach.default, (user,))
                detached.meta = dict(user.meta)
                user.replace_all_uses_with(detached, delete_user_cb=lambda use, own=detached: use is not own)
    exported.graph_module.recompile()


def _refuse_changes_of_detached(graph: Any, trained: Collection[Any]) -> None:
    """Refuse operations in place on `y.detach()` or `y.data`, which change y behind the back of its gradient."""
    for node in graph.nodes:
        for tensor in _changed(node):
            *aliases, root = _aliases(tensor)
            if root in trained and any(key_of(x.target) == "aten.detach.default" for x in aliases):
                raise refusal(
                    "a tensor with a gradient is changed in place by its data", "change a clone", source_of(node)
                )


def _refuse_changes_without_gradient(body: Any, operands: Sequence[Any], region: Any, trained: Collection[Any]) -> None:
    """Refuse operations in place under `torch.no_grad` on tensors with a gradient, which they leave as it is."""
    outer = dict(zip((node for node in body.nodes if node.op == "placeholder"), operands, strict=True))
    for node in body.nodes:
        if any(outer.get(list(_aliases(tensor))[-1]) in trained for tensor in _changed(node)):
            raise refusal(
                "a tensor with a gradient is changed in place under torch.no_grad",
                "change a detached clone",
                source_of(node) or source_of(region),
            )


def _changed(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the tensors that a node writes to."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    names = [argument.name for argument in schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    written = [x.name for x in schema.arguments if x.alias_info is not None and x.alias_info.is_write]
    return [given[name] for name in written if isinstance(given.get(name), torch.fx.Node)]


def _aliases(node: Any) -> Iterator[torch.fx.Node]:
    """Yield a tensor and those whose memory it shares, as its operations say, up to the one that owns it."""
    yield node
    schema = getattr(node.target, "_schema", None)
    is_view = schema is not None and bool(node.args) and schema.arguments[0].alias_info is not None
    if is_view or node.target is operator.getitem:
        yield from _aliases(node.args[0])


def _depending_on_parameters(exported: torch.export.ExportedProgram) -> set[torch.fx.Node]:
    """Return the nodes of numbers with a gradient: they depend on a parameter that is trained."""
    params = {s.arg.name for s in exported.graph_signature.input_specs if s.kind.name == "PARAMETER"}
    found: set[torch.fx.Node] = set()
    for node in exported.graph_module.graph.nodes:
        if node.op == "placeholder":
            depends = node.name in params and node.meta["val"].requires_grad
        else:
            depends = any(x in found for x in node.all_input_nodes) and key_of(node.target) != "aten.detach.default"
            value = node.meta.get("val")
            depends &= not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex()
        if depends:
            found.add(node)
    return found
