"""Bounds on what a chat template may compute: the sandbox of jinja2 bounds `range`, but neither time nor memory.

Every iteration of a loop, and every string or container that an operator, a filter or a call returns, is subtracted
from a budget. What could multiply its operands, such as `*`, `center` or `replace`, is checked before it is computed.
"""

import functools
import math
import re
import time
import types
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from typing import Any

from jaxtrain.data.finetuning.examples import Message

_ALWAYS, _PER_CHARACTER = 10**7, 100  # characters that may be computed, and further ones for each of the conversation
_SECONDS, _PER_MILLION = 5.0, 1.0  # of processor time, and for each million of characters
_OF_ITERATION = 5  # characters that an iteration counts as
_MOST_BITS, _MOST_NUMBER = 10**5, 10**6  # of an integer; of a width
_MOST_VALUES = 3 * 10**5  # in a container that becomes text
_CALLS_PER_LOOK = 64  # calls between two looks at the clock
_WIDTHS = {"center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes"}
_FILTER_WIDTHS = {"center", "batch", "slice", "indent", "wordwrap", "truncate", "tojson", "round"}
# Filters that do not convert a container to text.
_OF_CONTAINERS = {
    *("list", "length", "count", "first", "last", "map", "select", "reject", "selectattr", "rejectattr", "batch"),
    *("slice", "sort", "dictsort", "unique", "groupby", "min", "max", "items", "random", "default", "d", "attr"),
    *("reverse", "sum", "counted"),
}
_WITHOUT = ("urlize", "pprint", "lipsum")  # no template needs them, and their cost has no simple bound


class TemplateLimit(Exception):  # noqa: N818
    """A template that computes too much."""


class Budget:
    """What may still be computed.

    Args:
      size: Characters of the conversation.
    """

    def __init__(self, size: int) -> None:
        self.left = self.most = _ALWAYS + _PER_CHARACTER * size
        self._deadline = time.thread_time() + _SECONDS + _PER_MILLION * size / 10**6
        self._calls = 0

    def check(self, size: int) -> None:
        """Raise `TemplateLimit` if something of this size must not be computed."""
        if size > self.left:
            raise TemplateLimit(f"it computes more than {self.most:,} characters")

    def spend(self, size: int) -> None:
        """Subtract what was computed."""
        self.check(size)
        self.left -= size
        self._calls += 1
        if not self._calls % _CALLS_PER_LOOK and time.thread_time() > self._deadline:
            raise TemplateLimit(f"it takes longer than {_SECONDS:g} s")


budget: ContextVar[Budget] = ContextVar("budget")
"""The budget of the text that is being rendered."""


def conversation_budget(messages: Iterable[Message], tools: Any) -> Budget:
    """Return the budget of a conversation."""
    return Budget(sum(text_size(message) for message in messages) + text_size(tools))


def text_size(value: Any, most: float = math.inf) -> int:
    """Return about the number of characters of a value as text; a number above `most` if it has more, or many values.

    Example:
      >>> text_size({"role": "user", "content": ["Hi"]})
      29
    """
    size, waiting, seen = 0, [value], 0
    while waiting and size <= most:
        found = waiting.pop()
        size, seen = size + 2, seen + 1
        if seen > _MOST_VALUES and most < math.inf:
            return int(most) + 1
        if isinstance(found, str | bytes):
            size += len(found)
        elif isinstance(found, Mapping):
            waiting += [*found, *found.values()]
        elif isinstance(found, list | tuple | set | frozenset | KeysView | ValuesView | ItemsView):
            waiting += found
        elif isinstance(found, int):
            size += found.bit_length() // 3
    return size


def limited_environment(filters: Mapping[str, Callable[..., Any]], **options: Any) -> Any:
    """Return an immutable sandbox of jinja2 whose templates spend the `budget`.

    Args:
      filters: Further filters.
      **options: Those of `jinja2.Environment`.
    """
    from jinja2 import nodes, pass_context
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.visitor import NodeTransformer

    class Limits(NodeTransformer):
        """Adds calls that spend the budget to a template: in bodies that can be repeated, and where texts arise."""

        def visit_For(self, node: Any) -> Any:  # noqa: N802
            node = self.generic_visit(node)
            if node.test is not None:
                node.test = nodes.And(_call(node, "spend", nodes.Const(_OF_ITERATION)), node.test)
            return self._repeated(node)

        def visit_Macro(self, node: Any) -> Any:  # noqa: N802
            return self._repeated(self.generic_visit(node))

        visit_CallBlock = visit_Block = visit_Macro  # noqa: N815

        def visit_AssignBlock(self, node: Any) -> Any:  # noqa: N802
            node = self.generic_visit(node)
            node.filter = nodes.Filter(node.filter, "counted", [], [], None, None)
            return node

        def visit_Concat(self, node: Any) -> Any:  # noqa: N802
            node = self.generic_visit(node)
            return _call(node, "concatenate", *node.nodes)

        def visit_List(self, node: Any) -> Any:  # noqa: N802
            node = self.generic_visit(node)
            return _call(node, "counted", node) if getattr(node, "ctx", "load") == "load" else node

        visit_Dict = visit_Tuple = visit_List  # noqa: N815

        def _repeated(self, node: Any) -> Any:
            characters = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
            spend = _call(node, "spend", nodes.Const(_OF_ITERATION + characters))
            node.body.insert(0, nodes.ExprStmt(spend).set_lineno(node.lineno))
            return node

    def _call(node: Any, name: str, *arguments: Any) -> Any:
        return nodes.Call(nodes.EnvironmentAttribute(name), [*arguments], [], None, None).set_lineno(node.lineno)

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"+", "*", "**", "%"})

        def _parse(self, *source: Any) -> Any:
            return Limits().visit(super()._parse(*source))

        def spend(self, size: int) -> bool:
            budget.get().spend(size)
            return True

        def counted(self, value: Any) -> Any:
            """Return a container whose text is not too long: one that contains itself twice, repeatedly, is."""
            budget.get().check(text_size(value, budget.get().left))
            return value

        def concatenate(self, *parts: Any) -> str:
            return _spent("".join(_text(part) for part in parts))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _check_operator(operator, left, right)
            return _spent(super().call_binop(context, operator, left, right))

        def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
            if isinstance(__obj, types.BuiltinMethodType | types.MethodType):
                _check_method(__obj, args)
            found = super().call(__context, __obj, *args, **kwargs)
            return __self.counted(_spent(found)) if isinstance(found, dict) else _spent(found)

        def wrap_str_format(self, value: Any) -> Any:
            wrapped = super().wrap_str_format(value)
            if wrapped is None:
                return None

            @functools.wraps(wrapped)
            def call(*args: Any, **kwargs: Any) -> str:
                _check_format(value.__self__, (args, kwargs), "{")
                return str(wrapped(*args, **kwargs))

            return call

    @pass_context
    def finalize(context: Any, value: Any) -> Any:
        """Spend what is written. With a context, jinja2 computes no constants while it compiles."""
        del context
        return _spent(_text(value))

    environment = Environment(finalize=finalize, optimized=False, **options)
    for name in _WITHOUT:
        environment.filters.pop(name, None)
        environment.globals.pop(name, None)
    environment.filters |= {**filters, "counted": lambda value: value}
    environment.filters = {name: _counted_filter(name, filter) for name, filter in environment.filters.items()}
    return environment


def _counted_filter(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    skipped = 1 if hasattr(filter, "jinja_pass_arg") else 0

    @functools.wraps(filter)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = [*args[skipped:], *kwargs.values()]
        limit = budget.get()
        if name == "join":
            value = [*given[0]] if isinstance(given[0], Iterable) else given[0]
            args = (*args[:skipped], value, *args[skipped + 1 :])
            separators = text_size(given[1:]) * len(value) if isinstance(value, list) else 0
            limit.check(text_size(value, limit.left) + separators)
        elif name not in _OF_CONTAINERS and not isinstance(given[0], str):
            limit.check(text_size(given[0], limit.left))
        if name in _FILTER_WIDTHS:
            width = _largest(given[1:])
            lines = given[0].count("\n") + 1 if name == "indent" and isinstance(given[0], str) else 1
            texts = text_size([x for x in given[1:] if isinstance(x, str)]) if name in ("indent", "wordwrap") else 0
            size = text_size(given[0], limit.left) if name == "tojson" and width else 1
            if width > _MOST_NUMBER:
                raise TemplateLimit(f"the width {width:,} of {name} is too large")
            limit.check(width * lines * size + texts * (len(given[0]) if texts and isinstance(given[0], str) else 1))
        elif name == "replace":
            _check_replace(*map(_text, given[:3]))
        elif name == "format":
            _check_format(_text(given[0]), given[1:], "%")
        elif name == "sum" and isinstance(kwargs.get("start", [0, *args[skipped + 2 :]][-1]), str | list | tuple):
            raise TemplateLimit("sum adds numbers only")
        return _spent(filter(*args, **kwargs))

    return call


def _spent(value: Any) -> Any:
    """Return a value whose size was subtracted from the budget."""
    sized = isinstance(value, str | bytes | list | tuple | dict | set | frozenset)
    budget.get().spend(len(value) if sized else 1)
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        budget.get().check(text_size(value, budget.get().left))
        return str(value)
    return value


def _largest(values: Iterable[Any]) -> int:
    return max((abs(value) for value in values if isinstance(value, int)), default=0)


def _check_operator(operator: str, left: Any, right: Any) -> None:
    if operator == "%":
        if isinstance(left, str | bytes):
            _check_format(left if isinstance(left, str) else left.decode("latin-1"), right, "%")
        return
    if operator == "*":
        for one, times in ((left, right), (right, left)):
            if isinstance(times, int) and isinstance(one, str | bytes | list | tuple):
                budget.get().check(len(one) * max(times, 0))
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        size = {"*": bits + right.bit_length(), "**": bits * max(right, 0) if bits > 1 else 0}.get(operator, 0)
        if size > _MOST_BITS:
            raise TemplateLimit("a number is too large")


def _check_method(method: Any, args: tuple[Any, ...]) -> None:
    owner, name = getattr(method, "__self__", None), method.__name__
    if not isinstance(owner, str | bytes | int):
        return
    if name in _WIDTHS and (width := _largest(args)):
        if width > _MOST_NUMBER:
            raise TemplateLimit(f"the width {width:,} of {name} is too large")
        tabs = owner.count("\t" if isinstance(owner, str) else b"\t") if name == "expandtabs" else 0  # type: ignore[union-attr,arg-type]
        budget.get().check(width * max(tabs, 1))
    elif name == "replace" and len(args) > 1 and not isinstance(owner, int):
        _check_replace(owner, *args[:2])
    elif name == "join" and args and not isinstance(owner, int):
        budget.get().check(text_size(args[0], budget.get().left) + len(owner) * _length(args[0]))
    elif name == "translate" and not isinstance(owner, int):
        budget.get().check(len(owner) * text_size(args))


def _length(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 1


def _check_replace(text: Any, old: Any, new: Any) -> None:
    if all(isinstance(part, str) for part in (text, old, new)) or all(
        isinstance(part, bytes) for part in (text, old, new)
    ):
        budget.get().check(len(text) + text.count(old) * len(new))


def _check_format(template: str, values: Any, mark: str) -> None:
    """Check the widths of a format, and the size of its result."""
    widths = [int(number[:12]) for number in re.findall(r"[0-9]+", template)]
    is_nested = "*" in template if mark == "%" else re.search(r":[^{}]*\{", template) is not None
    if max(widths, default=0) > _MOST_NUMBER or (is_nested and _numbers_above(values)):
        raise TemplateLimit("a width in a format is too large")
    fields, limit = template.count(mark), budget.get()
    limit.check(len(template) + fields * (text_size(values, limit.left) + max(widths, default=0)))


def _numbers_above(values: Any) -> bool:
    found = [values]
    while found:
        value = found.pop()
        if isinstance(value, int) and abs(value) > _MOST_NUMBER:
            return True
        if isinstance(value, Mapping):
            found += value.values()
        elif isinstance(value, list | tuple):
            found += value
    return False
