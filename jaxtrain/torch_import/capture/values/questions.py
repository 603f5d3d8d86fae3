"""Questions of `forward` for the values of tensors, answered as for the example.

A graph has no Python values: a condition, a size or a number that `forward` reads from a tensor is a constant of it.
The value is known for the example, by evaluating the operations before the question. It is an assumption about every
other batch: the tensor that was asked is a result of the graph, beside the answer and the line of the question.
"""

import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import sympy
import torch
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.overrides import TorchFunctionMode

from jaxtrain.torch_import.capture.eager import Unevaluated, draws, is_of_floats, untraced, value_of, writes
from jaxtrain.torch_import.capture.gradients.custom_gradients import Call
from jaxtrain.torch_import.capture.gradients.inner_gradients import user_line
from jaxtrain.torch_import.capture.values.counted import Counts, has_enough, is_counted, scatters, selected
from jaxtrain.torch_import.capture.values.known_values import is_unknown
from jaxtrain.torch_import.capture.values.numbers import INDEXING, indexes_by_number
from jaxtrain.torch_import.refusals import is_internal, refusal
from jaxtrain.torch_internals import DisableTorchFunction, PythonReferenceAnalysis, pytree, sympy_interp

_ATEN = torch.ops.aten
_ITEMS = (_ATEN.item.default, _ATEN._local_scalar_dense.default)


class Example(NamedTuple):
    """What a module computes with for the example.

    Attributes:
      tensors: Parameters and buffers by name.
      leaves: Tensors of the batch.
    """

    tensors: Mapping[str, torch.Tensor]
    leaves: Sequence[torch.Tensor]


class Question(NamedTuple):
    """A value that `forward` asked for.

    Attributes:
      value: The tensor, or the symbolic number, that has the answer for every batch; an expression of such numbers
        until the pass ends.
      answer: The answer for the example.
      source: Line of the question.
      is_of_floats: Whether the answer depends on floating-point values.
      is_branch: Whether it is a condition that the code itself asks for.
      is_random: Whether the answer depends on random numbers. The answer is then one of the two.
    """

    value: Any
    answer: bool | int | float
    source: str
    is_of_floats: bool = False
    is_branch: bool = False
    is_random: bool = False

    def number(self, value: Any) -> bool | int | float:
        """Return the answer of another value."""
        return type(self.answer)(value)

    def is_another(self, value: Any) -> bool:
        """Return whether another value has another answer."""
        return self.number(value) != self.answer


class _OfNumbers(PythonReferenceAnalysis):
    """Functions of symbolic numbers; PyTorch's own gives an expression for a quotient of integers."""

    int_truediv = staticmethod(operator.truediv)


class Questions(TorchFunctionMode):
    """Answers the questions of a forward pass.

    Args:
      example: Returns the example; None where a question has no answer.
      answers: What the same pass read when it was traced, for one that is not; None for one that is.
      path: The answers to the first conditions, whatever they are for the example.
      counts: What the module needs to know of the numbers of selected rows.

    Attributes:
      asked: The questions so far, each once.
      is_unanswered: Whether a question had no answer.
      answers: What the pass read, in order, for one that is not traced.
      calls: The calls of `torch.autograd.Function` in the pass.
    """

    def __init__(
        self,
        example: Callable[[], Example | None] = lambda: None,
        answers: Sequence[Any] | None = None,
        path: Sequence[bool] = (),
        counts: Counts | None = None,
    ) -> None:
        super().__init__()
        self.counts = Counts() if counts is None else counts
        self.asked: list[Question] = []
        self.is_unanswered = False
        self.answers: list[Any] = []
        self.calls: Sequence[Call] = ()
        self._example, self._given_answers, self.path = example, answers, path
        self._tracer: Any = None
        self._placeholders: dict[torch.fx.Node, Callable[[Example], torch.Tensor]] = {}
        self._known: dict[Any, bool | int | float] = {}
        self._reads: list[Any] = []
        self._replayed: Iterator[Any] | None = None

    @contextlib.contextmanager
    def during(self, tensors: Mapping[str, torch.Tensor], leaves: Sequence[torch.Tensor]) -> Iterator[None]:
        """Answer the questions of a module with these parameters and buffers, called on leaves, while entered."""
        mode: Any = proxy_tensor.get_proxy_mode()
        self._tracer = None if mode is None else mode.tracer
        self.asked, self._known, self._reads, self._placeholders = [], {}, [], {}
        self._replayed = iter(self._given_answers or ()) if mode is None else None
        if mode is not None:
            for name, x in tensors.items():
                self._place(x, functools.partial(_tensor_of, name))
            for i, x in enumerate(leaves):
                self._place(x, functools.partial(_leaf_of, i))
        token = _ASKED.set(self)
        try:
            with self:
                yield
                self.asked = [x for question in self._independent() for x in self._computed(question)]
            self.answers = [pytree.tree_map_only(_SYMBOLIC, self._number, read) for read in self._reads]
        finally:
            _ASKED.reset(token)

    def _place(self, x: torch.Tensor, read: Callable[[Example], torch.Tensor]) -> None:
        node = self._node_of(x)
        if node is not None and node.op == "placeholder":
            self._placeholders[node] = read

    @property
    def values(self) -> tuple[Any, ...]:
        """The tensors and symbolic numbers that were asked, as results of the pass."""
        return tuple(question.value for question in self.asked)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in INDEXING and indexes_by_number(*args[1:]):
            return INDEXING[name](*args)
        if name == "one_hot" and args and self._is_without_classes(args, kwargs):
            largest = self._read(args[0].max(), int)
            return func(*args, **kwargs) if largest is None else func(args[0], largest + 1)
        if name == "repeat_interleave" and (counts := _counts(args, kwargs)) is not None:
            rows = self._read(counts.sum(), int)
            return func(*args, **kwargs) if rows is None else func(*args, **kwargs, output_size=rows)
        if func is torch.tensor and any(map(_is_unknown, pytree.tree_leaves(data := kwargs.get("data", *args)))):
            x = _stacked(data)
            return x if kwargs.get("dtype") is None else x.to(kwargs["dtype"])
        if name == "narrow" and len(args) > 2 and _is_unknown(args[2]):
            start = self._read(args[2], int)
            return func(*args, **kwargs) if start is None else func(*args[:2], start, *args[3:], **kwargs)
        if name not in _READING or not _is_unknown(args[0]):
            return func(*args, **kwargs)
        if self._replayed is not None and (answer := next(self._replayed, None)) is not None:
            return answer
        convert = _READING[name]
        if convert is not None and args[0].numel() == 1 and not (convert is float and args[0].is_floating_point()):
            answer = self._read(args[0], convert)
            if answer is not None:
                return answer
        result = func(*args, **kwargs)
        self._reads.append(result)
        return result

    def _is_without_classes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
        return type(classes) is int and classes == -1 and _is_unknown(args[0])

    def _read(self, x: torch.Tensor, convert: Callable[[Any], Any]) -> Any:
        """Return the value of a tensor of one element; None if it is not known."""
        if self._replayed is not None and (answer := next(self._replayed, None)) is not None:
            return answer
        answer = self._answer(x, convert)
        if answer is not None:
            self._reads.append(answer)
        return answer

    def _answer(self, x: torch.Tensor, convert: Callable[[Any], Any]) -> Any:
        node = self._node_of(x)
        # A tensor may be changed in place after it was asked.
        key = node, convert, 0 if node is None else writes(node.graph)
        if key not in self._known:
            is_branch = convert is bool and _is_users()
            is_random = node is not None and is_branch and draws([node])
            answer = None if node is None else True if is_random else self._value(node)
            if node is None or answer is None:
                self.is_unanswered = True
                return None
            answer = self._on_path(bool(answer)) if is_branch else convert(answer)
            floats = is_of_floats([node])
            self.asked.append(Question(_asked(x, convert), answer, user_line(), floats, is_branch, is_random))
            self._known[key] = answer
        return self._known[key]

    def counted(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call an operation that selects rows by a mask with as many rows as for the example."""
        return selected(func, args, kwargs, functools.partial(self._answer, convert=int))

    def assume(self, condition: torch.Tensor) -> None:
        """Assume a condition that holds for the example."""
        self._answer(condition, bool)

    def _on_path(self, answer: bool) -> bool:
        """Return the answer to the next condition."""
        place = sum(question.is_branch for question in self.asked)
        return self.path[place] if place < len(self.path) else answer

    def of_expression(self, expr: Any, *, is_users: bool = False) -> Any:
        """Return the value of an expression of numbers of tensors; None if it is not known.

        Args:
          expr: The expression.
          is_users: Whether it is a condition of the user's code, not one within PyTorch.
        """
        numbers = self._symbols()
        if not expr.free_symbols or not expr.free_symbols <= numbers.keys():
            return None
        found = {symbol: self._value(numbers[symbol]) for symbol in expr.free_symbols}
        if any(x is None or isinstance(x, float) for x in found.values()):
            self.is_unanswered = True
            return None
        value = expr.xreplace({symbol: sympy.Integer(int(x)) for symbol, x in found.items()})
        is_condition = isinstance(value, sympy.logic.boolalg.BooleanAtom)
        if not is_condition and not value.is_Integer:
            return None
        if expr not in self._known:
            is_branch = is_condition and is_users
            answer = self._on_path(bool(value)) if is_branch else bool(value) if is_condition else int(value)
            floats = is_of_floats([numbers[x] for x in expr.free_symbols])
            self.asked.append(Question(expr, answer, user_line(), floats, is_branch))
            self._known[expr] = answer
        return sympy.sympify(self._known[expr])

    def _independent(self) -> list[Question]:
        """Return the questions without those that follow from others: from numbers that are known by themselves."""
        fixed = {x.value for x in self.asked if isinstance(x.value, sympy.Symbol)}
        return [
            x
            for x in self.asked
            if x.is_branch or x.value in fixed or not isinstance(x.value, sympy.Basic) or x.value.free_symbols - fixed
        ]

    def _computed(self, question: Question) -> Iterator[Question]:
        """Yield a question whose value is a tensor or a number that the graph computes, instead of an expression."""
        if not isinstance(question.value, sympy.Basic):
            yield question
            return
        nodes = self._symbols()
        numbers = {symbol: nodes[symbol].meta["val"] for symbol in question.value.free_symbols}
        # A condition that is read is the expression `symbol == 1`.
        conditions = {symbol: sympy.Symbol(f"{symbol}_holds") for symbol, x in numbers.items() if _is_condition(x)}
        expr = question.value.xreplace({sympy.Eq(symbol, 1): x for symbol, x in conditions.items()})
        expr = expr.xreplace({sympy.Ne(symbol, 1): sympy.Not(x) for symbol, x in conditions.items()})
        numbers |= {name: numbers[symbol] for symbol, name in conditions.items()}
        try:
            yield question._replace(value=sympy_interp(_OfNumbers, numbers, expr))
        except Exception:  # any of an expression that has no function: then all that is in it is as for the example
            for symbol, node in nodes.items():
                if symbol in question.value.free_symbols:
                    value = node.meta["val"]
                    yield question._replace(value=value, answer=value.node.pytype(self._value(node)), is_branch=False)

    def with_sizes(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return arguments with the numbers that sizes depend on as those of the example."""
        env = next(x.node.shape_env for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.SymInt))
        if func._schema.is_mutable or not self._has_symbolic_size(env, func, args, kwargs):
            return args, kwargs

        # Numbers, as what a tensor is multiplied by or filled with, may stay; the ends of a range may not.
        sizes = self._fixed(func, args, kwargs, {x.name for x in func._schema.arguments if "number" in str(x.type)})
        return sizes if not self._has_symbolic_size(env, func, *sizes) else self._fixed(func, args, kwargs, set())

    def _fixed(self, func: Any, args: Any, kwargs: Any, kept: Collection[str]) -> tuple[Any, Any]:
        """Return arguments with numbers of the example, but for those of some names."""

        def fixed(x: Any) -> Any:
            value = self.of_expression(x.node.expr) if isinstance(x, torch.SymInt) else None
            return x if value is None else int(value)

        names = [x.name for x in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        new = {name: x if name in kept else pytree.tree_map(fixed, x) for name, x in given.items()}
        return tuple(new[name] for name in names[: len(args)]), {name: new[name] for name in kwargs}

    def _has_symbolic_size(self, env: ShapeEnv, func: Any, args: Any, kwargs: Any) -> bool:
        try:
            with env.ignore_fresh_unbacked_symbols():
                result = func(*args, **kwargs)
        except Exception:  # any of a shape that has no number
            return True
        tensors = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
        return any(not isinstance(n, int) for x in tensors for n in x.shape)

    def _symbols(self) -> dict[Any, torch.fx.Node]:
        """Return the node of each number that is read from a tensor, by its symbol."""
        found = {}
        for node in self._tracer.graph.nodes if self._tracer is not None else ():
            value = node.meta.get("val")
            if node.op == "call_function" and node.target in _ITEMS and isinstance(value, _SYMBOLIC):
                for symbol in value.node._expr.free_symbols:
                    found[symbol] = node
        return found

    def _number(self, x: Any) -> Any:
        """Return a symbolic number for the example."""
        numbers = self._symbols()
        values = {symbol: self._value(numbers[symbol]) for symbol in x.node._expr.free_symbols if symbol in numbers}
        if len(values) < len(x.node._expr.free_symbols) or None in values.values():
            return x
        # A condition is the expression `symbol == 1`.
        of = {symbol: sympy.sympify(int(x) if type(x) is bool else x) for symbol, x in values.items()}
        return x.node.pytype(x.node._expr.xreplace(of))

    def _value(self, node: torch.fx.Node) -> Any:
        """Return what a node of one element computes for the example; None if that is not known."""
        return untraced(functools.partial(self._evaluated, node))

    def _evaluated(self, node: torch.fx.Node) -> Any:
        example = self._example()
        if example is None:
            return None
        given = {placeholder: functools.partial(read, example) for placeholder, read in self._placeholders.items()}
        try:
            value = value_of(node, given, self._tracer.root, self.calls)
        except Unevaluated:
            return None
        return value.item() if isinstance(value, torch.Tensor) else value

    def _node_of(self, x: torch.Tensor) -> torch.fx.Node | None:
        proxy = None if self._tracer is None else self._tracer.unwrap_proxy(x)
        return proxy.node if isinstance(proxy, torch.fx.Proxy) else None


_SYMBOLIC = (torch.SymInt, torch.SymBool, torch.SymFloat)
_READING: dict[str, Any] = {
    **{"__bool__": bool, "__int__": int, "__index__": int, "__float__": float},
    # Their results are symbolic numbers, which operations may take as they are.
    **{"item": None, "_item": None, "tolist": None},
}
"""Methods that read a tensor, with the Python type of what they return; None for symbolic numbers."""
_ASKED: ContextVar[Questions | None] = ContextVar("questions of the pass that is traced", default=None)


def _tensor_of(name: str, example: Example) -> torch.Tensor:
    return example.tensors[name]


def _leaf_of(i: int, example: Example) -> torch.Tensor:
    return example.leaves[i]


def _asked(x: torch.Tensor, convert: Callable[[Any], Any]) -> torch.Tensor:
    """Return what a question is about, of which the tensor that is asked may be changed in place afterwards."""
    with DisableTorchFunction():
        x = x.detach().reshape(())
        if convert is bool:
            return x != 0
        return x.trunc() if convert is int and x.is_floating_point() else x.clone()


def _counts(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the tensor of how often `torch.repeat_interleave` repeats, if it tells the size of the result alone."""
    counts = kwargs.get("repeats", args[1] if len(args) > 1 else args[0] if args else None)
    return counts if _is_unknown(counts) and kwargs.get("output_size") is None else None


def _stacked(data: Any) -> torch.Tensor:
    """`torch.tensor` of nested lists of tensors and numbers: without a gradient, in the dtype that they promote to."""
    if not isinstance(data, list | tuple):
        return data.detach().clone() if isinstance(data, torch.Tensor) else torch.tensor(data)
    dtype = _dtype_of(pytree.tree_leaves(data))
    return torch.stack([_stacked(part).to(dtype) for part in data])


def _dtype_of(leaves: Sequence[Any]) -> torch.dtype:
    dtypes = (x.dtype if isinstance(x, torch.Tensor) else torch.tensor(x).dtype for x in leaves)
    return functools.reduce(torch.promote_types, dtypes)


def _is_condition(x: Any) -> bool:
    return isinstance(x, torch.SymBool)


def _is_unknown(x: Any) -> bool:
    return is_unknown(x) and not hasattr(x, "_if_finite")


_is_users_condition = ContextVar("whether the user's code asks for a condition", default=False)
_bool_of: Any = torch.SymBool.__bool__
_evaluate, _defer = ShapeEnv._evaluate_expr, ShapeEnv.guard_or_defer_runtime_assert
_dispatch: Any = ProxyTorchDispatchMode.__torch_dispatch__


def _evaluated(self: ShapeEnv, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
    """`ShapeEnv._evaluate_expr`, which raises for numbers of tensors."""
    try:
        return _evaluate(self, orig_expr, *args, **kwargs)
    except GuardOnDataDependentSymNode:
        asked = _ASKED.get()
        value = None if asked is None else asked.of_expression(orig_expr, is_users=_is_users_condition.get())
        if value is None:
            raise
        return value


def user_condition(self: torch.SymBool) -> bool:
    """`SymBool.__bool__`, as of a condition in the user's code."""
    token = _is_users_condition.set(_is_users())
    try:
        return _bool_of(self)
    finally:
        _is_users_condition.reset(token)


def _is_users() -> bool:
    """Return whether the user's code asks, not PyTorch's."""
    frame = sys._getframe(1)
    while frame is not None and "/jaxtrain/torch_import/" in frame.f_code.co_filename:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and not is_internal(frame.f_code.co_filename)


def _hash(self: torch.SymInt) -> int:
    """`SymInt.__hash__`, which raises: of the key of a dict that is a number of a tensor."""
    asked = _ASKED.get()
    value = None if asked is None else asked.of_expression(self.node.expr)
    return _hash_of(self) if value is None else hash(int(value))


_hash_of = torch.SymInt.__hash__


def _deferred(self: ShapeEnv, orig_expr: Any, *args: Any, **kwargs: Any) -> bool:
    """`ShapeEnv.guard_or_defer_runtime_assert`, by which `torch._check` asserts what is not known."""
    asked = _ASKED.get()
    if asked is not None and self._maybe_evaluate_static(orig_expr) is None:
        asked.counts.note(self, orig_expr)
        value = asked.of_expression(orig_expr)
        if value is not None and not value:
            raise refusal("a check fails on the example", "give an example that the module takes", user_line())
        if value is not None:
            return True
    return _defer(self, orig_expr, *args, **kwargs)


def _dispatched(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """The dispatch of operations to the graph that is traced, with numbers for symbolic sizes and counts."""
    asked = _ASKED.get()
    if asked is not None and is_counted(func, args, are_read=asked.counts.are_read):
        with self:
            return asked.counted(func, args, kwargs or {})
    if asked is not None and scatters(func, args):
        with self:
            asked.assume(has_enough(*args))
    if asked is not None and any(isinstance(x, torch.SymInt) for x in pytree.tree_leaves((args, kwargs))):
        args, kwargs = asked.with_sizes(func, args, kwargs or {})
    return _dispatch(self, func, types, args, kwargs)


def need_counts() -> None:
    """Note that the pass that is traced needs the numbers of selected rows."""
    if (asked := _ASKED.get()) is not None:
        asked.counts.are_needed = True


def _assert_async(cond: torch.Tensor, message: str = "") -> None:
    """`torch._assert_async` as an assertion at once."""
    if not cond:
        raise RuntimeError(message or "an assertion failed")


QUESTIONS: tuple[tuple[Any, str, Any], ...] = (
    (ShapeEnv, "_evaluate_expr", _evaluated),
    (ShapeEnv, "guard_or_defer_runtime_assert", _deferred),
    (ProxyTorchDispatchMode, "__torch_dispatch__", _dispatched),
    (torch.SymInt, "__hash__", _hash),
    (torch, "_assert_async", _assert_async),
)
"""Replacements while a module is traced: owner, name and value."""
