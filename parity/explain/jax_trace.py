"""Record every value that JAX computes in training a case, with the line that computes it.

The jaxpr of the whole training step is evaluated equation by equation, through its control flow. Scans are unrolled, so
that each layer has its own values, as in PyTorch. One program computes all values: compiling each equation alone would
take most of the time of locating a difference.
"""

import functools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, JaxprEqn

import jaxtrain
from jaxtrain.interop import LAYER
from jaxtrain.passes import hook
from jaxtrain.paths import path_name
from jaxtrain.program import equations
from jaxtrain.program import operations as op
from jaxtrain.program.recorded_values import Inside, record
from jaxtrain.program.rewrite import bind, interpret
from parity.case import Case
from parity.compare.fingerprint import NOISE, Fingerprint, Sources, Trace, fingerprint
from parity.oracle.compiled import jit
from parity.oracle.in_jax import in_float64
from parity.record import Tensors
from parity.sides import jax_side
from parity.sides.jax_lines import line_of
from parity.source import source_line

MAX_BYTES = 1 << 30
"""Size up to which the results of all equations are computed at once; those of a larger program one after another."""
STEP = Path(jaxtrain.__file__).parent / "step"
"""The training step, which converts constants of the loss but computes none."""
BY_VALUES = (op.WHILE, op.COND)
"""Primitives of loops and branches that depend on values."""
GRADIENT = "gradient of "
"""Prefix of the names of the parameters' gradients."""
RANDOM = ("philox", "random_", "rng_", "threefry")
"""Prefixes of primitives that draw bits, which PyTorch draws differently."""


@dataclass(frozen=True)
class Equation:
    """An equation of the jaxpr; `source` is the line of the model, the loss or the optimizer that it comes from."""

    name: str
    source: tuple[str, int] | None

    def line(self) -> str:
        """Return file, line number and text of its source."""
        return source_line(*self.source) if self.source else ""

    @property
    def in_step(self) -> bool:
        """Whether it comes from the training step, or from no line at all, instead of the model, loss or optimizer."""
        return not _computes(self.source)


@dataclass(frozen=True)
class End:
    """The results of a training step.

    Attributes:
      loss: Sources of its loss.
      state: Sources of the state after it.
      forward: The range of its forward pass's values.
      parameters: Sources of the parameters before it, by PyTorch's names.
      gradients: Their gradients as differentiated, by PyTorch's names.
    """

    loss: Sources
    state: Sources
    forward: range
    parameters: Mapping[str, Sources]
    gradients: Mapping[str, Fingerprint]


def jax_trace(case: Case, weights: Tensors, *, steps: int, seed: int) -> tuple[Trace[Equation], list[End]]:
    """Train in float64 as `jax_side.run` does and return every value, and the end of each step."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        step = jaxtrain.train_step(
            _with_named_gradients(in_float64(case.loss_fn)),
            case.optimizer.jax,
            precision="fp64",
            clip_norm=case.clip_norm,
        )
        params, model_state = jax_side.from_torch(case, weights)
        fresh = step.init(params, model_state=jax_side.arrays(model_state, "fp64"), seed=seed)
        batches = [jax_side.arrays(batch, "fp64") for batch in case.batches(seed, steps)]
        evaluation = Evaluation(step.pure, fresh, _stacked_shapes(case, fresh.params))
        state = jax.tree.map(_constant, fresh)._replace(
            params=jax.tree.map(evaluation.weight, fresh.params),
            model_state=jax.tree.map(evaluation.weight, fresh.model_state),
        )
        done = []
        for batch in batches:
            started, parameters = len(evaluation.trace.values), _by_torch_name(case, state.params)
            state, metrics = evaluation(state, batch)
            loss = metrics["loss"].all
            # The step divides the total by the weight at the very end.
            total = _union(evaluation.trace.values[i].sources for i in loss)
            total = frozenset(i for i in total if evaluation.trace.values[i].trained)
            forward = range(started, max(total, default=started) + 1)
            after = _union(x.all for x in jax.tree.leaves(state))
            done.append(End(loss, after, forward, parameters, _fingerprints(case, evaluation.gradients)))
    return evaluation.trace, done


class Evaluation:
    """A training step evaluated equation by equation, one update after another.

    Args:
      step: From (state, batch) to (state, results).
      state: A state, with arrays.
      stacked_shapes: Shapes of the leaves that stack a tensor of every layer.
    """

    def __init__(self, step: Callable[..., Any], state: Any, stacked_shapes: Collection[tuple[int, ...]] = ()) -> None:
        self._step, self._like = step, state
        self._programs: dict[str, tuple[ClosedJaxpr, Any, Any]] = {}  # by the names and the shapes of a batch
        self._recorder = _Recorder(stacked_shapes)
        of_traced: dict[str, Any] = {"array": lambda x: _traced(x).value, "index": _Traced.layer, op.STACK: _stacked}
        self._rule = record(self._recorder.visit, lift=self._recorder.given, **of_traced)

    @property
    def trace(self) -> Trace[Equation]:
        """The values of all updates so far."""
        return self._recorder.trace

    @property
    def gradients(self) -> Mapping[str, Any]:
        """The gradients of the last update that are named (`_with_named_gradients`)."""
        return self._recorder.gradients

    def weight(self, x: Any) -> "_Traced":
        """Return a leaf of the first state that PyTorch has too; the other leaves may be given as arrays."""
        return self._recorder.add_input(x)

    def __call__(self, state: Any, batch: Any) -> Any:
        """Return the results of an update, as values with their sources."""
        recorder, key = self._recorder, str(jax.tree.map(lambda x: (x.shape, x.dtype), batch))
        if key not in self._programs:
            closed, shapes = jax.make_jaxpr(self._step, return_shape=True)(self._like, batch)
            program = _program(closed, jax.tree.leaves((self._like, batch)))
            self._programs[key] = closed, jax.tree.structure(shapes), program
        closed, structure, compute = self._programs[key]
        inputs = jax.tree.leaves((state, jax.tree.map(recorder.add_batch, batch)))
        if compute is not None:
            recorder.computed = deque(compute(*(_traced(x).value for x in inputs)))
        recorder.gradients = {}
        outs = interpret(closed.jaxpr, closed.consts, inputs, self._rule)
        return jax.tree.unflatten(structure, map(_traced, outs))


def _with_named_gradients(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Name the gradients of the parameters by their paths."""

    def leaf(path: Any, x: Any) -> Any:
        return hook(x, lambda gradient: checkpoint_name(gradient, f"{GRADIENT}{path_name(path)}"))

    @functools.wraps(loss_fn)
    def named(params: Any, *args: Any) -> Any:
        return loss_fn(jax.tree.map_with_path(leaf, params), *args)

    return named


def _fingerprints(case: Case, gradients: Mapping[str, Any]) -> dict[str, Fingerprint]:
    named = jax.tree.map_with_path(lambda path, x: gradients.get(path_name(path), np.zeros(x.shape)), case.params_like)
    # The conjugate is PyTorch's gradient of a complex parameter.
    return {name: fingerprint(np.conj(x)) for name, x in jax_side.to_torch(case, named).items()}


def _by_torch_name(case: Case, params: Any) -> dict[str, Sources]:
    table = case.tables[0].params
    leaves = jax.tree.leaves_with_path(params)
    return {
        table[path_name(path)].name.replace(LAYER, str(i)): sources
        for path, leaf in leaves
        for i, sources in enumerate(leaf.sources)
    }


def _program(closed: ClosedJaxpr, inputs: Sequence[Any]) -> Callable[..., list[list[Any]]] | None:
    """Compile a function from the inputs to the results of every equation, in the order in which they are recorded.

    Equations in loops and branches that depend on values are not among them.

    Returns:
      The function; None if the results would take more than `MAX_BYTES`.
    """

    def compute(*inputs: Any) -> list[list[Any]]:
        computed: list[list[Any]] = []

        def visit(eqn: JaxprEqn, args: list[Any], _: Inside) -> list[Any]:
            outs = bind(eqn, args)
            if op.of(eqn) not in BY_VALUES:
                computed.append(outs)
            return outs

        interpret(closed.jaxpr, closed.consts, inputs, record(visit))
        return computed

    traced = jit(compute).trace(*inputs)
    bytes_of = (x.size * x.dtype.itemsize for x in jax.tree.leaves(traced.out_info))
    return traced.lower().compile() if sum(bytes_of) <= MAX_BYTES else None


@dataclass(frozen=True)
class _Traced:
    """A value and its sources: one set, or one per layer if the first axis stacks layers."""

    value: Any
    sources: tuple[Sources, ...]

    @property
    def all(self) -> Sources:
        return _union(self.sources)

    def layer(self, i: int) -> "_Traced":
        return _Traced(self.value[i], (self.of_layer(i),))

    def of_layer(self, i: int) -> Sources:
        return self.sources[i % len(self.sources)]


class _Recorder:
    """Evaluates a jaxpr on values of type `_Traced`."""

    def __init__(self, stacked_shapes: Collection[tuple[int, ...]]) -> None:
        self.trace: Trace[Equation] = Trace()
        self.stacked_shapes = stacked_shapes
        self.constants: dict[Any, _Traced] = {}
        self.computed: deque[list[Any]] | None = None
        self.gradients: dict[str, Any] = {}

    def add_input(self, value: Any) -> _Traced:
        """Record a parameter or a buffer."""
        value = np.asarray(value)
        layers = list(value) if value.shape in self.stacked_shapes else [value]
        return _Traced(value, tuple(self.trace.add_input(layer) for layer in layers))

    def add_batch(self, value: Any) -> _Traced:
        """Record an array of the batch."""
        return _Traced(value, (self.trace.add_batch(np.asarray(value)),))

    def visit(self, eqn: JaxprEqn, given: list[_Traced], inside: Inside) -> list[_Traced]:
        """Evaluate an equation and record its results."""
        name, where = op.of(eqn), Equation(op.of(eqn), line_of(eqn, inside))
        if self.computed and not any(op.of(x) in BY_VALUES for x in inside):
            outs = [*map(_array, self.computed.popleft())]
        else:
            outs = bind(eqn, [x.value for x in given])
        if name == op.NAME and equations.label(eqn).startswith(GRADIENT):
            self.gradients[equations.label(eqn).removeprefix(GRADIENT)] = given[0].value
            return given
        return [self._recorded(out, given, where) for out in outs]

    def given(self, value: Any, eqn: JaxprEqn, inside: Inside) -> _Traced:
        """An argument; an array that the program closes over is recorded where it is first used, a number as an input.

        A conversion that no line of the user's asks for is no use.
        """
        given, line = _traced(value), line_of(eqn, inside)
        if given.all or not _is_number(given.value) or (np.ndim(given.value) and not _computes(line)):
            return given
        x = np.asarray(given.value)
        key = (id(given.value), None) if x.ndim else (x.dtype, x.item())
        if key not in self.constants:
            where = Equation("constant", line) if x.ndim else None
            self.constants[key] = _Traced(given.value, (self.trace.add(x, frozenset(), where),))
        return self.constants[key]

    def _recorded(self, value: Any, given: Sequence[_Traced], where: Equation) -> _Traced:
        sources = NOISE if where.name.startswith(RANDOM) else _union(x.all for x in given)
        whole = self._add(value, sources, where)
        n = max((len(x.sources) for x in given), default=1)
        if np.shape(value) in self.stacked_shapes or (n > 1 and value.shape[:1] == (n,)):
            layers = (_union(x.of_layer(i) for x in given) for i in range(len(value)))
            return _Traced(value, tuple(self._add(x, given, where) for x, given in zip(value, layers, strict=True)))
        return _Traced(value, (whole,))

    def _add(self, value: Any, sources: Sources, where: Equation) -> Sources:
        if not _is_number(value) or not (sources or _computes(where.source)):
            return sources
        return self.trace.add(np.asarray(value), sources, where)


def _computes(line: tuple[str, int] | None) -> bool:
    """Whether a line may be that of a constant."""
    return line is not None and Path(line[0]).parent != STEP


def _is_number(value: Any) -> bool:
    """Whether a value is of numbers or booleans; keys and float0 are not."""
    dtype = np.result_type(value) if np.isscalar(value) else value.dtype
    return any(jax.dtypes.issubdtype(dtype, kind) for kind in (np.inexact, np.integer, np.bool_))


def _traced(value: Any) -> _Traced:
    return value if isinstance(value, _Traced) else _constant(value)


def _constant(value: Any) -> _Traced:
    return _Traced(value, (frozenset(),))


def _array(value: Any) -> Any:
    """A value as a NumPy array, whose slices need no program; keys as they are."""
    return value if jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended) else np.asarray(value)


def _union(sources: Iterable[Sources]) -> Sources:
    return frozenset().union(*sources)


def _stacked_shapes(case: Case, params: Any) -> set[tuple[int, ...]]:
    """Shapes of the leaves that stack a tensor of every layer."""
    table, _ = case.tables
    leaves = jax.tree.leaves_with_path(params)
    return {leaf.shape for path, leaf in leaves if LAYER in table.params[path_name(path)].name}


def _stacked(layers: Sequence[Any], _: Any) -> _Traced:
    traced = [*map(_traced, layers)]
    values = [y.value for y in traced]
    stack = (np if isinstance(values[0], np.ndarray) else jnp).stack(values)
    return _Traced(stack, tuple(y.all for y in traced))
