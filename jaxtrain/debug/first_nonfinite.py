"""Find the operation of a program in which the first inf or NaN arises that reaches its results.

A jaxpr is evaluated equation by equation on values, through its control flow. Every non-finite value records which
non-finite values it was computed from. From a result this leads back to the first NaN, and from there to the inf that
it was computed from. A value that reaches no result, such as a mask of -inf or a NaN that `where` discards, is not
reported. With `wide`, everything is computed in float64 from the same random draws: what is finite there overflowed.

Values are freed after their last use, and each is reduced to a flag on its device: a replay needs little more memory
than the largest values that are alive at the same time.
"""

import functools
import importlib.util
import linecache
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxtrain.program import equations, rewrite
from jaxtrain.program import operations as op
from jaxtrain.program.recorded_values import Inside, line_of, record
from jaxtrain.program.rewrite import bind, cast_like, interpret

# Computed outside JAX in the dtypes they declare, or defined on the bits of a number: not lifted to float64.
_AS_TRACED = frozenset({op.PURE_CALLBACK, op.IO_CALLBACK, op.FFI_CALL, op.PALLAS_CALL, op.BITCAST_CONVERT_TYPE})
_LIBRARIES = tuple(
    Path(found.origin).parent
    for name in ("jax", "flax", "optax")
    if (found := importlib.util.find_spec(name)) is not None and found.origin is not None
)
_ROOT = Path(__file__).parents[2]  # of the repository: its files are shown relative to it

Sources = frozenset[int]
"""Indices of the non-finite values that a value was computed from; empty for a finite value."""


@dataclass(frozen=True)
class NonfiniteValue:
    """A non-finite value and the operation that computed it.

    Attributes:
      operation: Name of the primitive; None for an argument of the program.
      value: The value's dtype, shape and range, formatted.
      has_nan: Whether the value contains a NaN.
      arose: Whether all operands were finite.
      line: Line of the model, the loss or the optimizer, as "file:number: text".
      inputs: The operands, formatted.
      sources: The non-finite values that it was computed from.
    """

    operation: str | None
    value: str
    has_nan: bool
    arose: bool
    line: str
    inputs: tuple[str, ...]
    sources: Sources


@dataclass(frozen=True)
class TracedValue:
    """A value of the program.

    Attributes:
      value: The array.
      sources: The non-finite values it was computed from.
    """

    value: Any
    sources: Sources = frozenset()


class NonfiniteTracer:
    """One evaluation of a program: call `run`, then `origin` with one of its results.

    Args:
      wide: Evaluate all floating-point arithmetic in float64. JAX's x64 mode must be enabled during `run`.

    Attributes:
      nonfinite: The non-finite values found, in the order of evaluation.

    Example:
      >>> tracer = NonfiniteTracer()
      >>> closed = jax.make_jaxpr(lambda x: jnp.exp(x) * 0.0 + jnp.where(x > 0, 1.0, -jnp.inf))(1000.0)
      >>> (out,) = tracer.run(closed, {"x": jnp.float32(1000)})
      >>> [(found.operation, found.value) for found in tracer.origin(out)]
      [('exp', 'float32[] inf'), ('mul', 'float32[] nan')]
    """

    def __init__(self, *, wide: bool = False) -> None:
        self.nonfinite: list[NonfiniteValue] = []
        self._wide = wide

    def run(self, closed: ClosedJaxpr, arguments: dict[str, Any]) -> list[TracedValue]:
        """Evaluate a program.

        Args:
          closed: The program.
          arguments: Its arguments by name, in the program's order.

        Returns:
          The results, in the program's order.
        """
        args = [self._argument(name, self._widen(x)) for name, x in arguments.items()]
        of_traced: dict[str, Any] = {"array": lambda x: self._traced(x).value, "index": _slice, op.STACK: self._stacked}
        rule = record(self._computed, lift=lambda x, *_: self._traced(x), **of_traced)
        return [self._traced(x) for x in interpret(closed.jaxpr, closed.consts, args, rule)]

    def origin(self, result: TracedValue) -> list[NonfiniteValue]:
        """Return where the non-finite elements of a result arose: a NaN, preceded by the inf it was computed from."""
        nan_at = self._earliest(result.sources, lambda found: found.has_nan, self._is_first_nan)
        begin = result.sources if nan_at is None else frozenset({nan_at})
        inf_at = self._earliest(begin, lambda _: True, lambda found: found.arose)
        return [self.nonfinite[i] for i in sorted({i for i in (inf_at, nan_at) if i is not None})]

    def _is_first_nan(self, found: NonfiniteValue) -> bool:
        return found.has_nan and not any(self.nonfinite[i].has_nan for i in found.sources)

    def _earliest(
        self, begin: Sources, follow: Callable[[NonfiniteValue], bool], wanted: Callable[[NonfiniteValue], bool]
    ) -> int | None:
        """Return the earliest wanted value among the ancestors of `begin`, through values that `follow` accepts."""
        visited, pending = set[int](), [i for i in begin if follow(self.nonfinite[i])]
        while pending:
            i = pending.pop()
            if i not in visited:
                visited.add(i)
                pending += [j for j in self.nonfinite[i].sources if follow(self.nonfinite[j])]
        return min((i for i in visited if wanted(self.nonfinite[i])), default=None)

    def _argument(self, name: str, value: Any) -> TracedValue:
        if _is_finite(value):
            return TracedValue(value)
        described = f"{name}: {describe_array(value)}"
        return self._record(NonfiniteValue(None, described, _has_nan(value), True, "", (), frozenset()), value)

    def _record(self, found: NonfiniteValue, value: Any) -> TracedValue:
        self.nonfinite.append(found)
        return TracedValue(value, frozenset({len(self.nonfinite) - 1}))

    def _traced(self, x: Any) -> TracedValue:
        return x if isinstance(x, TracedValue) else TracedValue(self._widen(x))

    def _widen(self, x: Any) -> Any:
        return _to_float64(x) if self._wide else x

    def _stacked(self, slices: Sequence[Any], _: Any) -> TracedValue:
        traced = [self._traced(y) for y in slices]
        return TracedValue(jnp.stack([y.value for y in traced]), frozenset[int]().union(*(y.sources for y in traced)))

    def _computed(self, eqn: JaxprEqn, inputs: list[TracedValue], inside: Inside) -> list[TracedValue]:
        values = [x.value for x in inputs]
        outs = _in_float64(eqn, values) if self._wide else bind(eqn, values)
        return [self._output(eqn, inputs, out, inside) for out in outs]

    def _output(self, eqn: JaxprEqn, inputs: Sequence[TracedValue], out: Any, inside: Inside) -> TracedValue:
        if _is_finite(out):
            return TracedValue(out)
        line = line_of(eqn, inside, _is_user_file)
        found = NonfiniteValue(
            operation=op.of(eqn),
            value=describe_array(out),
            has_nan=_has_nan(out),
            arose=all(_is_finite(x.value) for x in inputs),
            line=_source_line(*line) if line else "",
            inputs=tuple(describe_array(x.value) for x in inputs),
            sources=frozenset[int]().union(*(x.sources for x in inputs)),
        )
        return self._record(found, out)


def describe_array(x: Any) -> str:
    """Format an array's dtype, shape and range; for a scalar its value.

    >>> describe_array(np.array([1.0, -np.inf, 3.0, np.nan]))
    'float64[4], 1 NaN, 1 inf, else 1 to 3'
    """
    dtype = getattr(x, "dtype", None) or jnp.result_type(x)
    kind = f"{dtype}[{', '.join(map(str, np.shape(x)))}]"
    if not (jnp.issubdtype(dtype, np.floating) or jnp.issubdtype(dtype, np.integer)):
        return kind
    if not np.ndim(x):
        return f"{kind} {float(x):g}"
    nans, infs, low, high = _summary(x) if isinstance(x, jax.Array) else _summarize(np, x)
    parts = [f"{int(n):,} {what}" for n, what in ((nans, "NaN"), (infs, "inf")) if n]
    if nans + infs < np.size(x):
        parts.append(f"{'else ' if parts else ''}{float(low):g} to {float(high):g}")
    return ", ".join([kind, *parts])


def _summarize(numpy: Any, x: Any) -> tuple[Any, Any, Any, Any]:
    """Count NaNs and infs, and return the minimum and maximum of the finite elements, with NumPy or jax.numpy."""
    limits = jnp.finfo(x.dtype) if jnp.issubdtype(x.dtype, np.floating) else jnp.iinfo(x.dtype)
    finite, largest, smallest = numpy.isfinite(x), np.asarray(limits.max, x.dtype), np.asarray(limits.min, x.dtype)
    low = numpy.where(finite, x, largest).min(initial=largest)
    high = numpy.where(finite, x, smallest).max(initial=smallest)
    return numpy.isnan(x).sum(), numpy.isinf(x).sum(), low, high


_summary = jax.jit(functools.partial(_summarize, jnp))


def _in_float64(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Evaluate the equation with all of its floating-point arithmetic in float64."""
    name, values = op.of(eqn), [_to_float64(x) for x in values]
    if name == op.REDUCE_PRECISION:
        return values
    if name in _AS_TRACED:
        return [_to_float64(out) for out in bind(eqn, cast_like([v.aval for v in eqn.invars], values))]
    return bind(equations.map_params(eqn, _lifted), values)


def _lifted(param: Any) -> Any:
    """Return a parameter for float64, if it is a lower dtype or a program that computes in one."""
    if isinstance(param, ClosedJaxpr):  # first: since JAX 0.11 every jaxpr is one

        def body(*args: Any) -> list[Any]:
            return interpret(param.jaxpr, param.consts, args, lambda eqn, args, _: _in_float64(eqn, args))

        return jax.make_jaxpr(body)(*(jax.ShapeDtypeStruct(a.shape, _lifted(a.dtype)) for a in param.in_avals))
    if isinstance(param, Jaxpr):
        return _lifted(ClosedJaxpr(param, ())).jaxpr
    if isinstance(param, (lax.DotAlgorithm, lax.DotAlgorithmPreset)):
        return lax.Precision.HIGHEST
    is_dtype = isinstance(param, np.dtype) or (isinstance(param, type) and issubclass(param, np.generic))
    return np.dtype(np.float64) if is_dtype and jnp.issubdtype(param, np.floating) else param


def _to_float64(x: Any) -> Any:
    dtype = getattr(x, "dtype", None)
    low = dtype is not None and dtype != np.float64 and jnp.issubdtype(dtype, np.floating)
    return lax.convert_element_type(x, np.float64) if low else x


@jax.jit
def _all_finite(x: jax.Array) -> jax.Array:
    return jnp.isfinite(x).all()


def _is_finite(x: Any) -> bool:
    if not jnp.issubdtype(jnp.result_type(x), np.inexact):
        return True
    return bool(_all_finite(x) if isinstance(x, jax.Array) else np.isfinite(x).all())


def _has_nan(x: Any) -> bool:
    return bool((jnp if isinstance(x, jax.Array) else np).isnan(x).any())


def _slice(x: TracedValue, i: int) -> TracedValue:
    value = lax.index_in_dim(x.value, i, keepdims=False)
    return TracedValue(value, x.sources if x.sources and not _is_finite(value) else frozenset())


@functools.cache
def _is_user_file(file: str) -> bool:
    path = Path(file)
    machinery: Collection[Path] = (Path(rewrite.__file__), Path(__file__))
    return path.is_absolute() and path not in machinery and not any(path.is_relative_to(part) for part in _LIBRARIES)


def _source_line(file: str, line: int) -> str:
    path = Path(file).relative_to(_ROOT) if Path(file).is_relative_to(_ROOT) else Path(file)
    return f"{path}:{line}: {linecache.getline(file, line).strip()}"
