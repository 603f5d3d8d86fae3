"""Write the summary tables of the API reference from docstrings: `python -m docs.summaries`.

Each page of docs/api starts with a table of its names and their summaries, so that it is readable without the site.
"""

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

PAGES = sorted((Path(__file__).parent / "api").glob("*.md"))
_ENTRY = re.compile(r"^::: ([\w.]+)$", re.M)
_TABLE = re.compile(r"(?:^\| .*\|\n)+\n", re.M)


def entries(page: str) -> list[str]:
    """Return the dotted names that a page documents.

    >>> entries("# Title\\n\\n::: jaxtrain.train_step\\n\\n::: jaxtrain.Loss\\n")
    ['jaxtrain.train_step', 'jaxtrain.Loss']
    """
    return _ENTRY.findall(page)


def resolve(name: str) -> Any:
    """Return the module or object with a dotted name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        return getattr(importlib.import_module(module), attribute)


def summary(name: str) -> str:
    """Return the first sentence of the documentation of a name.

    >>> summary("jaxtrain.UserError").endswith(".")
    True
    """
    documented = resolve(name)
    ours = inspect.ismodule(documented) or getattr(documented, "__module__", "").startswith(("jaxtrain", "parity"))
    text = inspect.getdoc(documented) or "" if ours and not _is_instance(documented) else _attribute_docstring(name)
    paragraph = " ".join(text.split("\n\n")[0].split())
    sentence = re.match(r".*?(?<!\bal)\.(?= |$)", paragraph)
    return (sentence[0] if sentence else paragraph).replace("|", "\\|")


def with_table(page: str) -> str:
    """Return a page with its table of summaries after the first paragraph."""
    names = entries(page)
    if not names:
        return page
    written = dict(
        re.findall(r"^\| \[`\w+`\]\(#([\w.]+)\) \| (.+) \|$", page, re.M)
    )  # retained for undocumented constants
    rows = [f"| [`{name.rpartition('.')[2]}`](#{name}) | {summary(name) or written.get(name, '')} |" for name in names]
    table = "\n".join(["| name | summary |", "| --- | --- |", *rows]) + "\n\n"
    title, introduction, rest = _TABLE.sub("", page, count=1).split("\n\n", 2)
    return f"{title}\n\n{introduction}\n\n{table}{rest}"


def _attribute_docstring(name: str) -> str:
    """Return the string below the assignment of a module's attribute."""
    module, _, attribute = name.rpartition(".")
    for loaded in [importlib.import_module(module), *(m for n, m in sys.modules.items() if n.startswith(f"{module}."))]:
        source = inspect.getsource(loaded)
        if found := re.search(rf'^{attribute}\b[^\n]*=[^\n]*\n"""(.*?)"""', source, re.M | re.S):
            return found[1]
    return ""


def _is_instance(documented: Any) -> bool:
    return not (inspect.ismodule(documented) or inspect.isclass(documented) or callable(documented))


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(with_table(path.read_text()))
