"""`torch.nn.BatchNorm` in training mode, which is written as one call with its new statistics."""

from collections.abc import Mapping

from jaxtrain.torch_import.graph import Input, Node, Ref
from jaxtrain.torch_import.source.body import Item, Resolve
from jaxtrain.torch_import.source.call_tree import Block
from jaxtrain.torch_import.source.expressions import Expr, call
from jaxtrain.torch_import.source.scope import Scope

_WITH_STATISTICS = "aten._native_batch_norm_legit_functional.default"
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def batch_norm_item(
    block: Block,
    scope: Scope,
    given: Mapping[str, Input],
    results: Mapping[str, Mapping[int, str]],
    state: Mapping[str, Ref],
) -> Item | None:
    """Return a call of a BatchNorm module in training mode as an item; None for any other.

    Args:
      block: The call.
      scope: What the function that calls it can read.
      given: The graph's inputs.
      results: Used results of its operations.
      state: New values of its buffers.
    """
    path, found = block.path or "", scope.find(block.path or "")
    params, buffers = scope.tree("params", path), scope.tree("buffers", path)
    nodes = {node.op: node for node in block.nodes()}
    node = nodes.pop(_WITH_STATISTICS, None)
    if found is None or params is None or buffers is None or node is None:
        return None
    if [*nodes] != ["aten.add.Tensor"] or not _owns_its_tensors(node, path, given):
        return None
    made = results[node.name]
    if set(made) - {0, 3, 4} or any(f"{path}.{name}" not in state for name in _BUFFERS):
        return None
    if state[f"{path}.running_mean"].name != made.get(3):  # the module is called again, with these statistics
        return None
    x, *_, momentum, eps = node.args
    operand = x.name

    def build(resolve: Resolve) -> Expr:
        options = {"momentum": None if momentum == 0.1 else momentum, "eps": None if eps == 1e-5 else eps}
        return call("F.batch_norm", params, buffers, resolve(operand), Expr("train"), **options)

    return Item(build, [operand], {0: made[0]}, hint="normalized", new_state=found[1])


def _owns_its_tensors(node: Node, path: str, given: Mapping[str, Input]) -> bool:
    """Return whether a node reads the tensors of its own module, in training mode."""
    for ref, name in zip(node.args[1:5], ("weight", "bias", "running_mean", "running_var"), strict=True):
        if ref is None and name in ("weight", "bias"):
            continue
        if not isinstance(ref, Ref) or ref.name not in given or given[ref.name].target != f"{path}.{name}":
            return False
    return node.args[5] is True
