"""Render report.html: one self-contained page about one run, or comparing several.

The curves are drawn by report.js, 23 kB, inlined in the page under a policy that forbids fetching and evaluating code.
Inlined libraries would be larger than most reports: vega, vega-lite and vega-embed 0.83 MB, and vega compiles its
expressions by `new Function`; plotly.js-basic-dist-min 4.1.1 1.19 MB. Skips, rollbacks and references would still be
drawn by us.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from jaxtrain.cost import format_bytes
from jaxtrain.folder_files import write_file
from jaxtrain.observe.charts import chart_data
from jaxtrain.observe.formatting import format_count, format_duration, metric_label, significant
from jaxtrain.observe.precision_figure import precision_figure, precision_table
from jaxtrain.observe.record import Record
from jaxtrain.observe.shown_media import shown_media
from jaxtrain.recipes import RECIPES

_PACKAGE = resources.files("jaxtrain.observe")


class Row(NamedTuple):
    """A setting and its value in each column of a table."""

    name: str
    values: Sequence[str]

    @property
    def differs(self) -> bool:
        """Whether the values are not all equal."""
        return len(set(self.values)) > 1


def write_report(path: Path, records: Sequence[Record]) -> None:
    """Write the page of one run, or of several to compare, atomically.

    Args:
      path: The HTML file.
      records: The runs.
    """
    write_file(path, render_report(records))


@functools.cache
def _template() -> jinja2.Template:
    return jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        _PACKAGE.joinpath("report.html.j2").read_text()
    )


def render_report(records: Sequence[Record], *, live: bool = False) -> str:
    """Render the page as HTML: metrics, curves, media, samples, settings and environment. It fetches nothing.

    Args:
      records: The runs; at least one.
      live: Whether the page polls its server for a newer version.
    """
    columns, settings = _settings(records)
    return _template().render(
        records=records,
        live=live,
        data=chart_data(records),
        media=shown_media(records),
        precision_figure=precision_figure,
        precision_table=precision_table,
        columns=columns,
        settings=settings,
        environment=_rows([_flatten(_environment(record.config)) for record in records]),
        script=_PACKAGE.joinpath("report.js").read_text(),
        style=_PACKAGE.joinpath("report.css").read_text(),
        format_count=format_count,
        memory=format_bytes,
        format_duration=format_duration,
        metric_label=metric_label,
        significant=significant,
    )


def _settings(records: Sequence[Record]) -> tuple[list[str], list[Row]]:
    """(columns, rows): the runs side by side, or one run beside the defaults of its recipe."""
    runs = [dict(record.config["settings"]) for record in records]
    names = [record.name for record in records]
    recipe = RECIPES.get(records[0].config["recipe"])
    if len(records) == 1 and recipe is not None:
        return ["this run", "recipe default"], _rows([*runs, vars(recipe)])
    recipes = [{"recipe": record.config["recipe"]} for record in records]
    return names, _rows([a | b for a, b in zip(recipes, runs, strict=True)])


def _environment(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in ("recipe", "settings", "earlier")}


def _flatten(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping with nested mappings merged into it."""
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        flat |= value if isinstance(value, Mapping) else {name: value}
    return flat


def _rows(columns: Sequence[Mapping[str, Any]]) -> list[Row]:
    names = dict.fromkeys(name for column in columns for name in column)
    return [Row(name.replace("_", " "), [_format(column, name) for column in columns]) for name in names]


def _format(column: Mapping[str, Any], name: str) -> str:
    value = column.get(name)
    if name not in column or value is None:
        return "—"
    if isinstance(value, str | Path):
        return str(value)
    if isinstance(value, list):
        return (" " if name == "command" else ", ").join(map(str, value))
    return json.dumps(value)
