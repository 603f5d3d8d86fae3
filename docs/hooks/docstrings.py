"""Convert doctests in docstrings to fenced blocks, because Markdown would render `>>>` as nested quotations."""

import inspect
import re
from typing import Any

from griffe import Extension, Object

# From a prompt to the next empty line: the example and its output.
DOCTEST = re.compile(r"^( *)>>> .*?(?=\n\s*\n|\Z)", re.M | re.S)


class Doctests(Extension):
    """Extension of griffe, the parser of mkdocstrings."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of `obj`."""
        if obj.docstring:
            text = inspect.cleandoc(obj.docstring.value)
            obj.docstring.value = DOCTEST.sub(lambda match: f"{match[1]}```pycon\n{match[0]}\n{match[1]}```", text)
