"""The values of the statements of written files, and their gradients, in a step of JAX.

The functions of the files are compiled again, with a call around every value that they assign or return.
"""

import ast
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import JaxprEqn

from jaxtrain.passes import hook
from jaxtrain.program import equations
from jaxtrain.program import operations as op
from jaxtrain.program.recorded_values import Inside, record
from jaxtrain.program.rewrite import bind, interpret
from jaxtrain.step import validated
from jaxtrain.user_file import import_file
from parity.case import Case
from parity.compare.fingerprint import MASKED, Fingerprint, fingerprint
from parity.divergence import Line
from parity.oracle.compiled import jit
from parity.oracle.in_jax import in_float64

MARK = "__statement__"
"""Name of the function around the values of statements."""
VALUE, GRADIENT = "value of statement ", "gradient of statement "
"""Prefixes of names of values in JAX's program."""


class Bound(NamedTuple):
    """A value that a statement assigns or returns.

    Attributes:
      line: The first line of the statement.
      kind: "variable" of an array that is assigned to a name, "part" of another that is assigned, "returned".
      size: Its number of elements.
      alias: The number of the same value, if a statement before has assigned it; None for a new one.
      constant: Its numbers, if they depend on no argument.
    """

    line: Line
    kind: str
    size: int
    alias: int | None = None
    constant: Fingerprint | None = None


class Values(NamedTuple):
    """The values of the statements of a program for one batch.

    Attributes:
      bound: The statements, in the order of execution.
      values: Their values, by number.
      gradients: The gradients of the loss for these, by number.
    """

    bound: Sequence[Bound]
    values: dict[int, Fingerprint]
    gradients: dict[int, Fingerprint]


class Statements:
    """The values of the statements of the files in a folder, in the loss of a case.

    Args:
      case: The case.
      folder: The folder.
      parts: Number of micro-batches of an update.
    """

    def __init__(self, case: Case, folder: Path, parts: int) -> None:
        self._loss_fn, self._parts = case.loss_fn, parts
        self._files = [folder / "run.py", *sorted(folder.glob("**/model.py"))]
        self._programs: dict[str, tuple[Any, list[str], list[Bound]]] = {}  # by the shapes of a batch

    def __call__(self, *args: Any) -> Values:
        """Return the values for (parameters, micro-batch, key, model state)."""
        shapes = str(jax.tree.map(lambda x: (x.shape, x.dtype), args))
        if shapes not in self._programs:
            self._programs[shapes] = self._program(args)
        program, names, bound = self._programs[shapes]
        values: dict[int, Fingerprint] = {i: x.constant for i, x in enumerate(bound) if x.constant is not None}
        gradients: dict[int, Fingerprint] = {}
        for name, x in zip(names, program(*jax.tree.leaves(args)), strict=True):
            found = values if name.startswith(VALUE) else gradients
            found[int(name.rpartition(" ")[2])] = Fingerprint(*x.tolist())
        for i, x in enumerate(bound):
            if x.alias in values:
                values[i] = values[x.alias]
            if x.alias in gradients:
                gradients[i] = gradients[x.alias]
        return Values(bound, values, gradients)

    def _program(self, args: Any) -> tuple[Any, list[str], list[Bound]]:
        marks, names = _Marks(), list[str]()

        @functools.wraps(self._loss_fn)
        def loss_fn(*args: Any) -> Any:
            marks.clear()  # of another attempt to trace it
            return self._loss_fn(*args)

        compute_loss = in_float64(validated(loss_fn))

        def mean(*args: Any) -> tuple[Any, Any]:
            loss, metrics, model_state = compute_loss(*args)
            return loss.total / loss.weight / self._parts, (metrics, model_state)

        with marked(self._files, marks):
            closed = jax.make_jaxpr(jax.value_and_grad(mean, has_aux=True))(*args)

        def compute(*leaves: Any) -> list[Any]:
            found: list[Any] = []

            def visit(eqn: JaxprEqn, given: list[Any], _: Inside) -> list[Any]:
                name = equations.label(eqn) if op.of(eqn) == op.NAME else ""
                if name.startswith((VALUE, GRADIENT)):
                    names.append(name)
                    found.append(_fingerprint(given[0]))
                return bind(eqn, given)

            interpret(closed.jaxpr, closed.consts, leaves, record(visit))
            return found

        program = jit(compute).trace(*jax.tree.leaves(args)).lower().compile()
        return program, names, marks.bound


def _fingerprint(value: jax.Array) -> jax.Array:
    """Return the numbers of `fingerprint`, so that no value of a large program is kept."""
    if jnp.iscomplexobj(value):
        value = jnp.stack([value.real, value.imag])
    x = value.astype(float).ravel()
    kept = jnp.abs(x) < MASKED
    rest, n = jnp.where(kept, x, 0), max(x.size, 1)
    largest = jnp.max(jnp.where(kept, x, -jnp.inf), initial=-jnp.inf)
    return jnp.stack([jnp.square(rest).sum() / n, jnp.abs(rest).sum() / n, largest, rest.sum() / n])


class _Marks:
    """Names the values of statements in a program that is traced."""

    def __init__(self) -> None:
        self.bound: list[Bound] = []
        self._known: dict[int, tuple[Any, int]] = {}

    def clear(self) -> None:
        """Forget all."""
        self.bound.clear()
        self._known.clear()

    def __call__(self, file: str, line: int, kind: str, unused: Sequence[int], value: Any) -> Any:
        """Return the value that a statement assigns or returns, with names."""

        if kind == "variable" and not hasattr(value, "dtype"):
            kind = "part"

        def named(x: Any) -> Any:
            return jax.tree.map(lambda leaf: self._named((file, line), kind, leaf), x)

        if unused:
            return tuple(x if i in unused else named(x) for i, x in enumerate(value))
        return named(value)

    def _named(self, line: Line, kind: str, x: Any) -> Any:
        if not isinstance(x, jax.Array | np.ndarray) or jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
            return x
        if not isinstance(x, jax.core.Tracer):
            self.bound.append(Bound(line, kind, x.size, constant=fingerprint(np.asarray(x, np.float64))))
            return x
        number = len(self.bound)
        if id(x) in self._known:
            self.bound.append(Bound(line, kind, x.size, alias=self._known[id(x)][1]))
            return x
        self.bound.append(Bound(line, kind, x.size))
        named = checkpoint_name(x, f"{VALUE}{number}")
        if jnp.issubdtype(x.dtype, np.floating):
            named = hook(named, lambda gradient: checkpoint_name(gradient, f"{GRADIENT}{number}"))
        self._known[id(named)] = named, number
        return named


@contextlib.contextmanager
def marked(files: Sequence[Path], mark: Callable[[str, int, str, Sequence[int], Any], Any]) -> Iterator[None]:
    """Call a function with the values that the statements of files assign and return, while entered.

    Args:
      files: The files, as `import_file` has imported them.
      mark: From (file, line, kind of `Bound`, parts that are assigned to `_`, value) to the value to use.
    """
    before: list[tuple[FunctionType, CodeType]] = []
    for file in files:
        names = vars(import_file(file))
        codes = _marked_codes(file)
        names[MARK] = mark
        for function in names.values():
            if isinstance(function, FunctionType) and (code := codes.get(_place(function.__code__))) is not None:
                before.append((function, function.__code__))
                function.__code__ = code
    try:
        yield
    finally:
        for function, code in before:
            function.__code__ = code


def _place(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_name, code.co_firstlineno


def _marked_codes(file: Path) -> dict[tuple[str, str, int], CodeType]:
    """Return the functions of a file with calls of `MARK`, by their places."""
    path = file.resolve()
    tree = ast.fix_missing_locations(_Marking(str(path)).visit(ast.parse(path.read_text(encoding="utf-8"))))
    module = compile(tree, str(path), "exec", dont_inherit=True)
    return {_place(code): code for code in module.co_consts if isinstance(code, CodeType)}


class _Marking(ast.NodeTransformer):
    """Puts calls around the values of statements in functions."""

    def __init__(self, file: str) -> None:
        self._file, self._depth = file, 0

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        (*_, target) = node.targets
        parts = target.elts if isinstance(target, ast.Tuple) else []
        unused = [i for i, part in enumerate(parts) if isinstance(part, ast.Name) and part.id == "_"]
        return self._with_mark(node, "variable" if isinstance(target, ast.Name) else "part", unused)

    def visit_Return(self, node: ast.Return) -> ast.AST:
        return self._with_mark(node, "returned")

    def _with_mark(self, node: Any, kind: str, unused: Sequence[int] = ()) -> ast.AST:
        if self._depth and node.value is not None:
            skipped = ast.Tuple([ast.Constant(i) for i in unused], ast.Load())
            given = [ast.Constant(self._file), ast.Constant(node.lineno), ast.Constant(kind), skipped]
            call = ast.Call(ast.Name(MARK, ast.Load()), [*given, node.value], [])
            for part in (call, call.func, *given, *skipped.elts):
                ast.copy_location(part, node.value)
            node.value = call
        return node
