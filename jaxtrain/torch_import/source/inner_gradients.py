"""`torch.autograd.grad` inside `forward`, written as the gradients of a function of its inputs."""

from collections.abc import Mapping
from dataclasses import replace

import jax.numpy as jnp

from jaxtrain.torch_import.graph import (
    COND,
    GRADIENT,
    Dtype,
    Graph,
    Input,
    Node,
    Ref,
    Spec,
    dtype_of,
    references,
    without_unused,
)
from jaxtrain.torch_import.nested_gradients import depends_on_another, nodes_between
from jaxtrain.torch_import.ops import RANDOM
from jaxtrain.torch_import.refusals import refusal
from jaxtrain.torch_import.source.body import Body, Item, Resolve
from jaxtrain.torch_import.source.call_tree import Block, specs_of, tree_of
from jaxtrain.torch_import.source.class_functions import Module
from jaxtrain.torch_import.source.expressions import Expr, call
from jaxtrain.torch_import.source.identifiers import input_names
from jaxtrain.torch_import.source.scope import Scope

_FUNCTION = "differentiated"
_ONES = "aten.ones_like.default"


def gradient_item(module: Module, node: Node, owner: Block, scope: Scope) -> Item:
    """Return a gradient as an item, with the definition of the function that it is of.

    Args:
      module: Writes the functions of the graph.
      node: The `GRADIENT` node, `with_bodies`.
      owner: The call of a module whose function contains it.
      scope: What this function can read.
    """
    inputs, given, closed = ([ref.name for ref in part] for part in node.args)
    body: Graph = node.kwargs["body"]
    own = {name: module.given[name] for name in closed if name in module.given and module.given[name].kind != "input"}
    graph = replace(body, inputs=tuple(own.get(x.name, x) for x in body.inputs))
    inner = module.nested(graph, {x.name: module.hint(x.name) for x in graph.inputs})
    block = _of_level(graph, module, owner, node)
    items = inner.items(block, block, scope)

    def definition(resolve: Resolve) -> list[str]:
        outside = {name: resolve(name) for name in closed}
        kept = {x.text for x in outside.values() if x.text.isidentifier()}
        reserved = module.reserved() | {_FUNCTION} | kept
        names = input_names(inputs, items, (), inner.hint, reserved)
        of_scope = inner.outer(scope)
        written = Body(
            {name: value for value, name in names.items()},
            lambda value: outside[value] if value in outside else of_scope(value),
            reserved,
            [],
            indent=2,
            kept=kept,
        )
        outputs = [ref.name for ref in graph.outputs]
        written.write(items, outputs, lambda resolve: Expr(", ".join(resolve(name).text for name in outputs)))
        arguments = ", ".join(f"{names[name]}: Array" for name in inputs)
        returned = "Array" if len(outputs) == 1 else f"tuple[{', '.join(['Array'] * len(outputs))}]"
        return ["", f"    def {_FUNCTION}({arguments}) -> {returned}:", *written.lines, ""]

    def build(resolve: Resolve) -> Expr:
        return call("F.gradients", Expr(_FUNCTION), tuple(map(resolve, inputs)), tuple(map(resolve, given)))

    return Item(
        build,
        [*inputs, *given, *closed],
        dict(module.results.get(node.name, {})),
        len(inputs),
        module.statements(node, owner),
        "gradient",
        named=frozenset(closed),
        before=definition,
        packed=lambda targets: f"({targets[0]},)" if len(targets) == 1 else ", ".join(targets),
    )


def _of_level(graph: Graph, module: Module, owner: Block, node: Node) -> Block:
    """Return the operations of a function as those of the call that contains the gradient."""
    block = tree_of(graph, module.origins)
    while block.level < owner.level:
        if len(block.items) != 1 or not isinstance(block.items[0], Block):
            raise unwritten(node, "through operations of another module")
        block = block.items[0]
    return block


def with_bodies(graph: Graph, keyed: bool) -> Graph:
    """Return a graph whose gradients have the operations between their inputs and outputs as a graph `body`.

    The arguments of a `GRADIENT` are then three tuples: its inputs, the gradients of its outputs, and other values that
    the operations read.

    Args:
      graph: The graph.
      keyed: Whether the pass draws random numbers.

    Raises:
      UserError: A gradient cannot be written.
    """
    specs, prepared = specs_of(graph), dict[str, Node]()
    given = {ref.name for node in graph.nodes if node.op == GRADIENT for ref in node.args[2]}
    for node in graph.nodes:
        if node.op == GRADIENT:
            prepared[node.name] = _with_body(node, graph, specs, prepared, keyed)
        elif node.op == _ONES and node.name in given and len(node.args) == 1 and isinstance(node.spec, Spec):
            # The outputs, which the function computes, are not computed for their shapes.
            shape, dtype = node.spec.shape, Dtype(node.spec.dtype)
            prepared[node.name] = replace(node, op="aten.ones.default", args=(shape,), kwargs={"dtype": dtype})
        else:
            prepared[node.name] = node
    return without_unused(replace(graph, nodes=tuple(prepared.values())), RANDOM)


def _with_body(node: Node, graph: Graph, specs: Mapping[str, Spec], prepared: Mapping[str, Node], keyed: bool) -> Node:
    outputs, inputs, given = ([*references(part)] for part in node.args)
    if len({*inputs}) < len(inputs) or depends_on_another(graph.nodes, inputs):
        raise unwritten(node, "with respect to values that depend on each other")
    if any(jnp.issubdtype(dtype_of(specs[name].dtype), jnp.complexfloating) for name in (*outputs, *inputs)):
        raise unwritten(node, "of complex numbers")
    between = [prepared[x.name] for x in nodes_between(graph.nodes, inputs, outputs)]
    if any((keyed and x.op in RANDOM) or x.op == COND for x in between):
        raise unwritten(node, "through random numbers or a condition of values")
    whole = Graph((), tuple(between), tuple(Ref(name) for name in outputs), {})
    body = without_unused(whole, ())  # without what a gradient among them computes again
    made = {*inputs, *(x.name for x in body.nodes)}
    read = dict.fromkeys([*references([(x.args, x.kwargs) for x in body.nodes]), *outputs])
    closed = [name for name in read if name not in made]
    names = [*inputs, *closed]
    body = replace(body, inputs=tuple(Input(name, "input", str(i), specs[name]) for i, name in enumerate(names)))
    args = tuple(tuple(Ref(name) for name in part) for part in (inputs, given, closed))
    return replace(node, args=args, kwargs={"body": body})


def unwritten(node: Node, what: str) -> Exception:
    """Return the error of a gradient that cannot be written."""
    problem = f"the source of a gradient inside forward, {what}, cannot be written"
    return refusal(problem, "use the imported model", node.source)
