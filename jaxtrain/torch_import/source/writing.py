"""The expression of one operation: the first way of writing it whose jaxpr is that of the interpreted operation."""

import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.torch_import import functional
from jaxtrain.torch_import.graph import GETITEM, Graph, Input, Node, Ref, Spec, dtype_of, references, resolved
from jaxtrain.torch_import.interpret import interpret
from jaxtrain.torch_import.ops import RANDOM, TABLE
from jaxtrain.torch_import.refusals import refusal
from jaxtrain.torch_import.source.compare import fingerprint
from jaxtrain.torch_import.source.expressions import Expr, call, method, subscript
from jaxtrain.torch_import.source.templates import KEY, TEMPLATES

Resolve = Callable[[str], Expr]
_NAMES = {id(fn): name for name, fn in reversed(functional.FUNCTIONS.items())}
"""Names of the table's functions."""


class Writing:
    """Expressions of the operations of a graph.

    Attributes:
      imports: Modules of the user's functions that the expressions call, by name.
      keyed: Whether the pass draws random numbers.
    """

    def __init__(self, ops: Mapping[str, Callable[..., Any]], specs: Mapping[str, Spec]) -> None:
        self._ops, self._specs = ops, specs
        self._chosen: dict[Any, int] = {}
        self._callable: dict[str, str] = {}  # functions of the table that an expression may call
        self.imports: dict[str, str] = {}
        self.keyed = False

    def expression(self, node: Node, places: Sequence[int], resolve: Resolve) -> Expr:
        """Return the expression of an operation: of its one used result, or of the tuple of all its results."""
        choice = self._choice(node, tuple(places))
        expr = self._candidates(node, places, resolve)[choice]
        called = re.match(r"(\w+)\(", expr.text)
        if called is not None and called[1] in self._callable:
            self.imports[called[1]] = self._callable[called[1]]
        if node.in_float32:
            expr = call("F.without_autocast", Expr(f"lambda: {expr}"))
        spec = node.spec
        if isinstance(spec, tuple):
            spec = spec[places[0]] if len(places) == 1 else None
        return expr if spec is None else expr._replace(shape=spec.shape, dtype=dtype_of(spec.dtype))

    def prepare(self, node: Node, places: Sequence[int]) -> None:
        """Choose how to write an operation, so that the names of all functions are known."""
        specs = {name: self._specs[name] for name in references((node.args, node.kwargs))}
        self.expression(node, places, lambda name: Expr("x", 10, specs[name].shape, dtype_of(specs[name].dtype)))

    def draws(self, node: Node) -> bool:
        """Return whether an operation takes a key."""
        return node.op in RANDOM and self.keyed

    def _candidates(self, node: Node, places: Sequence[int], resolve: Resolve) -> list[Expr]:
        found = [*self._uncast(node, resolve)]
        if isinstance(node.spec, tuple) and len(places) == 1:
            found = [*found, *(subscript(x, places[0]) for x in found)]
        if isinstance(node.spec, Spec):
            found = [*found, *(method(x, "astype", dtype_of(node.spec.dtype)) for x in found)]
        return found

    def _uncast(self, node: Node, resolve: Resolve) -> Iterator[Expr]:
        """Yield the ways of writing an operation, without a cast of its result."""
        plain = resolved((node.args, node.kwargs), resolve)
        cast = plain if node.promoted is None else _cast(plain, dtype_of(node.promoted))
        for args, kwargs in (plain, cast):
            if node.op in TEMPLATES and node.op not in self._ops:
                try:
                    found = TEMPLATES[node.op](*args, **kwargs)
                except TypeError:  # arguments that the template does not have
                    continue
                written = found if isinstance(found, list) else [found]
                yield from map(_with_key, written) if self.draws(node) else written
        args, kwargs = cast
        if node.op in RANDOM:
            kwargs = {**kwargs, "rng": KEY if self.keyed else Expr("None")}
        function = self._function(node)
        yield from _without_defaults(function, self._ops.get(node.op, TABLE.get(node.op)), args, kwargs)
        yield call(function, *args, **kwargs)

    def _function(self, node: Node) -> str:
        """Return the name of the function of an operation."""
        fn = self._ops.get(node.op)
        if fn is None:
            return f"F.{_NAMES[id(TABLE[node.op])]}"
        module = getattr(fn, "__module__", None) or "builtins"
        public = vars(importlib.import_module(module)) if module not in ("__main__", "builtins") else {}
        name = next((name for name, value in public.items() if value is fn and name.isidentifier()), None)
        if name is None or name.startswith("_") or self._callable.get(name, module) != module:
            raise refusal(
                f"the function of {node.op} cannot be imported by the emitted file",
                "define it at the top level of a module",
                node.source,
            )
        self._callable[name] = module
        return name

    def _choice(self, node: Node, places: tuple[int, ...]) -> int:
        """Return the number of the first way of writing that is equal to the interpreted operation."""
        names = list(dict.fromkeys(references((node.args, node.kwargs))))
        renamed = {name: f"a{i}" for i, name in enumerate(names)}
        specs = [self._specs[name] for name in names]
        own = _renamed(replace(node, name="y", module="", source=""), renamed)
        key = (repr(own), repr(specs), places, self.keyed)
        if key not in self._chosen:
            self._chosen[key] = self._first_equal(own, specs, places, node)
        return self._chosen[key]

    def _first_equal(self, own: Node, specs: Sequence[Spec], places: Sequence[int], node: Node) -> int:
        inputs = [Input(f"a{i}", "input", str(i), spec) for i, spec in enumerate(specs)]
        exprs = {f"a{i}": Expr(f"a{i}", 10, spec.shape, dtype_of(spec.dtype)) for i, spec in enumerate(specs)}
        nodes = [own]
        outputs: tuple[Ref, ...] = (Ref("y"),)
        if isinstance(own.spec, tuple):
            nodes += [Node(f"y{i}", GETITEM, (Ref("y"), i), {}, own.spec[i]) for i in places]
            outputs = tuple(Ref(f"y{i}") for i in places)
        graph = Graph(tuple(inputs), tuple(nodes), outputs, {})
        arrays = [jax.ShapeDtypeStruct(spec.shape, dtype_of(spec.dtype)) for spec in specs]
        key = jax.eval_shape(lambda: jax.random.key(0)) if self.keyed else None

        def interpreted(rng: Any, *arrays: Any) -> Any:
            empty: dict[str, Any] = {}
            return interpret(graph, params=empty, state=empty, constants=empty, inputs=arrays, rng=rng, ops=self._ops)[
                0
            ]

        wanted = fingerprint(jax.make_jaxpr(interpreted)(key, *arrays))
        for i, expr in enumerate(self._candidates(own, places, exprs.__getitem__)):
            try:
                fn = eval(f"lambda keys, {', '.join(exprs)}: {expr.text}", self.namespace())
                if fingerprint(jax.make_jaxpr(_selected(fn, own, places))(key, *arrays)) == wanted:
                    return i
            except (TypeError, ValueError, IndexError, AttributeError, NotImplementedError):
                continue
        raise refusal(f"{own.op} cannot be written as source", "keep the imported model", node.source)

    def namespace(self) -> dict[str, Any]:
        """Return the names that expressions may use."""
        modules = {**self._callable, **self.imports}
        functions = {name: getattr(importlib.import_module(module), name) for name, module in modules.items()}
        return {"jax": jax, "jnp": jnp, "np": np, "F": functional, **functions}


def _selected(fn: Callable[..., Any], node: Node, places: Sequence[int]) -> Callable[..., Any]:
    def run(rng: Any, *arrays: Any) -> Any:
        keys = iter([None if rng is None else jax.random.fold_in(rng, 0)])
        result = fn(keys, *arrays)
        if isinstance(node.spec, tuple) and len(places) > 1:
            return tuple(result[i] for i in places)
        return (result,)

    return run


def _without_defaults(name: str, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Expr]:
    """Return the call without arguments that are the defaults, options by name; nothing if the names do not fit."""
    parameters = inspect.signature(function).parameters
    if len(args) > len(parameters) or not kwargs.keys() <= parameters.keys():
        return []
    if any(x.kind is not x.POSITIONAL_OR_KEYWORD for x in list(parameters.values())[: len(args)]):
        return []
    positional: list[Any] = []
    named: dict[str, Any] = {}
    given = {**dict(zip(parameters, args, strict=False)), **kwargs}
    for i, (parameter, value) in enumerate(given.items()):
        default = parameters[parameter].default
        if isinstance(default, int) and isinstance(value, tuple) and len({*value}) == 1:
            value = value[0]  # a stride of (2, 2) is one of 2
        is_first = i == len(positional) < len(args)
        if is_first and (default is inspect.Parameter.empty or isinstance(value, Expr)):
            positional.append(value)
        elif isinstance(value, Expr) or type(value) is not type(default) or value != default:
            named[parameter] = value
    return [call(name, *positional, **named)]


def _with_key(expr: Expr) -> Expr:
    """Give a call the next key, which an operation takes even if it draws nothing."""
    return expr if KEY.text in expr.text else expr._replace(text=f"{expr.text[:-1]}, rng={KEY})")


def _cast(value: Any, dtype: np.dtype) -> Any:
    """Return arguments with the arrays converted to a dtype."""
    if isinstance(value, Expr):
        return (
            value
            if value.dtype in (dtype, None)
            else method(value, "astype", dtype)._replace(shape=value.shape, dtype=dtype)
        )
    if isinstance(value, tuple):
        return tuple(_cast(item, dtype) for item in value)
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    return value


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, Node):
        return replace(value, args=_renamed(value.args, names), kwargs=_renamed(value.kwargs, names))
    if isinstance(value, Ref):
        return Ref(names[value.name])
    if isinstance(value, tuple):
        return tuple(_renamed(item, names) for item in value)
    if isinstance(value, dict):
        return {key: _renamed(item, names) for key, item in value.items()}
    return value
