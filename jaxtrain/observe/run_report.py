"""Render report.html: one self-contained page about one run, or comparing several.

The curves are drawn by report.js, 20 kB, inlined in the page under a policy that forbids fetching and other scripts.
Inlined libraries would be larger than most reports: vega, vega-lite and vega-embed 0.83 MB, and vega compiles its
expressions by `new Function`; plotly.js-basic-dist-min 4.1.1 1.19 MB. Skips, rollbacks and references would still be
drawn by us.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from markupsafe import Markup

from jaxtrain.cost import format_bytes
from jaxtrain.folder_files import write_file
from jaxtrain.observe.charts import chart_data
from jaxtrain.observe.formatting import format_count, format_duration, metric_label, significant
from jaxtrain.observe.precision_figure import precision_figure, precision_table
from jaxtrain.observe.run_record import Record
from jaxtrain.observe.shown_media import shown_media
from jaxtrain.pages import Table, render_page
from jaxtrain.recipes import RECIPES

_SCRIPT = resources.files("jaxtrain.observe").joinpath("report.js").read_text(encoding="utf-8")


def write_report(path: Path, records: Sequence[Record]) -> None:
    """Write the page of one run, or of several to compare, atomically.

    Args:
      path: The HTML file.
      records: The runs.
    """
    write_file(path, render_report(records))


def render_report(records: Sequence[Record], *, live: bool = False) -> str:
    """Render the page as HTML: metrics, curves, media, samples, settings and environment. It fetches nothing.

    Args:
      records: The runs; at least one.
      live: Whether the page polls its server for a newer version.
    """
    first, one = records[0], len(records) == 1
    columns, settings = _settings(records)
    changed = [row for row in settings if len({*row[1:]}) > 1]
    environments = [_environment(record.config) for record in records]
    return render_page(
        "jaxtrain.observe",
        "report.html.j2",
        title=f"{first.name if one else f'{len(records)} runs'} — jaxtrain",
        script=_SCRIPT,
        live=live,
        records=records,
        numbers=[*_numbers(first)] if one else [],
        runs=_runs(records),
        data=chart_data(records),
        media=shown_media(records),
        precision_figure=precision_figure,
        precision_table=precision_table,
        worst_table=_worst_table,
        Table=Table,
        readable=lambda facts: {name.replace("_", " "): fact for name, fact in facts.items()},
        changed=Table(columns, changed, "settings that differ", wraps=True),
        settings=Table(columns, [_marked(row) if row in changed else row for row in settings], "settings", wraps=True),
        environment=Table([] if one else columns, _rows(environments), "environment", wraps=True),
    )


def _numbers(record: Record) -> Iterator[tuple[str, str, str]]:
    """Yield the headline numbers of a run as (label, value, note)."""
    if record.best:
        last = record.evaluations[-1]
        yield "best validation loss", significant(record.best.evaluation["loss"]), f"step {record.best.step:,}"
        if last.step != record.best.step:
            yield "last validation loss", significant(last.evaluation["loss"]), f"step {last.step:,}"
        for name, value in last.evaluation.items():
            if name != "loss" and value == value:  # not NaN
                yield f"validation {metric_label(name)}", significant(value), f"step {last.step:,}"
    for name, value in record.references.items():
        yield name, significant(value), "to be beaten"
    if record.throughput:
        yield f"{record.unit} per second", format_count(record.throughput), "median"
    if (end := record.clock[-1]).seconds:
        yield "training time", format_duration(end.seconds), f"{format_count(end.units)} {record.unit}, steps alone"
    if record.peak_memory:
        yield "peak memory", format_bytes(int(record.peak_memory)), ""
    if record.uses_loss_scale:
        yield "updates skipped", f"{record.skipped:,}", "inf or NaN"


def _runs(records: Sequence[Record]) -> Table:
    """The table of several runs: their headline numbers, and the boxes that show their curves."""
    box = Markup(
        '<label><input type="checkbox" data-run="{}" checked>'
        '<span class="color" style="background: var(--c{})"></span>{}</label>'
    )
    numbers = [{label: (value, note) for label, value, note in _numbers(record)} for record in records]
    labels = [*dict.fromkeys(label for found in numbers for label in found)]
    rows = []
    for i, (record, found) in enumerate(zip(records, numbers, strict=True)):
        cells = (found.get(label, ("—", "")) for label in labels)
        of = f" of {record.total_steps:,}" if record.total_steps else ""
        texts = [f"{value}, {note}" if note.startswith("step") else value for value, note in cells]
        rows.append([box.format(i, i % 8, record.name), f"{record.step:,}{of}", *texts])
    return Table(["run", "step", *labels], rows, "the runs", numbers=range(1, 2 + len(labels)))


def _worst_table(worst: Mapping[str, Any]) -> Table:
    rows = [
        (example["index"], "—" if example["loss"] is None else f"{example['loss']:.3g}", example["description"])
        for example in worst["examples"]
    ]
    return Table(("example", "loss", ""), rows, "worst examples", wraps=True)


def _settings(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """(heading, rows): the runs side by side, or one run beside the defaults of its recipe."""
    runs = [dict(record.config["settings"]) for record in records]
    recipe = RECIPES.get(records[0].config["recipe"])
    if len(records) == 1:
        return (
            ([], _rows(runs)) if recipe is None else (["", "this run", "recipe default"], _rows([*runs, vars(recipe)]))
        )
    recipes = [{"recipe": record.config["recipe"]} for record in records]
    names = ["", *(record.name for record in records)]
    return names, _rows([a | b for a, b in zip(recipes, runs, strict=True)])


def _environment(config: Mapping[str, Any]) -> dict[str, Any]:
    """The environment of a run, with nested mappings merged into it."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if name not in ("recipe", "settings", "earlier"):
            flat |= value if isinstance(value, Mapping) else {name: value}
    return flat


def _rows(columns: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A row for each name, with its value in each column."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [[name.replace("_", " "), *(_format(column, name) for column in columns)] for name in names]


def _marked(row: Sequence[str]) -> list[str]:
    return [row[0], *(Markup("<b>{}</b>").format(value) for value in row[1:])]


def _format(column: Mapping[str, Any], name: str) -> str:
    value = column.get(name)
    if name not in column or value is None:
        return "—"
    if isinstance(value, str | Path):
        return str(value)
    if isinstance(value, list):
        return (" " if name == "command" else ", ").join(map(str, value))
    return json.dumps(value)
