"""The notebooks of the tutorials, made from their pages.

    python docs/notebooks.py

A page is what is written; its notebook is the same text, with its blocks as cells:

| block | cell |
| --- | --- |
| `python` | its code |
| `python title="FILE"` | `%%writefile FILE` |
| `sh` | `%%sh -e`, which stops at a command that fails |
| `text`, what the block before it prints | stays text |
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat.notebooknode import NotebookNode

DOCS = Path(__file__).parent
PAGES = sorted((DOCS / "tutorials").glob("*.md"))
# Jupyter asks all programs for colours, which rich takes for a terminal: this is its way to say that there is none.
_PLAIN = "%env TTY_COMPATIBLE=0"
_BLOCK = re.compile(r'^```(python|sh)(?: title="([^"]+)")?\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?', re.M | re.S)


@dataclass(frozen=True)
class Code:
    """A block of a page that is run: `source` of a cell, and of its output what the page shows."""

    source: str
    shown: str


def parts(page: str) -> Iterator[str | Code]:
    """A page's text and code, in order.

    >>> page = "Say it:\\n\\n```python\\nprint(7)\\n```\\n\\n```text\\n7\\n```\\n\\n```sh\\nls\\n```\\n"
    >>> list(parts(page))
    ['Say it:', Code(source='print(7)', shown='7'), '```text\\n7\\n```', Code(source='%%sh -e\\nls', shown='')]
    """
    end = 0
    for block in _BLOCK.finditer(page):
        language, title, source, shown = block.groups()
        if text := page[end : block.start()].strip():
            yield text
        magic = "%%sh -e\n" if language == "sh" else f"%%writefile {title}\n" if title else ""
        yield Code(magic + source.rstrip(), (shown or "").rstrip())
        if shown:
            yield f"```text\n{shown.rstrip()}\n```"
        end = block.end()
    if text := page[end:].strip():
        yield text


def notebook(page: str) -> NotebookNode:
    """The notebook of a page, not yet run. Links to other tutorials lead to their notebooks."""
    cells = [nbformat.v4.new_code_cell(_PLAIN)]
    for part in parts(page):
        if isinstance(part, Code):
            cells.append(nbformat.v4.new_code_cell(part.source))
        else:
            cells.append(nbformat.v4.new_markdown_cell(re.sub(r"\]\((\w+)\.md\)", r"](\1.ipynb)", part)))
    for i, cell in enumerate(cells):
        cell["id"] = f"cell-{i}"  # nbformat's own are random
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})


def path_of(page: Path) -> Path:
    """Where the notebook of a page is kept."""
    return DOCS / "notebooks" / f"{page.stem}.ipynb"


if __name__ == "__main__":
    for page in PAGES:
        path_of(page).write_text(nbformat.writes(notebook(page.read_text())) + "\n")
