"""Lines of Python code as `ruff format` lays them out."""

import re
from collections.abc import Iterator

WIDTH = 88
_OPENING, _CLOSING = "([{", ")]}"


def laid_out(statement: str, indent: int) -> list[str]:
    """Return the lines of a statement, split at its brackets if it is too long for one.

    >>> laid_out("x = f(a)", 1)
    ['    x = f(a)']
    """
    space = "    " * indent
    if len(space + statement) <= WIDTH:
        return [space + statement]
    head, value = _head(statement)
    operators = _top_level_operators(value)
    if operators and (head or value.startswith("(")):
        return _parenthesized(head, value, operators, indent)
    if head and _commas(value):
        return [f"{space}{head}(", *_items(value, indent + 1), f"{space})"]
    return _split_at_bracket(statement, indent)


def _head(statement: str) -> tuple[str, str]:
    """Return the left side of an assignment, or "return ", and the expression."""
    if statement.startswith("return "):
        return "return ", statement.removeprefix("return ")
    places = (i + 3 for i, _, depth in _depths(statement) if depth == 0 and statement[i : i + 3] == " = ")
    end = next(places, 0)
    return statement[:end], statement[end:]


def _parenthesized(head: str, value: str, operators: list[int], indent: int) -> list[str]:
    space, inner = "    " * indent, "    " * (indent + 1)
    if len(inner + value) <= WIDTH:
        return [f"{space}{head}(", inner + value, f"{space})"]
    parts = [value[i:j].rstrip() for i, j in zip([0, *operators], [*operators, len(value)], strict=True)]
    lines = [line for part in parts for line in _split_if_long(part, indent + 1)]
    return [f"{space}{head}(", *lines, f"{space})"]


def _split_if_long(text: str, indent: int) -> list[str]:
    space = "    " * indent
    return [space + text] if len(space + text) <= WIDTH else _split_at_bracket(text, indent)


def _split_at_bracket(text: str, indent: int) -> list[str]:
    """Split at the last bracket at the top level that the line reaches; a definition at its parameters."""
    space = "    " * indent
    brackets = [(i, j) for i, j in _brackets(text) if j - i > 1]
    if not brackets:
        return [space + text]
    reached = [(i, j) for i, j in brackets if len(space) + i < WIDTH and not text.startswith("def ")]
    opened, closed = (reached or brackets[:1])[-1]
    head, body, tail = text[: opened + 1], text[opened + 1 : closed], text[closed:]
    inner = "    " * (indent + 1)
    # A call's arguments may share a line, the items of a tuple, list or dict may not.
    is_literal = opened == 0 or not (text[opened - 1].isalnum() or text[opened - 1] in "_)]")
    if len(inner + body) <= WIDTH and not body.endswith(",") and not (is_literal and _commas(body)):
        return [space + head, inner + body, space + tail]
    return [space + head, *_items(body, indent + 1), space + tail]


def _items(body: str, indent: int) -> list[str]:
    commas = _commas(body)
    if not commas:
        return _split_if_long(body, indent)
    parts = [body[i:j].strip(", ") for i, j in zip([0, *commas], [*commas, len(body)], strict=True)]
    return [line for part in parts if part for line in _split_if_long(part + ",", indent)]


def _depths(text: str) -> Iterator[tuple[int, str, int]]:
    """Yield (place, character, depth of brackets) outside strings."""
    depth, quoted = 0, False
    for i, char in enumerate(text):
        if char == '"' and (i == 0 or text[i - 1] != "\\"):
            quoted = not quoted
        if quoted:
            continue
        if char in _CLOSING:
            depth -= 1
        yield i, char, depth
        if char in _OPENING:
            depth += 1


def _brackets(text: str) -> list[tuple[int, int]]:
    """Return the places of brackets at the top level."""
    found = [(i, char) for i, char, depth in _depths(text) if depth == 0 and char in _OPENING + _CLOSING]
    return [(found[k][0], found[k + 1][0]) for k in range(0, len(found), 2)]


def _commas(text: str) -> list[int]:
    return [i for i, char, depth in _depths(text) if depth == 0 and char == ","]


def _top_level_operators(text: str) -> list[int]:
    """Return the places of the operators of lowest precedence at the top level."""
    if _commas(text):
        return []
    at_top = {i for i, _, depth in _depths(text) if depth == 0}
    for group in (r"==|!=|<=|>=|<|>", r"\|", r"\^", r"&", r"<<|>>", r"[+-]", r"//|[*/@%]"):
        places = [m.start() + 1 for m in re.finditer(rf" (?:{group}) ", text) if m.start() in at_top]
        if places:
            return places
    return []
