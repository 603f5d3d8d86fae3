"""The statements of a function: which values are assigned, under which names, and which are written in place."""

import keyword
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxtrain.torch_import.source.expressions import Expr
from jaxtrain.torch_import.source.pytorch_code import Statement
from jaxtrain.torch_import.source.ruff_format import WIDTH

Resolve = Callable[[str], Expr]
_RESHAPED = frozenset(
    (
        "view",
        "reshape",
        "flatten",
        "transpose",
        "permute",
        "unsqueeze",
        "squeeze",
        "expand",
        "slice",
        "select",
        "to_copy",
    )
)
_HINTS = {"view": "reshaped", "transpose": "transposed", "mul": "product", "add": "total", "addmm": "y", "mm": "y"}
"""Names of results that no statement names, by operation."""
_LONGEST_OPERAND = 60
"""Columns of the longest expression that is written inside another one."""


@dataclass
class Item:
    """An operation, or a call of another function.

    Attributes:
      build: Its expression, from those of its operands.
      operands: Names of the values that it takes.
      results: Names of the values that it makes, by their places among `count`.
      count: Number of results that the expression has; 1 for a value that is no tuple.
      statements: PyTorch's statements being executed, outermost first.
      hint: Name for a result whose statement has none.
      called: Name of the module that computes it, for a result whose statement names another value; "" for none.
      new_state: Key of `new_state` for the new buffers, the last result; "" for all of it, None without.
      draws: Whether it takes a key.
      names: Names of the results in the function that is called.
      parameters: Names of the operands in it.
      named: Operands that are not written in place, as the expression reads them several times.
      before: Statements that come first, such as the definition of a function that the expression calls.
      after: A statement that follows; "" for none.
      packed: From the targets to the left side of the assignment.
    """

    build: Callable[[Resolve], Expr]
    operands: list[str]
    results: dict[int, str]
    count: int = 1
    statements: list[Statement] = field(default_factory=list)
    hint: str = "x"
    called: str = ""
    new_state: str | None = None
    draws: bool = False
    names: tuple[str, ...] = ()
    parameters: Mapping[str, str] = field(default_factory=dict)
    named: frozenset[str] = frozenset()
    before: Callable[[Resolve], list[str]] | None = None
    after: str = ""
    packed: Callable[[list[str]], str] = ", ".join

    def names_for(self, place: int, is_target: Callable[[Statement], bool]) -> list[str]:
        """Return the names that PyTorch's code suggests for a result, best first.

        Args:
          place: Its place among the results.
          is_target: Whether a result may have the name that a statement assigns.
        """
        found = []
        for statement in reversed(self.statements):
            targets = statement.targets
            if not is_target(statement):
                continue
            if len(self.results) == 1:
                found += [name for name in targets if name != "_"][:1]
            elif place < len(targets) and not self.names:
                found.append(targets[place])
        # The order of a function's results is not that of PyTorch's.
        if self.names and (not found or self.names[place] in self._targets()):
            found.insert(0, self.names[place])
        return [name for name in found if name and name != "_"]

    def _targets(self) -> set[str]:
        return {name for statement in self.statements for name in statement.targets}


class Body:
    """Writes statements, in order."""

    def __init__(
        self,
        bound: Mapping[str, str],
        outer: Resolve,
        reserved: Collection[str],
        aliases: Sequence[tuple[int, str, str]],
        *,
        indent: int = 1,
        kept: Collection[str] = (),
        keys: str = "keys",
    ) -> None:
        """Start a body.

        Args:
          bound: Values of the function's arguments, by name.
          outer: Expressions of values that have no name, such as parameters.
          reserved: Names that no value may have.
          aliases: (line, new name, old name) of PyTorch's assignments of one name to another.
          indent: Indentation of the statements.
          kept: Names that are never given to another value, as those that a nested function reads from outside.
          keys: Name of the keys.
        """
        self._bound = dict(bound)
        self._names = {value: name for name, value in bound.items()}
        self._outer, self._aliases = outer, aliases
        self._reserved = {*reserved, *kept}
        self._indent, self._keys = indent, keys
        self._pending: dict[str, Item] = {}
        self._uses: Counter[str] = Counter()
        self._read_twice: frozenset[str] = frozenset()
        self._last: dict[Any, Item] = {}  # statement -> its last item
        self.lines: list[str] = []

    def write(self, items: Sequence[Item], returned: Sequence[str], result: Callable[[Resolve], Expr] | None) -> None:
        """Write items, then the return statement.

        Args:
          items: The items.
          returned: Values that the return statement reads.
          result: The expression that is returned; None for a function without one.
        """
        for item in items:
            self._uses.update(item.operands)
            self._read_twice |= item.named
            self._last.update({s.place: item for s in item.statements})
        self._uses.update(returned)
        end = Item(result or (lambda _: Expr("None")), list(returned), {})
        for i, item in enumerate(items):
            consumer = self._consumer(item, items[i + 1 :], end)
            is_returned = consumer is end and i == len(items) - 1 and len(returned) == 1
            is_short = is_returned and len(self._line(f"return {self._built(item)}")) <= WIDTH
            if is_short or (consumer is not None and self._is_inlined(item, consumer, items[i + 1 :])):
                self._pending[item.results[0]] = item
            elif item.results or item.new_state is not None or item.draws:
                self._assign_before(item)
                self._assign(item)
        if result is not None:
            self._assign_before(end)
            only = self._pending.get(returned[0]) if len(returned) == 1 else None
            self._shorten(only or end, "return ")
            self.lines.append(self._line(f"return {self._built(end)}"))

    def resolve(self, value: str) -> Expr:
        """Return the expression of a value."""
        if value in self._pending:
            return self._built(self._pending[value]).like(self._outer(value))
        if value in self._names:
            return Expr(self._names[value]).like(self._outer(value))
        return self._outer(value)

    def _built(self, item: Item) -> Expr:
        expr = item.build(self.resolve)
        return expr if self._keys == "keys" else expr._replace(text=re.sub(r"\bkeys\b", self._keys, expr.text))

    def _line(self, statement: str) -> str:
        return "    " * self._indent + statement

    def name_of(self, value: str) -> str:
        """Return the name of a value; "" if it has none."""
        if value in self._pending:
            return (self._suggested(self._pending[value], 0) or [""])[0]
        return self._names.get(value, "")

    def _consumer(self, item: Item, later: Sequence[Item], end: Item) -> Item | None:
        """Return the only item that reads an item's only result, once."""
        if len(item.results) != 1 or item.count != 1 or item.new_state is not None or item.before is not None:
            return None
        (value,) = item.results.values()
        if self._uses[value] != 1:
            return None
        return next((x for x in later if value in x.operands), end)

    def _is_inlined(self, item: Item, consumer: Item, later: Sequence[Item]) -> bool:
        if item.draws and (not later or later[0] is not consumer):
            return False
        text = self._built(item).text
        if text.isidentifier():
            return True
        if len(text) > _LONGEST_OPERAND or item.results[0] in consumer.named:
            return False
        if not item.statements or not item.statements[-1].targets:
            return True
        return bool(consumer.statements) and consumer.statements[-1].place == item.statements[-1].place

    def _assign_before(self, item: Item) -> None:
        """Assign what comes before an item and is not a part of it: the order of evaluation is PyTorch's.

        Gradients of a value that is read several times are added in this order.
        """
        others = self._not_read([*self._pending], [*item.operands])
        if not others:
            return
        order = [*self._pending]
        # Parts of the item that come before one of these are evaluated before it, too.
        for value in self._not_read(order[: order.index(others[-1]) + 1], []):
            if value in self._pending:
                self._assign(self._pending.pop(value))

    def _not_read(self, values: Sequence[str], read: Sequence[str]) -> list[str]:
        """Return the pending values among some that are neither read by others of them nor by an item."""
        inside = {*read, *(name for value in values for name in self._pending[value].operands)}
        return [x for x in values if x not in inside and not self.resolve(x).text.isidentifier()]

    def _forget_parts(self, item: Item) -> None:
        """Forget the pending values of an item that was written."""
        for value in item.operands:
            if value in self._pending and self._uses[value] <= 1:
                self._forget_parts(self._pending.pop(value))

    def _leaves(self, item: Item) -> list[str]:
        """Return the values with names, or from outside, that an item's expression reads."""
        leaves = []
        for value in item.operands:
            leaves += self._leaves(self._pending[value]) if value in self._pending else [value]
        return leaves

    def _shorten(self, item: Item, target: str) -> None:
        """Assign operands until the statement fits into a line, if it has any."""
        while len(self._line(f"{target}{self._built(item)}")) > WIDTH:
            operands = [value for value in item.operands if value in self._pending]
            operands = [value for value in operands if not self.resolve(value).text.isidentifier()]
            if not operands:
                return
            first = min(operands, key=[*self._pending].index)
            self._assign(self._pending.pop(first))

    def _assign(self, item: Item) -> None:
        suggested = {place: self._suggested(item, place) for place in item.results}
        longest = max((name for names in suggested.values() for name in names), key=len, default="_")
        self._shorten(item, f"{longest} = " if item.count == 1 else f"{', '.join([longest] * len(item.results))} = ")
        # An alias is written before the statement that gives its name to another value.
        names = {place: self._free_name(item, suggested[place]) for place in item.results}
        text = self._built(item).text
        before = [] if item.before is None else item.before(self.resolve)
        self._uses.subtract(self._leaves(item))
        self._forget_parts(item)
        targets = []
        for place in range(item.count):
            if place not in item.results:
                targets.append("_")
                continue
            name = self._name(names[place], [*suggested[place], *[item.called] * (item.called != "")], targets)
            value = item.results[place]
            self._bound[name], self._names[value] = value, name
            targets.append(name)
        if not item.results and item.new_state is None:
            targets = []
        if item.new_state is not None:
            at = f'new_state["{item.new_state}"]' if item.new_state else "new_state"
            targets = [*(targets if item.results else []), at]
        # The statement's own reads may have had a name that it assigns: the text was built before.
        self.lines += [f"{'    ' * (self._indent - 1)}{line}" if line else line for line in before]
        if targets != [text]:
            self.lines.append(self._line(f"{item.packed(targets)} = {text}" if targets else text))
        self.lines += [self._line(item.after)] if item.after else []

    def _suggested(self, item: Item, place: int) -> list[str]:
        """Return names for a result, best first: PyTorch's, then that of the operand that it replaces."""
        names = item.names_for(place, lambda statement: self._is_like_last(item, place, statement))
        parts = [value for value in item.operands if value in self._pending]
        if not names and len(parts) == 1 == len(item.operands):
            names = self._suggested(self._pending[parts[0]], 0)
        if not names and (operand := self._replaced(item, place)) is not None:
            names = [operand]
        names = names or [_HINTS.get(item.hint, item.hint)]
        return [name for name in map(self._allowed, names) if name] or ["x"]

    def _is_like_last(self, item: Item, place: int, statement: Statement) -> bool:
        """Return whether a result may have the name that a statement assigns: it is the last, or like it."""
        last = self._last.get(statement.place, item)
        if last is item or len(statement.targets) > 1 or item.results[place] in self._read_twice:
            return True
        if not last.results:
            return False
        made, final = self._outer(item.results[place]), self._outer(next(iter(last.results.values())))
        return _kind(made) == _kind(final)

    def _replaced(self, item: Item, place: int) -> str | None:
        """Return the name of the first operand, if a result has its rank and dtype and nobody reads it later."""
        made = self._outer(item.results[place])
        for value in self._leaves(item):
            if value in self._names:
                given = self._outer(value)
                same = _kind(given) == _kind(made) if item.hint not in _RESHAPED else given.dtype == made.dtype
                return self._names[value] if same and self._left(value, item) <= 0 else None
        return None

    def _free_name(self, item: Item, names: Sequence[str]) -> str | None:
        """Keep a live value by PyTorch's own alias, if the best name of a result belongs to it."""
        best = names[0]
        value = self._bound.get(best)
        if value is None or self._left(value, item) <= 0:
            return best
        line = item.statements[-1].place[1] if item.statements else 0
        for number, new, old in reversed(self._aliases):
            if old == best and number < line and self._allowed(new) == new and new != best:
                holder = self._bound.get(new)
                if holder is None or self._left(holder, item) <= 0:
                    self.lines.append(self._line(f"{new} = {best}"))
                    self._bound[new], self._names[value] = value, new
                    del self._bound[best]
                    return best
        return None

    def _left(self, value: str, item: Item) -> int:
        """Return how often a value is read after an item."""
        if self._names.get(value) is None:
            return 0
        return self._uses[value] - self._leaves(item).count(value)

    def _name(self, free: str | None, suggested: Sequence[str], taken: Sequence[str]) -> str:
        """Return a name for a result that no live value has; called once the item's own reads are counted."""
        candidates = [*([] if free is None else [free]), *suggested]
        candidates += [f"{suggested[0]}_{i}" for i in range(2, 1000)]
        for name in candidates:
            value = self._bound.get(name)
            if name not in taken and (value is None or self._uses[value] <= 0):
                return name
        raise AssertionError("more names than values")

    def _allowed(self, name: str) -> str:
        name = "".join(char if char.isalnum() else "_" for char in name).strip("_")
        if not name.isidentifier():
            return ""
        return f"{name}_" if name in self._reserved or keyword.iskeyword(name) else name


def _kind(x: Expr) -> tuple[int, object]:
    return len(x.shape), x.dtype
