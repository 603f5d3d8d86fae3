"""Bugs in the operations of an imported module: each computes values, or has a gradient, that are off by a thousandth.

An operation is chosen if the loss depends on a parameter through it. Each overload is one mutant of either kind.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.torch_import import RECOMPUTED, TABLE, Graph, Node, Ref, Spec
from parity.case import Case
from parity.mutate.mutant import Mutant

if TYPE_CHECKING:
    from parity.divergence import Divergence

SIZE = 1e-3
DETACH = "aten.detach.default"


@dataclass(frozen=True)
class OperationMutant(Mutant):
    """A wrong operation.

    Attributes:
      sources: The lines of PyTorch code that call it.
    """

    sources: Collection[str] = field(default_factory=frozenset)

    def located_by(self, found: "Divergence | None") -> bool:
        """Whether a divergence is at a line that calls the operation."""
        return found is not None and _line(found.torch_source) in map(_line, self.sources)


def mutants_of(graph: Graph, case: Case) -> Iterator[OperationMutant]:
    """Yield the mutants of an imported module.

    Args:
      graph: The graph of a training pass.
      case: The module's case.

    Yields:
      Two mutants for each overload.
    """
    sources: dict[str, set[str]] = {}
    for node in _differentiated(graph):
        if node.op in TABLE:
            sources.setdefault(node.op, set()).add(node.source)
    clean = lambda: case  # noqa: E731 - the object that the mutants share
    for op, lines in sources.items():
        for kind, wrong in (("values", _with_wrong_values), ("gradient", _with_wrong_gradient)):
            patch = lambda op=op, wrong=wrong: mock.patch.dict(TABLE, {op: wrong(TABLE[op])})  # noqa: E731
            # A loss function of its own, so that nothing traced without the bug is found again.
            mutated = lambda: replace(case, loss_fn=lambda *args: case.loss_fn(*args))  # noqa: E731
            yield OperationMutant(f"{op}: {kind}", mutated, clean, ".*", patch=patch, sources=lines)


def _differentiated(graph: Graph) -> list[Node]:
    """Return the floating-point operations through which an output depends on a parameter with a gradient."""
    reached = {x.name for x in graph.inputs if x.kind == "param"}
    forward = []
    # The operations of a formula that is computed again take the values around it by their names.
    formulas = (node.kwargs["graph"].nodes if node.op == RECOMPUTED else (node,) for node in graph.nodes)
    for node in chain.from_iterable(formulas):
        if node.op != DETACH and _floating(node) and any(ref in reached for ref in _refs((node.args, node.kwargs))):
            reached.add(node.name)
            forward.append(node)
    outputs = graph.outputs
    used = {*_refs(outputs.get("loss") or outputs if isinstance(outputs, dict) else outputs)}
    found = []
    for node in reversed(forward):
        if node.name in used:
            used.update(_refs((node.args, node.kwargs)))
            found.append(node)
    return found[::-1]


def _refs(value: Any) -> Iterator[str]:
    if isinstance(value, Ref):
        yield value.name
    elif isinstance(value, dict | tuple | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _refs(item)


def _floating(node: Node) -> bool:
    specs = node.spec if isinstance(node.spec, tuple) else (node.spec,)
    return any(isinstance(spec, Spec) and "float" in spec.dtype for spec in specs)


def _with_wrong_values(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of wrong values: nowhere does it compute the right ones, which `locate` would find."""

    def mutated(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        first = next((i for i, x in enumerate(leaves) if _is_floating(x)), None)
        if first is not None:
            leaves[first] = leaves[first] * _factors(leaves[first])
        return fn(*jax.tree.unflatten(structure, leaves), **kwargs)

    return mutated


def _with_wrong_gradient(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of the right values with a wrong gradient."""

    def mutated(*args: Any, **kwargs: Any) -> Any:
        return jax.tree.map(lambda x: _wrong_gradient(x) if _is_floating(x) else x, fn(*args, **kwargs))

    return mutated


def _is_floating(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, np.floating)


@jax.custom_vjp
def _wrong_gradient(x: jax.Array) -> jax.Array:
    return x


_wrong_gradient.defvjp(lambda x: (x, None), lambda _, grad: (grad * _factors(grad),))


def _factors(x: jax.Array) -> jax.Array:
    """Return factors near 1, different for each element, which no normalization undoes."""
    return jnp.asarray(1 + SIZE * np.cos(np.arange(1.0, 1 + x.size)).reshape(x.shape), x.dtype)


def _line(source: str) -> tuple[str, ...]:
    """Return name of the file, number and text of a line."""
    file, *rest = source.split(":", 2)
    return (Path(file).name, *(part.strip() for part in rest))
