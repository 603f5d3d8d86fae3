"""The results as a page of Markdown: a table for each kind of result."""

from collections.abc import Mapping, Sequence
from typing import Any


def summary(results: Sequence[Mapping[str, Any]], titles: Mapping[int, str]) -> str:
    """Return the page.

    Args:
      results: The results, each with its part; of a part that ran twice, the second run's are shown.
      titles: Titles of the parts.
    """
    machine = [x for x in results if x["what"] == "environment"]
    lines = ["# What a GPU answered", "", "Figures are measured, but for those called predicted.", ""]
    if any(x["rehearsal"] for x in machine):
        lines += ["**A rehearsal on a CPU: the figures mean nothing.**", ""]
    for x in machine[:1]:
        lines += [f"- {name}: {value}" for name, value in x.items() if name not in ("what", "part")] + [""]
    for number, title in titles.items():
        of_part = [x for x in results if x["part"] == number]
        starts = [i for i, x in enumerate(of_part) if x["what"] == "start"]
        of_part = of_part[starts[-1] :] if starts else []
        for kind in dict.fromkeys(x["what"] for x in of_part):
            rows = [{k: v for k, v in x.items() if k not in ("what", "part")} for x in of_part if x["what"] == kind]
            if kind == "end":
                lines += [f"{row['outcome']}, {row['seconds']:.0f} s" for row in rows] + [""]
            else:
                lines += [] if kind == "start" else [f"### {kind}", "", *_table(rows), ""]
            if kind == "start":
                lines += [f"## {number}. {title}", ""]
    return "\n".join(lines).rstrip() + "\n"


_HIDDEN = ("accumulate", "remat", "device", "min_s", "upper_decile_s", "cpu_s")
"""Figures that results.jsonl alone has."""


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return rows as a table without columns that say nothing."""
    names = dict.fromkeys(name for row in rows for name in row)
    said = [name for name in names if any(row.get(name) not in (None, "", [], {}) for row in rows)]
    columns = [name for name in said if name not in _HIDDEN]
    return [
        f"| {' | '.join(columns)} |",
        f"|{' --- |' * len(columns)}",
        *(f"| {' | '.join(_cell(row.get(name)) for name in columns)} |" for row in rows),
    ]


def _cell(x: Any) -> str:
    """Format a value.

    >>> _cell(0.123456), _cell(16384), _cell([1.5, 2.25]), _cell(None), _cell(True), _cell({"bf16": 3})
    ('0.1235', '16,384', '1.5, 2.25', '', 'yes', 'bf16: 3')
    """
    match x:
        case None:
            return ""
        case bool():
            return "yes" if x else "no"
        case int():
            return f"{x:,}"
        case float():
            return f"{x:,.0f}" if abs(x) >= 10_000 else f"{x:.4g}"
        case list():
            shown = [*map(_cell, x)]
            return ", ".join(shown if len(shown) <= 8 else [*shown[:4], "…", *shown[-3:]])
        case dict():
            return ", ".join(f"{name}: {_cell(value)}" for name, value in x.items())
    return str(x).replace("|", "\\|").replace("\n", " ")
