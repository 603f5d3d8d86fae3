"""Regions under `torch.no_grad`, which later passes merge with their surroundings."""

import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch

from jaxtrain.torch_import.capture.convert import key_of, source_of
from jaxtrain.torch_import.refusals import refusal


def detach_regions_without_gradient(exported: torch.export.ExportedProgram) -> None:
    """Detach what regions under `torch.no_grad` compute, in place."""
    graph, trained = exported.graph_module.graph, _depending_on_parameters(exported)
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


def _refuse_changes_without_gradient(body: Any, operands: Sequence[Any], region: Any, trained: Collection[Any]) -> None:
    """Refuse operations in place under `torch.no_grad` on tensors with a gradient, which they leave as it is."""
    outer = dict(zip((node for node in body.nodes if node.op == "placeholder"), operands, strict=True))
    for node in body.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            continue
        root = node.args[0]
        while root not in outer and root.args and isinstance(root.args[0], torch.fx.Node):
            root = root.args[0]
        if outer.get(root) in trained:
            raise refusal(
                "a tensor with a gradient is changed in place under torch.no_grad",
                "change a detached clone",
                source_of(node) or source_of(region),
            )


def _depending_on_parameters(exported: torch.export.ExportedProgram) -> set[torch.fx.Node]:
    """Return the nodes whose value depends on a parameter that is trained."""
    params = {s.arg.name for s in exported.graph_signature.input_specs if s.kind.name == "PARAMETER"}
    found: set[torch.fx.Node] = set()
    for node in exported.graph_module.graph.nodes:
        if node.op == "placeholder":
            depends = node.name in params and node.meta["val"].requires_grad
        else:
            depends = any(x in found for x in node.all_input_nodes) and key_of(node.target) != "aten.detach.default"
        if depends:
            found.add(node)
    return found
