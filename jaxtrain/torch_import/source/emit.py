"""The file of a model: its functions, its constants, and the proof that it computes what the imported model does."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.errors import UserError
from jaxtrain.interop import TorchParam
from jaxtrain.program import equations
from jaxtrain.torch_import.graph import (
    COND,
    CUSTOM,
    GRADIENT,
    REPEAT,
    SELECT,
    Graph,
    Input,
    Spec,
    dtype_of,
    without_unused,
)
from jaxtrain.torch_import.interpret import pytorchs_promotion
from jaxtrain.torch_import.ops import RANDOM
from jaxtrain.torch_import.refusals import refusal
from jaxtrain.torch_import.source.call_tree import Origins, specs_of
from jaxtrain.torch_import.source.class_functions import Module, Special
from jaxtrain.torch_import.source.compare import fingerprint
from jaxtrain.torch_import.source.constants import inline
from jaxtrain.torch_import.source.custom import custom_item, with_own_names
from jaxtrain.torch_import.source.expressions import Expr, literal
from jaxtrain.torch_import.source.file import LOADING, file_of
from jaxtrain.torch_import.source.inner_gradients import gradient_item, with_bodies
from jaxtrain.torch_import.source.layer_loops import loop_item
from jaxtrain.torch_import.source.signatures import Functions
from jaxtrain.torch_import.source.writing import Writing

Model = Callable[..., Any]
"""`model(params, batch, rng, state)`, as `ImportedModel.__call__`."""


class Pass(NamedTuple):
    """A captured forward pass.

    Attributes:
      graph: Its graph.
      origins: Where its operations come from.
      buffers: Buffers and constants by name.
      recomputed: Names of the operations of each call that the backward pass computes again.
    """

    graph: Graph
    origins: Origins
    buffers: Mapping[str, Any]
    recomputed: Collection[frozenset[str]]


@pytorchs_promotion()
def source_of(
    name: str,
    train: Pass,
    evaluation: Pass | None,
    *,
    model: Model,
    batch: Any,
    classes: Mapping[str, type],
    ops: Mapping[str, Callable[..., Any]],
    stacks: Mapping[str, TorchParam],
) -> tuple[str, dict[str, Any]]:
    """Return the text of a file that defines `model`, with the buffers that it reads.

    Args:
      name: Name of the module's class.
      train: The pass in training mode.
      evaluation: The pass in evaluation mode; None writes the other one alone.
      model: What the file shall compute: the two passes.
      batch: Shapes of a batch.
      classes: Classes of the modules by path.
      ops: Functions of operations that the table lacks.
      stacks: Stacked parameters and buffers by name.

    Raises:
      UserError: A buffer has no values, or the file would not compute
        what the model does.
    """
    _check(train)
    if evaluation is not None:
        _check(evaluation)
    params, state = (_shapes(train.graph, kind) for kind in ("param", "state"))
    writer = _Writer(name, classes, ops, batch, frozenset(train.graph.state), stacks)
    modes = (True,) if evaluation is None else (True, False)
    wanted = [_program(model, params, state or None, batch, train=flag) for flag in modes]
    buffers = {**train.buffers, **(evaluation.buffers if evaluation else {})}
    for other in (None, evaluation):
        text = writer.file(train, other)
        used = {key: buffers[key] for key in sorted(writer.large)} if "BUFFERS" in text else {}
        found = _programs(loaded(text, used), params, state or None, batch)[: len(wanted)]
        if found == wanted:
            return text, used
        if found[0] != wanted[0]:
            break
    raise UserError(
        f"the source of {name} would not compute what the imported model does: keep the imported model, and report this"
    )


def _programs(model: Model, params: Any, state: Any, batch: Any) -> list[Any]:
    """Return what an emitted model computes in both modes; None for evaluation if it needs the key."""
    training = _program(model, params, state, batch, train=True)
    try:
        return [training, _program(model, params, state, batch, train=False)]
    except (TypeError, ValueError, AttributeError):
        return [training, None]


_UNWRITTEN = {
    COND: "a condition of values",
}
"""What a file cannot contain, by operation."""


def _check(captured: Pass) -> None:
    """Raise an error for what cannot be written."""
    for node in captured.graph.nodes:
        if node.op in _UNWRITTEN:
            raise refusal(
                f"the source of {_UNWRITTEN[node.op]} cannot be written", "use the imported model", node.source
            )
    for x in captured.graph.inputs:
        if x.kind == "constant" and isinstance(captured.buffers[x.target], jax.ShapeDtypeStruct):
            raise refusal(
                f'the buffer {x.target!r} has no values, it is on the "meta" device', "import a module with weights"
            )


def _shapes(graph: Graph, kind: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shapes and dtypes of the graph's inputs of a kind, by name."""
    given = (x for x in graph.inputs if x.kind == kind)
    return {x.target: jax.ShapeDtypeStruct(x.spec.shape, dtype_of(x.spec.dtype)) for x in given}


def loaded(text: str, buffers: Mapping[str, Any]) -> Model:
    """Return the function `model` of an emitted file, with its buffers."""
    namespace: dict[str, Any] = {"__name__": "model", "__file__": "model.py"}
    if LOADING in text:
        text = text.replace(LOADING, "BUFFERS = _BUFFERS")
        namespace["_BUFFERS"] = dict(buffers)
    exec(compile(text, "model.py", "exec", dont_inherit=True), namespace)
    model: Model = namespace["model"]
    return model


class _Writer:
    """Writes files."""

    def __init__(
        self,
        name: str,
        classes: Mapping[str, type],
        ops: Mapping[str, Any],
        batch: Any,
        state: frozenset[str],
        stacks: Mapping[str, TorchParam],
    ) -> None:
        self._name, self._classes, self._ops, self._batch, self._stacks = name, classes, ops, batch, stacks
        self._constants: dict[str, str] = {}  # name -> expression
        self._state, self.large = state, {*state}  # buffers that are not written out

    def file(self, train: Pass, evaluation: Pass | None) -> str:
        """Return the text of a file: of one pass for both modes, or of one for each."""
        functions = Functions()
        imports: dict[str, str] = {}
        main = self._body(train, functions, imports)
        parts = []
        if evaluation is not None:
            lines = self._body(evaluation, functions, imports, rng="None")
            doc = f'    """{self._name} in evaluation mode."""'
            parts.append([_EVALUATE, doc, *lines])
            main = ["    if rng is None:", "        return evaluate(params, batch, state)", *main]
        doc = f'    """{self._name}: (outputs, new state)."""'
        parts.append([_MODEL, doc, *main])
        return file_of(
            self._name,
            [*functions.texts.values(), *("\n".join(part) for part in parts)],
            self._constants,
            self._stacks,
            imports,
            has_loss=isinstance(train.graph.outputs, dict) and "loss" in train.graph.outputs,
            has_state=bool(train.graph.state),
        )

    def _body(self, captured: Pass, functions: Functions, imports: dict[str, str], rng: str = "rng") -> list[str]:
        kept = _with_layers(_prepared(captured.graph), self._stacks)
        writing = Writing(self._ops, specs_of(kept))
        writing.keyed = _draws(kept, self._ops, captured.buffers)
        kept = with_bodies(kept, writing.keyed)
        inputs = _inputs(self._batch, kept)
        constants = self._constant(captured)
        how = (writing, functions, captured.recomputed, _SPECIAL)
        module = Module(kept, captured.origins, self._classes, constants, inputs, *how)
        lines = module.write()
        imports.update(writing.imports)
        if kept.state:
            lines[-1:] = _with_state(lines[-1])
        added = {x.kind for x in kept.inputs[len(captured.graph.inputs) :]}
        layers = [f"    {name} = unstacked({name})" for kind, name in _DICTS.items() if kind in added]
        return [*self._start(lines, rng), *layers, *lines]

    def _constant(self, captured: Pass) -> Callable[[Input], Expr | None]:
        def expression(given: Input) -> Expr | None:
            written = None if given.target in self._state else inline(captured.buffers[given.target])
            if written is None:
                self.large.add(given.target)
                return None
            names = [name for name, text in self._constants.items() if text == written.text]
            return Expr(names[0] if names else self._new_constant(given.target, written.text))

        return expression

    def _new_constant(self, target: str, text: str) -> str:
        name = "".join(char if char.isalnum() else "_" for char in target.split(".")[-1]).upper()
        free = (x for x in (name, *(f"{name}_{i}" for i in range(2, 1000))) if x not in self._constants)
        self._constants[chosen := next(free)] = text
        return chosen

    def _start(self, lines: list[str], rng: str) -> list[str]:
        """Return the statements that define what a body of `model` reads."""
        text, start = "\n".join(lines), []
        if re.search(r"\bkeys\b", text):
            start.append(f"    keys = Keys({rng})")
        if re.search(r"\btrain\b", text):
            start.append(f"    train = {rng} is not None")
        if re.search(r"\bbuffers\b", text):
            start.append("    buffers = BUFFERS if state is None else {**BUFFERS, **state}")
        return start


_SPECIAL: Special = {REPEAT: loop_item, CUSTOM: custom_item, GRADIENT: gradient_item}
_DICTS = {"param": "params", "state": "buffers"}
_RESULT = "tuple[Any, Tensors | None]"
_MODEL = f"def model(params: Tensors, batch: Any, rng: Array | None = None, state: Tensors | None = None) -> {_RESULT}:"
_EVALUATE = f"def evaluate(params: Tensors, batch: Any, state: Tensors | None = None) -> {_RESULT}:"


def _prepared(graph: Graph) -> Graph:
    """Return a graph without unused operations, also in the layers of its loops, and with different names of values."""
    nodes = []
    for node in without_unused(graph, RANDOM).nodes:
        if node.op == REPEAT:
            node = replace(node, kwargs={**node.kwargs, "body": _prepared(node.kwargs["body"])})
        nodes.append(with_own_names(node) if node.op == CUSTOM else node)
    return replace(graph, nodes=tuple(nodes))


def _with_layers(graph: Graph, stacks: Mapping[str, TorchParam]) -> Graph:
    """Return a graph that takes the tensors of layers outside of loops by PyTorch's names, not slices of the stacks."""
    given = {x.name: x for x in graph.inputs}
    inputs, nodes = [], []
    for node in graph.nodes:
        stack = given.get(node.args[0].name) if node.op == SELECT and not node.source else None
        if stack is None or stack.target not in stacks or not isinstance(node.spec, Spec):
            nodes.append(node)
            continue
        name = stacks[stack.target].names(0)[node.args[2]]
        inputs.append(Input(node.name, "param" if stack.kind == "param" else "state", name, node.spec))
    return replace(graph, inputs=(*graph.inputs, *inputs), nodes=tuple(nodes))


def _with_state(returned: str) -> list[str]:
    """Return the lines of a return statement with the new state in the structure of the old one."""
    merged = "None if state is None else {**state, **joined(new_state)}"
    return [f"    new_state = {merged}", returned]


def _draws(graph: Graph, ops: Mapping[str, Any], buffers: Mapping[str, Any]) -> bool:
    """Return whether a pass depends on its key."""
    from jaxtrain.torch_import.interpret import interpret

    shapes: dict[str, dict[str, Any]] = {kind: {} for kind in ("param", "state", "constant")}
    leaves: dict[int, Any] = {}
    for x in graph.inputs:
        like = jax.ShapeDtypeStruct(x.spec.shape, dtype_of(x.spec.dtype))
        if x.kind == "input":
            leaves[int(x.target)] = like
        else:
            shapes[x.kind][x.target] = like
    inputs = [leaves.get(i) for i in range(max(leaves, default=-1) + 1)]

    def run(key: Any, shapes: Any, inputs: Any) -> Any:
        param, state, constant = shapes["param"], shapes["state"], shapes["constant"]
        return interpret(graph, params=param, state=state, constants=constant, inputs=inputs, rng=key, ops=ops)

    program = jax.make_jaxpr(run)(jax.eval_shape(lambda: jax.random.key(0)), shapes, inputs)
    return _depends_on_first(program.jaxpr)


def _depends_on_first(jaxpr: Any) -> bool:
    needed = {var for var in jaxpr.outvars if not hasattr(var, "val")}
    for eqn in reversed(equations.of(jaxpr)):
        if any(var in needed for var in eqn.outvars):
            needed.update(var for var in eqn.invars if not hasattr(var, "val"))
    return jaxpr.invars[0] in needed


def _inputs(batch: Any, graph: Graph) -> list[str]:
    """Return the expressions of a batch's leaves, in the dtypes that PyTorch's module takes."""
    wanted = {int(x.target): dtype_of(x.spec.dtype) for x in graph.inputs if x.kind == "input"}
    found = []
    for i, (path, x) in enumerate(jax.tree_util.tree_flatten_with_path(batch)[0]):
        given = dtype_of(x.dtype.name)
        cast = "" if wanted.get(i, given) == given else f".astype({literal(wanted[i])})"
        found.append(f"batch{_subscripts(path)}{cast}")
    return found


def _subscripts(path: Any) -> str:
    named = ("." + entry.name if hasattr(entry, "name") else "" for entry in path)
    keys = (getattr(entry, "key", getattr(entry, "idx", None)) for entry in path)
    return "".join(name or f"[{literal(key)}]" for name, key in zip(named, keys, strict=True))


def _program(model: Model, params: Any, state: Any, batch: Any, *, train: bool) -> Any:
    """Return what is equal for models that compute the same outputs, new state and gradients."""
    key = jax.eval_shape(lambda: jax.random.key(0)) if train else None
    # As JAX takes the arrays of a batch: since JAX 0.12 it warns of shapes with 64 bits.
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)), batch)

    def outputs(params: Any, batch: Any, rng: Any, state: Any) -> Any:
        return model(params, batch, rng, state)

    def gradients(params: Any, batch: Any, rng: Any, state: Any) -> Any:
        def total(params: Any) -> Any:
            leaves = jax.tree.leaves(model(params, batch, rng, state)[0])
            sums = [jnp.sum(x).real for x in leaves if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
            return sum(sums[1:], sums[0]) if sums else jnp.zeros(())

        found = jax.tree.leaves(jax.grad(total, allow_int=True)(params))
        return [x for x in found if x.dtype != jax.dtypes.float0]

    trace = lambda fn: jax.make_jaxpr(fn, return_shape=True)(params, batch, key, state)  # noqa: E731
    program, shape = trace(outputs)
    pulled = fingerprint(trace(gradients)[0]) if train else None
    return fingerprint(program), str(jax.tree.structure(shape)), pulled
