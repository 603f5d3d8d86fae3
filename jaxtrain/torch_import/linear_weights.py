"""Find the parameters of a graph that are weights of linear layers."""

from collections.abc import Collection, Iterator, Mapping

from jaxtrain.interop import AS_IS, OUT_IN, Layout
from jaxtrain.torch_import.graph import REPEAT, SELECT, Graph, references

# Position of the weight among the arguments, and its layout.
_WEIGHT = {
    "aten.linear.default": (1, OUT_IN),
    "aten.addmm.default": (2, AS_IS),
    "aten.mm.default": (1, AS_IS),
    "aten.matmul.default": (1, AS_IS),
}


def linear_weights(graph: Graph, stacks: Collection[str]) -> dict[str, Layout]:
    """Return the layout of each parameter that is nothing but the weight of linear layers.

    `OUT_IN` is that of `torch.nn.Linear`, `AS_IS`, [in, out], that of a product as in `Conv1D` of transformers.

    Args:
      graph: A graph with loops over layers.
      stacks: Names of the parameters that are stacked.
    """
    params = {x.name: x.target for x in graph.inputs if x.kind == "param"}
    dims = {x.target: len(x.spec.shape) - (x.target in stacks) for x in graph.inputs if x.kind == "param"}
    found: dict[str, set[Layout | None]] = {}
    for param, layout in _uses(graph, params, stacks):
        found.setdefault(param, set()).add(layout)
    return {
        param: layout
        for param, (layout, *others) in found.items()
        if layout is not None and not others and dims[param] == 2
    }


def _uses(graph: Graph, params: Mapping[str, str], stacks: Collection[str]) -> Iterator[tuple[str, Layout | None]]:
    """Yield (parameter, layout) of each use; None for a use as something else than a weight.

    Args:
      graph: A graph.
      params: Parameter by the name of its value.
      stacks: As for `linear_weights`.
    """
    known = dict(params)
    for node in graph.nodes:
        given = [*references((node.args, node.kwargs))]
        if node.op == REPEAT:
            body = node.kwargs["body"]
            inner = zip((x.name for x in body.inputs), given, strict=True)
            yield from _uses(body, {name: known[outer] for name, outer in inner if outer in known}, stacks)
        elif node.op == SELECT and known.get(given[0]) in stacks:
            known[node.name] = known[given[0]]  # a layer outside of the loops
        else:
            place, layout = _WEIGHT.get(node.op, (None, None))
            for i, value in enumerate((*node.args, node.kwargs)):
                yield from ((known[x], layout if i == place else None) for x in references(value) if x in known)
    yield from ((known[x], None) for x in references((graph.outputs, graph.state)) if x in known)
