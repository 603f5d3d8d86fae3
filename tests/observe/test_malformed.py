"""Whatever the files of a run contain, a report is a page or an error of one line that names a file."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxtrain.errors import UserError
from jaxtrain.observe import read_record, render_report, write_report
from jaxtrain.run_folder import RunFolder
from jaxtrain.step import Magnitudes
from tests.fuzz.importers import bounded
from tests.fuzz.mutations import NASTY, mutated_tree
from tests.observe.runs import CONFIG, line

LINE = line(20) | {"media": {"answers": ["t.json"], "digit": ["a.txt"]}, "mine": 3}
ROLLBACK = {
    "step": 30,
    "rolled_back_from": 40,
    "rolled_back_to": 20,
    "spike_loss": 9.0,
    "batches_skipped": 2,
    "lr/a": 1,
}
KINDS = ("activations", "activation_gradients", "weights", "weight_gradients")
MAGNITUDES = dict.fromkeys(KINDS, [2**40] * len(Magnitudes("float16", ()).edges))
PRECISION = {"dtype": "float16", "gradient_dtype": "float16", "loss_scale": 8.0, "layers": {"model": MAGNITUDES}}
FILES = {
    "config.json": CONFIG | {"source": {"file": "x.py", "sha256": "0"}, "git_commit": None, "earlier": [CONFIG]},
    "metrics.jsonl": [line(10), LINE, ROLLBACK, {"step": 40, "precision": PRECISION}],
    "result.json": {"step": 40, "references": {"unigram": 2.3}, "sample": "a text"},
    "eval/step-40-validation.worst.json": {
        "step": 40,
        "split": "validation",
        "examples": [{"index": 3, "loss": 2.5, "description": "3 as 5", "picture": None}],
    },
    "media/t.json": {"columns": ["prompt", "answer"], "data": [["2 + 2", 4.0], [None, True]]},
}
EXTREME = st.sampled_from(
    [
        10**400,
        -(10**400),
        2**63,
        2**64,
        -(2**63),
        1e308,
        -1e308,
        float("nan"),
        float("inf"),
        "\ud800",
        "\x1b]0;x\x07",
        0,
        1,
    ]
)


def write(run: Path, changed: dict[str, bytes]) -> None:
    for name, content in FILES.items():
        (run / name).parent.mkdir(exist_ok=True)
        text = json.dumps(content)
        if name.endswith("jsonl"):
            text = "".join(f"{json.dumps(one)}\n" for one in content)
        (run / name).write_bytes(changed.get(name, text.encode()))
    (run / "media" / "a.txt").write_text("a text")


def check(run: Path) -> str | None:
    """Return the page; None if the run was refused in one line that names a file."""
    try:
        record = read_record(RunFolder(run))
        write_report(run / "report.html", [record])
        return render_report([record, record])
    except UserError as error:
        message = str(error)
    assert str(run) in message
    assert "\n" not in message
    assert "Error(" not in message
    return None


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_json_is_shown_or_refused(name, data):
    changed = data.draw(mutated_tree(FILES[name], NASTY | EXTREME))
    lines = isinstance(changed, list) and name.endswith("jsonl")
    text = "".join(f"{json.dumps(one)}\n" for one in changed) if lines else json.dumps(changed)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), {name: text.encode() + b"\n"})
        check(Path(folder))


def test_the_files_are_shown_when_they_are_as_a_run_writes_them(tmp_path):
    write(tmp_path, {})
    page = check(tmp_path)
    assert page is not None
    for part in ("unigram", "a text", "3 as 5", "2 + 2"):
        assert part in page


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe\n", b"null\n", b"[]\n", b"5\n", b"[" * 10**5 + b"\n", b'{"a":' * 10**5 + b"\n", b"\0" * 99],
    ids=["empty", "cut", "bytes", "null", "list", "number", "nested", "nested objects", "zeros"],
)
def test_damaged_files_are_shown_or_refused(name, content, tmp_path):
    write(tmp_path, {name: content})
    check(tmp_path)


@pytest.mark.parametrize("name", [*FILES, "media/a.txt"])
@pytest.mark.parametrize("kind", ["link", "FIFO", "device", "sparse"])
def test_no_file_outside_is_shown_and_none_is_waited_for(name, kind, tmp_path):
    run, secret = tmp_path / "run", tmp_path / "secret"
    run.mkdir()
    secret.write_text('{"step": 1, "secret": "PRIVATE"}\n')
    write(run, {})
    (run / name).unlink()
    match kind:
        case "link":
            (run / name).symlink_to(secret)
        case "FIFO":
            os.mkfifo(run / name)
        case "device":
            (run / name).symlink_to("/dev/zero")
        case "sparse":
            with (run / name).open("wb") as file:
                file.truncate(3 * 2**30)
    with bounded():
        page = check(run)
    assert page is None or "PRIVATE" not in page


@pytest.mark.parametrize(("folder", "content"), [("media", "2 + 2"), ("eval", "3 as 5")])
def test_no_folder_outside_is_shown(folder, content, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    write(run, {})
    shutil.move(run / folder, tmp_path / folder)
    (run / folder).symlink_to(tmp_path / folder)
    page = check(run)
    assert page is None or content not in page
