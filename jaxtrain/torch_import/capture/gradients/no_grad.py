"""Regions under `torch.no_grad`, which later passes merge with their surroundings, and changes without a gradient."""

import operator
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from jaxtrain.torch_import.capture.convert import key_of, source_of
from jaxtrain.torch_import.graph import DETACH, LEAF
from jaxtrain.torch_import.refusals import refusal
from jaxtrain.torch_internals import pytree


def detach_regions_without_gradient(exported: torch.export.ExportedProgram) -> None:
    """Detach what regions under `torch.no_grad` compute, in place."""
    graph, trained = exported.graph_module.graph, _depending_on_parameters(exported)
    _refuse_changes_of_detached(graph, trained)
    _refuse_changes_before_gradients(exported.graph_module)
    for node in list(graph.nodes):
        if key_of(node.target) != "wrap_with_set_grad_enabled":
            continue
        enabled, region, *operands = node.args
        if enabled:
            continue
        body = getattr(exported.graph_module, region.target).graph
        _refuse_changes_without_gradient(body, operands, node, trained)
        _detach_for_regions_with_gradient(body)
        results = body.output_node().args[0]
        for user in list(node.users):
            if user.target is operator.getitem and results[user.args[1]].op != "placeholder":
                with graph.inserting_after(user):
                    detached = graph.call_function(torch.ops.aten.detach.default, (user,))
                detached.meta = dict(user.meta)
                user.replace_all_uses_with(detached, delete_user_cb=lambda use, own=detached: use is not own)
    exported.graph_module.recompile()


def _detach_for_regions_with_gradient(body: Any) -> None:
    """Detach what a body under `torch.no_grad` computes for the regions under `torch.enable_grad` in it."""
    for node in list(body.nodes):
        if key_of(node.target) != "wrap_with_set_grad_enabled" or not node.args[0]:
            continue
        for operand in node.args[2:]:
            if operand.op == "call_function" and isinstance(operand.meta.get("val"), torch.Tensor):
                with body.inserting_before(node):
                    detached = body.call_function(torch.ops.aten.detach.default, (operand,))
                detached.meta = dict(operand.meta)
                node.replace_input_with(operand, detached)


def _refuse_changes_before_gradients(module: torch.fx.GraphModule) -> None:
    """Refuse operations in place on a tensor between its uses and `torch.autograd.grad` with respect to it.

    Later uses read another value of the graph, or another view of one.
    """
    for part in module.modules():
        graph = part.graph if isinstance(part, torch.fx.GraphModule) else torch.fx.Graph()
        place = {node: i for i, node in enumerate(graph.nodes)}
        for node in graph.find_nodes(op="call_function", target=torch.ops.jaxtrain.gradient.default):
            for given in node.args[1]:
                *views, root = _aliases(given)
                between = [x for x in graph.nodes if place[given] < place[x] < place[node]]
                changes = [x for x in between if any(list(_aliases(y))[-1] is root for y in _changed(x))]
                earlier = [x for x in given.users if changes and place[x] < place[changes[-1]]]
                if changes and (views or not _reached(earlier).isdisjoint(node.args[0])):
                    raise refusal(
                        "a tensor is changed in place before torch.autograd.grad with respect to it",
                        "change a clone",
                        source_of(changes[-1]) or source_of(node),
                    )


def _reached(nodes: Sequence[torch.fx.Node]) -> set[torch.fx.Node]:
    """Return nodes and those that have a gradient through them."""
    found, new = set[torch.fx.Node](), [*nodes]
    while new:
        node = new.pop()
        if node not in found and key_of(node.target) not in (DETACH, LEAF):
            found.add(node)
            new += node.users
    return found


def _refuse_changes_of_detached(graph: Any, trained: Collection[Any]) -> None:
    """Refuse operations in place on `y.detach()` or `y.data`, which change y behind the back of its gradient."""
    for node in graph.nodes:
        for tensor in _changed(node):
            *aliases, root = _aliases(tensor)
            if root in trained and any(key_of(x.target) == DETACH for x in aliases):
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
    values = [x for name in written for x in pytree.tree_leaves(given.get(name))]
    return [x for x in values if isinstance(x, torch.fx.Node)]


def _aliases(node: Any) -> Iterator[torch.fx.Node]:
    """Yield a tensor and those whose memory it shares, as its operations say, up to the one that owns it."""
    yield node
    schema = getattr(node.target, "_schema", None)
    is_view = schema is not None and bool(node.args) and schema.arguments[0].alias_info is not None
    # Of `torch._foreach_…` the first argument is a list.
    if (is_view and isinstance(node.args[0], torch.fx.Node)) or node.target is operator.getitem:
        yield from _aliases(node.args[0])


def _depending_on_parameters(exported: torch.export.ExportedProgram) -> set[torch.fx.Node]:
    """Return the nodes of numbers with a gradient: they depend on a parameter that is trained."""
    params = {s.arg.name for s in exported.graph_signature.input_specs if s.kind.name == "PARAMETER"}
    found: set[torch.fx.Node] = set()
    for node in exported.graph_module.graph.nodes:
        if node.op == "placeholder":
            depends = node.name in params and node.meta["val"].requires_grad
        else:
            depends = any(x in found for x in node.all_input_nodes) and key_of(node.target) not in (DETACH, LEAF)
            value = node.meta.get("val")
            depends &= not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex()
        if depends:
            found.add(node)
    return found
