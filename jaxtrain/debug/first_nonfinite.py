"""Where in a program the first inf or NaN arises of those that reach its results.

A jaxpr is evaluated equation by equation, on values, through its control flow; each value that is not finite knows
which ones it was made of. From a result the way leads back over these: to where NaN first was, and from there to the
inf that it was made of. What is not on the way, a mask of -inf or a `where` that leaves a NaN out, is nobody's fault.
With `wide`, all of it is computed in float64, of the same random draws: what is finite there was an overflow.
"""

import functools
import importlib.util
import linecache
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxtrain.transforms import jaxpr
from jaxtrain.transforms.jaxpr import Run, bind, cast_like, evaluate_inner, interpret

_CALLS = frozenset({"jit", "pjit", "closed_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"})
# Their results are computed elsewhere, in the dtypes they declare; or are of a number's bits.
_AS_TRACED = frozenset({"pure_callback", "io_callback", "ffi_call", "pallas_call", "bitcast_convert_type"})
_LIBRARIES = tuple(
    Path(found.origin).parent
    for name in ("jax", "flax", "optax")
    if (found := importlib.util.find_spec(name)) is not None and found.origin is not None
)

Sources = frozenset[int]
"""Numbers of places, of all that a value which is not finite is made of; empty for one that is."""


@dataclass(frozen=True)
class Place:
    """A value that is not finite and what made it: an operation, or None where it was given.

    `inputs`: the operands in words. `arose`: whether all of them were finite. `line`: of the model, the loss or the
    optimizer, as "file:number: text".
    """

    operation: str | None
    value: str
    has_nan: bool
    arose: bool
    line: str
    inputs: tuple[str, ...]
    sources: Sources


@dataclass(frozen=True)
class Watched:
    """A value of the program."""

    value: Any
    sources: Sources = frozenset()


class Watch:
    """One evaluation of a program: `run` it, then ask for the `origin` of a result.

    >>> import jax.numpy as jnp
    >>> watch = Watch()
    >>> closed = jax.make_jaxpr(lambda x: jnp.exp(x) * 0.0 + jnp.where(x > 0, 1.0, -jnp.inf))(1000.0)
    >>> (out,) = watch.run(closed, {"x": jnp.float32(1000)})
    >>> [(place.operation, place.value) for place in watch.origin(out)]
    [('exp', 'float32[] inf'), ('mul', 'float32[] nan')]
    """

    def __init__(self, *, wide: bool = False) -> None:
        self.places: list[Place] = []
        self._wide = wide
        self._calls: list[tuple[str, str]] = []

    def run(self, closed: ClosedJaxpr, arguments: dict[str, Any]) -> list[Watched]:
        """The results for `arguments`, by their names, in the order of the program's own.

        With `wide`, JAX's x64 mode must be on.
        """
        given = [self._given(name, self._widened(x)) for name, x in arguments.items()]
        return [self._watched(x) for x in interpret(closed.jaxpr, closed.consts, given, self._rule)]

    def origin(self, result: Watched) -> list[Place]:
        """Where what is not finite in a result arose: of a NaN made of an inf, where that did, then the NaN."""
        nan_at = self._earliest(result.sources, lambda place: place.has_nan, self._made_nan)
        begin = result.sources if nan_at is None else frozenset({nan_at})
        inf_at = self._earliest(begin, lambda _: True, lambda place: place.arose)
        return [self.places[i] for i in sorted({i for i in (inf_at, nan_at) if i is not None})]

    def _made_nan(self, place: Place) -> bool:
        return place.has_nan and not any(self.places[i].has_nan for i in place.sources)

    def _earliest(self, begin: Sources, follow: Callable[[Place], bool], wanted: Callable[[Place], bool]) -> int | None:
        """The first place wanted, of those that lead to `begin` over places to follow."""
        seen, to_see = set[int](), [i for i in begin if follow(self.places[i])]
        while to_see:
            i = to_see.pop()
            if i not in seen:
                seen.add(i)
                to_see += [j for j in self.places[i].sources if follow(self.places[j])]
        return min((i for i in seen if wanted(self.places[i])), default=None)

    def _given(self, name: str, value: Any) -> Watched:
        if _finite(value):
            return Watched(value)
        return self._placed(
            Place(None, f"{name}: {described(value)}", _has_nan(value), True, "", (), frozenset()), value
        )

    def _placed(self, place: Place, value: Any) -> Watched:
        self.places.append(place)
        return Watched(value, frozenset({len(self.places) - 1}))

    def _watched(self, x: Any) -> Watched:
        return x if isinstance(x, Watched) else Watched(self._widened(x))

    def _widened(self, x: Any) -> Any:
        return _wide(x) if self._wide else x

    def _rule(self, eqn: JaxprEqn, args: list[Any], run: Run) -> list[Watched]:
        given, name = [self._watched(x) for x in args], eqn.primitive.name
        if name in _CALLS:
            self._calls.append((eqn.params.get("name", ""), self._line(eqn)))
            try:
                return evaluate_inner(eqn.params["call_jaxpr" if "call_jaxpr" in eqn.params else "jaxpr"], given, run)
            finally:
                self._calls.pop()
        if name == "scan":
            return self._scan(eqn, given, run)
        if name == "while":
            return self._while(eqn, given, run)
        if name == "cond":
            return evaluate_inner(eqn.params["branches"][int(given[0].value)], given[1:], run)
        values = [x.value for x in given]
        outs = _in_float64(eqn, values) if self._wide else bind(eqn, values)
        return [self._made(eqn, given, out) for out in outs]

    def _made(self, eqn: JaxprEqn, given: Sequence[Watched], out: Any) -> Watched:
        if _finite(out):
            return Watched(out)
        sources = frozenset[int]().union(*(x.sources for x in given))
        arose = all(_finite(x.value) for x in given)
        inputs = tuple(described(x.value) for x in given)
        return self._placed(
            Place(eqn.primitive.name, described(out), _has_nan(out), arose, self._line(eqn), inputs, sources), out
        )

    def _scan(self, eqn: JaxprEqn, args: list[Watched], run: Run) -> list[Watched]:
        body, length = eqn.params["jaxpr"], eqn.params["length"]
        n_consts, n_carry = jaxpr.scan_sizes(eqn)
        consts, carry, xs = args[:n_consts], args[n_consts : n_consts + n_carry], args[n_consts + n_carry :]
        ys: list[list[Watched]] = [[]] * length
        for i in reversed(range(length)) if eqn.params["reverse"] else range(length):
            outs = [self._watched(x) for x in evaluate_inner(body, [*consts, *carry, *(_slice(x, i) for x in xs)], run)]
            carry, ys[i] = outs[:n_carry], outs[n_carry:]
        return [*carry, *(_stack(y) for y in zip(*ys, strict=True))]

    def _while(self, eqn: JaxprEqn, args: list[Watched], run: Run) -> list[Watched]:
        n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        cond_consts, body_consts, carry = args[:n_cond], args[n_cond : n_cond + n_body], args[n_cond + n_body :]
        while bool(self._watched(evaluate_inner(eqn.params["cond_jaxpr"], [*cond_consts, *carry], run)[0]).value):
            carry = [self._watched(x) for x in evaluate_inner(eqn.params["body_jaxpr"], [*body_consts, *carry], run)]
        return carry

    def _line(self, eqn: JaxprEqn) -> str:
        """Where the equation was written, innermost first; a derivative's, where the function it is of was."""
        traceback = eqn.source_info.traceback
        frames: list[Any] = [] if traceback is None else traceback.frames
        outer = ""
        if self._calls:
            # JAX traces a jitted function once: beyond the function itself, the frames are those of its first caller.
            name, outer = self._calls[-1]
            names = [frame.function_name.rpartition(".")[2] for frame in frames]
            frames = frames[: names.index(name) + 1] if name in names else []
        return next((_text(f.file_name, f.line_num) for f in frames if _of_user(f.file_name)), outer)


def described(x: Any) -> str:
    """An array's dtype, shape and range; of a scalar the value.

    >>> described(np.array([1.0, -np.inf, 3.0, np.nan]))
    'float64[4], 1 NaN, 1 inf, else 1 to 3'
    """
    dtype = getattr(x, "dtype", None) or jax.numpy.result_type(x)
    kind = f"{dtype}[{', '.join(map(str, np.shape(x)))}]"
    if not jax.numpy.issubdtype(dtype, np.number):
        return kind
    values = np.asarray(x)
    if jax.numpy.issubdtype(dtype, np.floating):
        values = values.astype(np.float64)  # NumPy itself knows no bfloat16
    if not values.ndim:
        return f"{kind} {values.item():g}"
    finite = values[np.isfinite(values)]
    counts = {"NaN": int(np.isnan(values).sum()), "inf": int(np.isinf(values).sum())}
    parts = [f"{n:,} {what}" for what, n in counts.items() if n]
    if finite.size:
        parts.append(f"{'else ' if parts else ''}{finite.min():g} to {finite.max():g}")
    return ", ".join([kind, *parts])


def _in_float64(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """The equation with all of its floating arithmetic in float64."""
    name, values = eqn.primitive.name, [_wide(x) for x in values]
    if name == "reduce_precision":
        return values
    if name in _AS_TRACED:
        return [_wide(out) for out in bind(eqn, cast_like([v.aval for v in eqn.invars], values))]
    return bind(eqn.replace(params={key: _lifted(value) for key, value in eqn.params.items()}), values)


def _lifted(param: Any) -> Any:
    """A parameter that names a low dtype, or holds a program of one, for float64."""
    if isinstance(param, ClosedJaxpr):  # first: since JAX 0.11 every jaxpr is one

        def body(*args: Any) -> list[Any]:
            return interpret(param.jaxpr, param.consts, args, lambda eqn, args, _: _in_float64(eqn, args))

        return jax.make_jaxpr(body)(*(jax.ShapeDtypeStruct(a.shape, _lifted(a.dtype)) for a in param.in_avals))
    if isinstance(param, Jaxpr):
        return _lifted(ClosedJaxpr(param, ())).jaxpr
    if isinstance(param, (lax.DotAlgorithm, lax.DotAlgorithmPreset)):
        return lax.Precision.HIGHEST
    is_dtype = isinstance(param, np.dtype) or (isinstance(param, type) and issubclass(param, np.generic))
    return np.dtype(np.float64) if is_dtype and jax.numpy.issubdtype(param, np.floating) else param


def _wide(x: Any) -> Any:
    dtype = getattr(x, "dtype", None)
    low = dtype is not None and dtype != np.float64 and jax.numpy.issubdtype(dtype, np.floating)
    return lax.convert_element_type(x, np.float64) if low else x


def _finite(x: Any) -> bool:
    floating = jax.numpy.issubdtype(jax.numpy.result_type(x), np.inexact)
    return not floating or bool(np.isfinite(np.asarray(x)).all())


def _has_nan(x: Any) -> bool:
    return bool(np.isnan(np.asarray(x)).any())


def _slice(x: Watched, i: int) -> Watched:
    value = lax.index_in_dim(x.value, i, keepdims=False)
    return Watched(value, x.sources if x.sources and not _finite(value) else frozenset())


def _stack(slices: Sequence[Watched]) -> Watched:
    return Watched(jax.numpy.stack([y.value for y in slices]), frozenset[int]().union(*(y.sources for y in slices)))


@functools.cache
def _of_user(file: str) -> bool:
    path = Path(file)
    machinery: Collection[Path] = (Path(jaxpr.__file__), Path(__file__))
    return path.is_absolute() and path not in machinery and not any(path.is_relative_to(part) for part in _LIBRARIES)


def _text(file: str, line: int) -> str:
    here = Path(__file__).parent.parent
    shown = Path(file).relative_to(here) if Path(file).is_relative_to(here) else Path(file)
    return f"{shown}:{line}: {linecache.getline(file, line).strip()}"
