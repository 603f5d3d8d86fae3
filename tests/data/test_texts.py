"""Built-in texts: written dates, and statements of Python's standard library."""

import argparse
import ast
import typing
from datetime import date, datetime
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.data import IndexedSource, MappedSource, subsample
from jaxtrain.data.text.dates import FIRST, FORMATS, LAST, Dates, dates
from jaxtrain.data.text.python_statements import KEYWORDS, python_statements, statements

PROGRAM = '''class A(Base, metaclass=Meta):
    """if it is text,
    return nothing"""

    async def f(self, é): return é  # a remark
    @decorated
    def g(self):
        for x in y:
            if x: raise ValueError(x)
            elif y:
                with open(x) as file: pass
        text = f"""
return {x}
"""
        try: from a import b
        except (A, B): assert text, "text"
        except:
            returned = 1
'''


def test_written_dates_are_parsed_by_strptime() -> None:
    """This covers the formats for which strptime has directives."""
    directives = {
        0: "%A, %d %B %Y", 1: "%a %b %d %Y", 2: "%B %d, %Y", 6: "%d.%m.%y", 7: "%m/%d/%y", 8: "%b %d '%y", 9: "%d%b%Y"
    }  # fmt: skip
    all_dates = Dates(np.arange(FIRST.toordinal(), LAST.toordinal() + 1))
    for index in range(0, len(all_dates), 997):
        for number, directive in directives.items():
            pair = all_dates[index - index % len(FORMATS) + number]
            assert datetime.strptime(pair["source"], directive).date().isoformat() == pair["target"]


@pytest.mark.parametrize(
    ("day", "ordinal"), [(1, "1st"), (2, "2nd"), (3, "3rd"), (11, "11th"), (22, "22nd"), (30, "30th")]
)
def test_date_formats_without_a_strptime_directive(day: int, ordinal: str) -> None:
    written = [write(date(2026, 11, day)) for write in FORMATS]
    assert written[3:6] == [f"the {ordinal} of November 2026", f"NOVEMBER 2026, {ordinal}", f"{day}. XI. 2026"]


def test_no_text_stands_for_two_different_days() -> None:
    all_dates = Dates(np.arange(FIRST.toordinal(), LAST.toordinal() + 1, 3))
    written: dict[str, str] = {}
    for i in range(len(all_dates)):
        assert written.setdefault(all_dates[i]["source"], all_dates[i]["target"]) == all_dates[i]["target"]


def test_a_day_held_out_is_never_trained_on() -> None:
    train, validation = dates()
    assert not set(train.days) & set(validation.days)
    assert len(train.days) + len(validation.days) == (LAST - FIRST).days + 1
    for outside in (-1, len(train)):
        with pytest.raises(IndexError):
            train[outside]


def test_statements_are_extracted_as_parsed() -> None:
    assert list(statements(PROGRAM)) == [
        ("class", "A(Base, metaclass=Meta):"),
        ("return", "é  # a remark"),
        ("def", "g(self):"),
        ("for", "x in y:"),
        ("if", "x: raise ValueError(x)"),
        ("raise", "ValueError(x)"),
        ("with", "open(x) as file: pass"),
        ("from", "a import b"),
        ("except", '(A, B): assert text, "text"'),
        ("assert", 'text, "text"'),
    ]


def test_every_keyword_has_examples_in_the_standard_library() -> None:
    train, validation = python_statements([Path(argparse.__file__), Path(typing.__file__)], [Path(ast.__file__)])
    assert {train[i]["label"] for i in range(len(train))} == set(KEYWORDS)
    assert {validation[i]["label"] for i in range(len(validation))} <= set(KEYWORDS)


def test_duplicate_lines_are_removed_within_and_across_splits(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / name).write_text(f"if in_every_file: pass\nif only_in_{name}: pass\nreturned = 1\nif short: x\n")
    (tmp_path / "broken").write_text("def f(:\n")
    (tmp_path / "latin").write_bytes(b"if caf\xe9_in_latin: pass\n")
    files = [tmp_path / name for name in ("one", "two", "broken", "latin", "three")]
    train, validation = python_statements(files[:4], files[4:])
    assert [text for _, text in train.lines] == [
        "in_every_file: pass",
        "only_in_one: pass",
        "short: x",
        "only_in_two: pass",
    ]
    assert [text for _, text in validation.lines] == ["only_in_three: pass"]


def test_wrapped_sources_keep_indices_and_bounds() -> None:
    labels = [{"label": i} for i in range(20)]
    few = subsample(labels, 5)
    numbers = [few[i]["label"] for i in range(len(few))]
    assert numbers == sorted(set(numbers))
    assert len(numbers) == 5
    assert subsample(labels, 20) is labels
    assert IndexedSource(few)[2] == {"label": numbers[2], "index": 2}
    for source in (few, MappedSource(labels, dict)):
        for outside in (-1, len(source)):
            with pytest.raises(IndexError):
                source[outside]
