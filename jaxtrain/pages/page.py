"""Pages: one base template with one style sheet; a page is a file that loads nothing and runs only its own script."""

import base64
import functools
import hashlib
from importlib import resources
from typing import Any

import jinja2

_FILES = resources.files("jaxtrain.pages")
PALETTE = _FILES.joinpath("palette.css").read_text(encoding="utf-8")
"""The colors, light and dark."""
STYLES = _FILES.joinpath("chart.css").read_text(encoding="utf-8")
"""The styles of charts."""
READOUT = _FILES.joinpath("readout.js").read_text(encoding="utf-8")
"""A script that shows the text of what is pointed at in a chart below it; without it, tooltips show it."""


def render_page(package: str, template: str, *, title: str, script: str = "", live: bool = False, **values: Any) -> str:
    """Render a page. Its texts are escaped, and the browser runs no other script than the given one.

    Args:
      package: The package that has the template.
      template: Name of the template, which extends `page.html.j2` by its block `content`.
      title: Title of the window.
      script: The script; none by default.
      live: Whether the script may ask the page's own server.
      values: Values of the template.
    """
    return _template(package, template).render(
        **values,
        title=title,
        live=live,
        style=PALETTE + STYLES + _FILES.joinpath("page.css").read_text(encoding="utf-8"),
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


@functools.cache
def macros() -> Any:
    """Return the macros of parts of a page: `figure`, `svg`, `table`, `tiles` and `facts`."""
    return _environment().get_template("parts.html.j2").module


@functools.cache
def _template(package: str, name: str) -> jinja2.Template:
    return _environment().from_string(resources.files(package).joinpath(name).read_text(encoding="utf-8"))


@functools.cache
def _environment() -> jinja2.Environment:
    # The own templates by a function, since those of a zip file have no path.
    loader = jinja2.FunctionLoader(lambda name: _FILES.joinpath(name).read_text(encoding="utf-8"))
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, loader=loader)
    environment.filters["percent"] = lambda share: f"{100 * share:.3f}".rstrip("0").rstrip(".") + "%"
    return environment
