"""Tensors that the passes of `torch.autograd.Function` make of numbers, as `torch.tensor(0.5)`, as their arguments."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.torch_import.graph import Captured, Graph, Input, Ref


class Function(NamedTuple):
    """A call of `torch.autograd.Function`.

    Attributes:
      kwargs: The keyword arguments of its `CUSTOM` node.
      inputs: Inputs of the graph around it that are further arguments of this node.
      constants: Their values, by target.
    """

    kwargs: dict[str, Any]
    inputs: tuple[Input, ...]
    constants: Mapping[str, np.ndarray]


def with_lifted_constants(
    name: str, forward: Captured, backward: Captured, kwargs: Mapping[str, Any], results: int
) -> Function:
    """Return a call whose two passes take their constants as arguments.

    Those of the backward pass are saved by the forward pass.

    Args:
      name: Name of its node.
      forward: The forward pass, of the tensors of the call.
      backward: The backward pass, of what the forward pass saves and the gradients of its results.
      kwargs: Keyword arguments of the node besides the two graphs.
      results: Number of results of the forward pass, with what it saves.
    """
    parts = {"forward": forward, "backward": backward}
    lifted = {
        part: [replace(x, name=f"{name}_{part}_{x.name}", target=f"{name}.{part}.{x.target}") for x in constants]
        for part, constants in ((part, _constants(captured.graph)) for part, captured in parts.items())
    }
    own = {x.target: x for x in lifted["forward"] + lifted["backward"]}
    taken = len(kwargs["has_gradient"])
    first = _with_inputs(forward.graph, lifted["forward"], taken)
    further = [
        Input(x.name, "input", str(taken + len(lifted["forward"]) + i), x.spec)
        for i, x in enumerate(lifted["backward"])
    ]
    saved = tuple(Ref(x.name) for x in further)
    first = replace(first, inputs=(*first.inputs, *further), outputs=(*first.outputs, *saved))
    second = _with_inputs(backward.graph, lifted["backward"], results - kwargs["outputs"])
    return Function(
        {
            **kwargs,
            "forward": first,
            "backward": second,
            "has_gradient": (*kwargs["has_gradient"], *[False] * len(own)),
            "arguments": (*kwargs["arguments"], *["constant"] * len(own)),
        },
        tuple(own.values()),
        {f"{name}.{part}.{target}": x for part, captured in parts.items() for target, x in captured.constants.items()},
    )


def _constants(graph: Graph) -> list[Input]:
    return [x for x in graph.inputs if x.kind == "constant"]


def _with_inputs(graph: Graph, lifted: Iterable[Input], place: int) -> Graph:
    """Return a graph that takes its constants as inputs from a place on, before further inputs."""
    lifted = list(lifted)
    own = [x for x in graph.inputs if x.kind != "constant"]
    moved = [replace(x, target=str(int(x.target) + len(lifted) * (int(x.target) >= place))) for x in own]
    inner = [replace(x, kind="input", target=str(place + i)) for i, x in enumerate(_constants(graph))]
    return replace(graph, inputs=tuple(sorted((*moved, *inner), key=lambda x: int(x.target))))
