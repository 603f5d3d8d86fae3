"""`torch.autograd.Function`, written as a function with `jax.custom_vjp`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import jax.numpy as jnp

from jaxtrain.torch_import.graph import Graph, Node, Ref, dtype_of, references
from jaxtrain.torch_import.rewrites.layers import mapped
from jaxtrain.torch_import.source.body import Body, Item, Resolve
from jaxtrain.torch_import.source.call_tree import Block, tree_of
from jaxtrain.torch_import.source.class_functions import Module
from jaxtrain.torch_import.source.expressions import Expr, call
from jaxtrain.torch_import.source.identifiers import identifier, snake_case
from jaxtrain.torch_import.source.pytorch_code import file_of
from jaxtrain.torch_import.source.scope import Scope, own


def custom_item(module: Module, node: Node, owner: Block, scope: Scope) -> Item:
    """Return a call of `Function.apply` as an item, and write its function.

    Args:
      module: Writes the functions of the graph.
      node: The `CUSTOM` node.
      owner: The call of a module whose function contains it.
      scope: What this function can read, of which the passes read nothing.
    """
    del scope
    results, count = module.results.get(node.name, {}), node.kwargs["outputs"]
    own_name = node.kwargs["function"].rpartition(".")[2]
    name = module.functions.add(
        snake_case(own_name), node.kwargs["function"], lambda free, _: _text(module, node, free)
    )
    operands = list(references(node.args))
    return Item(
        lambda resolve: call(name, *map(resolve, operands)),
        operands,
        dict(results),
        count,
        module.statements(node, owner),
        name,
    )


def with_own_names(node: Node) -> Node:
    """Return a `CUSTOM` node with different names of the values in its two graphs, which are those of their origins."""
    graphs = {name: _renamed(node.kwargs[name], f"{node.name}.{name}.") for name in ("forward", "backward")}
    return replace(node, kwargs={**node.kwargs, **graphs})


def _renamed(graph: Graph, start: str) -> Graph:
    def renamed(ref: Ref) -> Ref:
        return Ref(start + ref.name)

    inputs = tuple(replace(x, name=start + x.name) for x in graph.inputs)
    nodes = []
    for node in graph.nodes:
        args, kwargs = mapped((node.args, node.kwargs), renamed)
        nodes.append(replace(node, name=start + node.name, args=args, kwargs=kwargs))
    return Graph(inputs, tuple(nodes), mapped(graph.outputs, renamed), {})


def _text(module: Module, node: Node, name: str) -> str:
    """Return the text of the function, of its forward and of its backward pass."""
    path, _, owner = node.kwargs["function"].rpartition(".")
    arguments = _distinct(node.kwargs["arguments"])
    forward, saved = _forward(module, node, arguments)
    backward, grads = _backward(module, node, saved)
    given = ", ".join(f"{argument}: Array" for argument in arguments)
    count = node.kwargs["outputs"]
    outputs = "Array" if count == 1 else f"tuple[{', '.join(['Array'] * count)}]"
    parts = [
        [
            "@jax.custom_vjp",
            f"def {name}({given}) -> {outputs}:",
            f'    """{owner} of {file_of(path)}."""',
            f"    return {name}_forward({', '.join(arguments)})[0]",
        ],
        [f"def {name}_forward({given}) -> tuple[{outputs}, Any]:", *forward],
        [f"def {name}_backward(saved: Any, {grads}: Any) -> tuple[Any, ...]:", *backward],
        [f"{name}.defvjp({name}_forward, {name}_backward)"],
    ]
    return "\n\n\n".join("\n".join(lines) for lines in parts)


def _forward(module: Module, node: Node, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the statements of the forward pass, and names of the values that it saves."""
    graph, count = node.kwargs["forward"], node.kwargs["outputs"]

    def result(resolve: Resolve) -> Expr:
        values = [resolve(ref.name).text for ref in graph.outputs]
        return Expr(f"{_packed(values[:count])}, {_tuple(values[count:])}")

    body = _body(module, node, "forward", arguments, result)
    names = [body.name_of(ref.name) or "x" for ref in graph.outputs[count:]]
    return body.lines, _distinct([name if name.isidentifier() else "x" for name in names])


def _backward(module: Module, node: Node, saved: Sequence[str]) -> tuple[list[str], str]:
    """Return the statements of the backward pass, and the name of the gradients that it takes."""
    graph, outputs = node.kwargs["backward"], node.kwargs["forward"].outputs[: node.kwargs["outputs"]]
    specs = {x.name: x.spec for x in (*node.kwargs["forward"].nodes, *node.kwargs["forward"].inputs)}
    floating = [jnp.issubdtype(dtype_of(specs[ref.name].dtype), jnp.floating) for ref in outputs]
    grads = _distinct([*saved, *node.kwargs["gradients"][: len(outputs)]])[len(saved) :]

    def result(resolve: Resolve) -> Expr:
        values = iter([resolve(ref.name).text for ref in graph.outputs])
        return Expr(_tuple([next(values) if given else "None" for given in node.kwargs["has_gradient"]]))

    taken = [name for name, kept in zip(grads, floating, strict=True) if kept]
    body = _body(module, node, "backward", [*saved, *taken], result)
    start = [f"    {_packed(saved, always=True)} = saved"] * bool(saved)
    start += [f"    {', '.join(grads)} = grads"] * (len(grads) > 1)
    return [*start, *body.lines], grads[0] if len(grads) == 1 else "grads"


def _body(module: Module, node: Node, name: str, names: Sequence[str], result: Callable[[Resolve], Expr]) -> Body:
    """Write the statements of a pass."""
    graph: Graph = node.kwargs[name]
    hints: Mapping[str, str] = {x.name: given for x, given in zip(graph.inputs, names, strict=True)}
    inner = module.nested(graph, hints)
    root = tree_of(graph, module.origins)
    items = inner.items(root, root, own(None))
    body = Body({given: x for x, given in hints.items()}, inner.outer(own(None)), module.reserved(), [])
    body.write(items, list(references(graph.outputs)), result)
    return body


def _distinct(names: Sequence[str]) -> list[str]:
    """Return names of arguments, made different."""
    found: list[str] = []
    for name in names:
        name = identifier(name)
        found.append(next(x for x in (name, *(f"{name}_{i}" for i in range(2, 1000))) if x not in found))
    return found


def _packed(values: Sequence[str], always: bool = False) -> str:
    if len(values) == 1:
        return f"({values[0]},)" if always else values[0]
    return ", ".join(values) if always else f"({', '.join(values)})"


def _tuple(values: Sequence[str]) -> str:
    return f"({', '.join(values)}{',' * (len(values) == 1)})"
