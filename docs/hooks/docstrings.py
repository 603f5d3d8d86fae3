"""Docstrings as Markdown: a doctest becomes a block of code, which Markdown would take for quotations in quotations."""

import inspect
import re
from typing import Any

from griffe import Extension, Object

# From a prompt to the next empty line: the example and what it prints.
DOCTEST = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.M | re.S)


class Doctests(Extension):
    """An extension of griffe, which reads the code for mkdocstrings."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring:
            text = inspect.cleandoc(obj.docstring.value)
            obj.docstring.value = DOCTEST.sub(lambda match: f"```pycon\n{match[0]}\n```", text)
