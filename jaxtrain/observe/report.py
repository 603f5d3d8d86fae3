"""report.html: one self-contained page about a run, or about several beside each other."""

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from jaxtrain.cost import shown_bytes
from jaxtrain.observe.charts import chart_data
from jaxtrain.observe.formatting import format_count, format_duration
from jaxtrain.observe.record import Record
from jaxtrain.recipes import RECIPES

_PACKAGE = resources.files("jaxtrain.observe")


class Row(NamedTuple):
    """A setting, and its value in each column of a table."""

    name: str
    values: Sequence[str]

    @property
    def differs(self) -> bool:
        """Whether the columns are not all the same."""
        return len(set(self.values)) > 1


def write_report(path: Path, records: Sequence[Record]) -> None:
    """Write the page, whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(render_report(records), encoding="utf-8")
    partial.replace(path)


def render_report(records: Sequence[Record], *, live: bool = False) -> str:
    """The page as HTML: its figures, curves, samples, settings and environment. It fetches nothing.

    `live`: whether the page is to ask whoever serves it for a newer one, every few seconds.
    """
    template = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        _PACKAGE.joinpath("report.html.j2").read_text()
    )
    columns, settings = _settings(records)
    return template.render(
        records=records,
        live=live,
        data=chart_data(records),
        columns=columns,
        settings=settings,
        environment=_rows([_flat(_environment(record.config)) for record in records]),
        script=_PACKAGE.joinpath("report.js").read_text(),
        style=_PACKAGE.joinpath("report.css").read_text(),
        format_count=format_count,
        memory=shown_bytes,
        format_duration=format_duration,
    )


def _settings(records: Sequence[Record]) -> tuple[list[str], list[Row]]:
    """(the columns, the rows): the runs beside each other, or the one run beside its recipe as it comes."""
    runs = [dict(record.config["settings"]) for record in records]
    names = [record.name for record in records]
    recipe = RECIPES.get(records[0].config["recipe"])
    if len(records) == 1 and recipe is not None:
        return ["this run", "the recipe's own"], _rows([*runs, vars(recipe)])
    recipes = [{"recipe": record.config["recipe"]} for record in records]
    return names, _rows([a | b for a, b in zip(recipes, runs, strict=True)])


def _environment(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in ("recipe", "settings")}


def _flat(of: Mapping[str, Any]) -> dict[str, Any]:
    """The mappings in a mapping opened."""
    flat: dict[str, Any] = {}
    for name, value in of.items():
        flat |= value if isinstance(value, Mapping) else {name: value}
    return flat


def _rows(columns: Sequence[Mapping[str, Any]]) -> list[Row]:
    names = dict.fromkeys(name for column in columns for name in column)
    return [Row(name.replace("_", " "), [_said(column, name) for column in columns]) for name in names]


def _said(of: Mapping[str, Any], name: str) -> str:
    value = of.get(name)
    if name not in of or value is None:
        return "—"
    if isinstance(value, str | Path):
        return str(value)
    if isinstance(value, list):
        return (" " if name == "command" else ", ").join(map(str, value))
    return json.dumps(value)
