"""JSON Lines and JSON files as sources of objects."""

import bz2
import gzip
import lzma
import pickle
from pathlib import Path

import pytest

from jaxtrain.data import JsonArray, JsonLines, json_rows
from jaxtrain.errors import UserError


def test_lines_are_read_in_any_order_across_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"i": 0}\r\n\n  \n{"i": "\xc3\xa9\xe2\x80\xa8"}\n')
    (tmp_path / "b.jsonl").write_bytes(b'\n{"i": [2, {"x": null}]}')
    rows = json_rows([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    assert isinstance(rows, JsonLines)
    for source in (rows, pickle.loads(pickle.dumps(rows))):
        assert [source[i]["i"] for i in (2, 0, 1)] == [[2, {"x": None}], 0, "é\u2028"]
        assert len(source) == 3
    assert [rows.location(i).rpartition("/")[2] for i in range(3)] == [
        "a.jsonl, line 1",
        "a.jsonl, line 4",
        "b.jsonl, line 2",
    ]
    for outside in (-1, 3):
        with pytest.raises(IndexError):
            rows[outside]


def test_an_array_is_read_from_one_file(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('\n [{"i": 0},\n {"i": 1}, 3]')
    rows = json_rows([file])
    assert isinstance(rows, JsonArray)
    assert [pickle.loads(pickle.dumps(rows))[i] for i in (1, 0)] == [{"i": 1}, {"i": 0}]
    with pytest.raises(UserError, match=r"a\.json, item 3 is a int: write an array of objects"):
        rows[2]
    with pytest.raises(UserError, match="is an array, one of 2 files: write JSON Lines"):
        json_rows([file, file])
    file.write_text("[1, ")
    with pytest.raises(UserError, match=r"a\.json is not valid JSON \(Expecting value.*\): write an array of objects"):
        json_rows([file])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            b'{"text": "a}',
            r"line 2 is not valid JSON \(Unterminated .* at: column 10\): write one JSON object per line",
        ),
        (b'{"text": NaN}', r"line 2 is not valid JSON \(NaN is not a JSON number\)"),
        (b'{"text": "\xff"}', r"line 2 is not UTF-8 \(byte 0xff at 10\): convert it, as by iconv -f latin1 -t utf-8"),
        (b"[" * 100_000, "line 2 is not valid JSON"),
        (
            b'{"a": {"text": "1", "b": 2, "text": "3"}}',
            "line 2 is not valid JSON .the name 'text' occurs twice in an object",
        ),
        (b'"text"', "line 2 is a str, not an object: write one JSON object per line"),
    ],
)
def test_a_malformed_line_is_named(line: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "ok"}\n' + line + b"\n")
    rows = JsonLines([tmp_path / "a.jsonl"])
    assert rows[0] == {"text": "ok"}
    with pytest.raises(UserError, match=message) as raised:
        rows[1]
    assert str(raised.value).startswith(str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "é"}'.encode("utf-16"), r"line 1 is not UTF-8 .*: convert it, as by iconv -f utf-16 -t utf-8$"),
        (gzip.compress(b'{"text": "a"}'), "line 1 is compressed: unpack it, as by gunzip$"),
        (bz2.compress(b'{"text": "a"}'), "line 1 is compressed: unpack it, as by bunzip2$"),
        (lzma.compress(b'{"text": "a"}'), "line 1 is compressed: unpack it, as by unxz$"),
    ],
    # gzip writes the time: two processes would collect tests of other names.
    ids=["utf-16", "gzip", "bzip2", "xz"],
)
def test_other_encodings_are_named(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=message):
        json_rows([tmp_path / "a.jsonl"])[0]
