"""Generate the notebooks of the tutorials from their pages: `python -m docs.notebooks`.

A notebook has the text of its page, with each block as a cell:

| block | cell |
| --- | --- |
| `python` | its code |
| `python title="FILE"` | `%%writefile FILE` |
| `sh` | `%%sh -e`, which stops at the first failing command |
| `text`, the output of the preceding block | Markdown |
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat.notebooknode import NotebookNode

DOCS = Path(__file__).parent
PAGES = sorted((DOCS / "tutorials").glob("*.md"))
# Jupyter requests colored output, which rich mistakes for a terminal; this disables it.
_PLAIN = "%env TTY_COMPATIBLE=0"
_BLOCK = re.compile(r'^```(python|sh)(?: title="([^"]+)")?\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?', re.M | re.S)


@dataclass(frozen=True)
class Code:
    """A block that is executed: the `source` of its cell, and the `output` shown on the page."""

    source: str
    output: str


def parts(page: str) -> Iterator[str | Code]:
    """Yield the text and code of a page, in order.

    >>> page = "A number:\\n\\n```python\\nprint(7)\\n```\\n\\n```text\\n7\\n```\\n\\n```sh\\nls\\n```\\n"
    >>> list(parts(page))
    ['A number:', Code(source='print(7)', output='7'), '```text\\n7\\n```', Code(source='%%sh -e\\nls', output='')]
    """
    end = 0
    for block in _BLOCK.finditer(page):
        language, title, source, output = block.groups()
        if text := page[end : block.start()].strip():
            yield text
        magic = "%%sh -e\n" if language == "sh" else f"%%writefile {title}\n" if title else ""
        yield Code(magic + source.rstrip(), (output or "").rstrip())
        if output:
            yield f"```text\n{output.rstrip()}\n```"
        end = block.end()
    if text := page[end:].strip():
        yield text


def notebook(page: str) -> NotebookNode:
    """Return the notebook of a page, without outputs. Links to other tutorials become links to their notebooks."""
    cells = [nbformat.v4.new_code_cell(_PLAIN)]
    for part in parts(page):
        if isinstance(part, Code):
            cells.append(nbformat.v4.new_code_cell(part.source))
        else:
            cells.append(nbformat.v4.new_markdown_cell(re.sub(r"\]\((\w+)\.md\)", r"](\1.ipynb)", part)))
    for i, cell in enumerate(cells):
        cell["id"] = f"cell-{i}"  # nbformat's ids are random
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})


def path_of(page: Path) -> Path:
    """Return the path of the notebook of a page."""
    return DOCS / "notebooks" / f"{page.stem}.ipynb"


if __name__ == "__main__":
    for page in PAGES:
        path_of(page).write_text(nbformat.writes(notebook(page.read_text())) + "\n")
