"""Copy repository files that a page links to, such as `../examples/maml.py`, to the site."""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent.parent
LINK = re.compile(r"(?<=\]\()(?:\.\./)+[\w./-]+(?=[)#])")


def on_files(files: Files, config: Any) -> Files:
    """Add the linked files to the site."""
    linked = {path for page in files.documentation_pages() for path in _outside(page).values()}
    for path in sorted(linked):
        files.append(File.generated(config, f"linked/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links to the copied files."""
    here = posixpath.dirname(page.file.src_uri)
    for link, path in _outside(page.file).items():
        markdown = markdown.replace(f"]({link}", f"]({posixpath.relpath(f'linked/{path}', here or '.')}")
    return markdown


def _outside(page: File) -> dict[str, str]:
    """Return the links of a page to files outside of docs/, with their paths in the repository."""

    def targets() -> Iterator[tuple[str, str]]:
        for link in LINK.findall(page.content_string):
            yield link, posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.src_uri), link))

    return {link: path for link, path in targets() if not path.startswith("docs/")}
