"""Links planted in a run folder at every name that a command reads or writes: nothing outside is written or shown."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from jaxtrain.cli import main
from jaxtrain.run_folder import RunFolder

TRAIN = "train digits-mlp --hidden 4 --batch-size 8 --quiet --save-every 2 --eval-every 2"
COMMANDS = {
    "report": "report {run}",
    "resume": TRAIN + " --resume --steps 6 --out {run}",
    "eval": "eval {run}",
    "export": "export {run} --out {other}/exported.pt",
    "replay": "replay {run} 2",
}
# Names that no one can know before: the temporary names of files, and those with the time.
UNKNOWN = re.compile(r"\.[0-9a-f]{8}\.partial$|tfevents|orbax-checkpoint-tmp|^checkpoints/6|^checkpoints/\d+\.partial")
_opened: list[str] = []
_is_recording = False


def _record(event: str, args: tuple) -> None:
    if _is_recording and event in ("open", "os.rename", "os.mkdir", "os.remove", "os.scandir", "os.listdir"):
        _opened.extend(os.fsdecode(arg) for arg in args if isinstance(arg, str | bytes | os.PathLike))


sys.addaudithook(_record)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A run of four steps, and the names that the commands use in it, by command."""
    global _is_recording
    place = tmp_path_factory.mktemp("original")
    run = place / "run"
    assert main([*TRAIN.split(), "--steps", "4", "--out", str(run)]) == 0
    assert main(["eval", str(run)]) == 0
    names: dict[str, set[str]] = {}
    for command in COMMANDS:
        copy = place / command / "run"
        shutil.copytree(run, copy)
        _opened.clear()
        _is_recording = True
        try:
            execute(command, copy, place / command)
        finally:
            _is_recording = False
        inside = (Path(path).relative_to(copy).as_posix() for path in _opened if Path(path).is_relative_to(copy))
        names[command] = {name for name in inside if name != "." and not UNKNOWN.search(name)}
    return run, names


def execute(command: str, run: Path, other: Path) -> int:
    return main(COMMANDS[command].format(run=run, other=other).split())


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def try_link(command: str, name: str, original: Path, place: Path) -> None:
    """Replace a name of a copied run by a link to outside, run a command, and compare what is outside."""
    run, outside = place / "run", place / "outside"
    shutil.copytree(original, run)
    outside.mkdir()
    target = outside / "target"
    if (run / name).is_dir():
        shutil.move(run / name, target)
    else:
        target.write_text("PRIVATE precious\n")
        (run / name).unlink(missing_ok=True)
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).symlink_to(target)
    before = tree(outside)
    assert execute(command, run, place) in (0, 1, 2), (command, name)
    assert tree(outside) == before, (command, name)
    pages = [path for path in run.rglob("*.html") if path.is_file() and not path.is_symlink()]
    assert not any("PRIVATE" in page.read_text() for page in pages), (command, name)


def test_the_names_are_known(original):
    _, names = original
    assert {"report.html", "config.json", "metrics.jsonl", "result.json", "eval"} <= names["report"]
    assert {"lock", "config.json", "metrics.jsonl", "checkpoints", "tensorboard", "report.html"} <= names["resume"]
    assert {"eval", "eval/step-4-validation.html", "checkpoints/4/manifest.json"} <= names["eval"]
    assert any(name.startswith("checkpoints/4/state/") for name in names["export"])


def test_a_report_follows_no_link(original, tmp_path, capsys):
    run, names = original
    for i, name in enumerate(sorted(names["report"] | {"report.partial", "eval/x.worst.json"})):
        try_link("report", name, run, tmp_path / str(i))
        assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["checkpoints", "metrics.superseded.jsonl", "lock", "tensorboard", "report.partial"])
def test_a_resumed_run_follows_no_link(name, original, tmp_path, capsys):
    try_link("resume", name, original[0], tmp_path)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_follows_a_link(command, original, tmp_path, capsys):
    run, names = original
    of_all = set().union(*names.values())
    written = {f"{name}.partial" for name in ("report", "config", "metrics", "result", "eval/step-4-validation.html")}
    extra = {"media", "replay", "replay/step-2.npz", "torch.pt", "metrics.superseded.jsonl", "profile", "recipe.py"}
    for i, name in enumerate(sorted(of_all | written | extra)):
        try_link(command, name, run, tmp_path / str(i))
        assert "Traceback" not in capsys.readouterr().err
        shutil.rmtree(tmp_path / str(i))


@pytest.mark.parametrize("name", ["lr[0.1]", "a*b? {é} 100%", "'\"$HOME"])
def test_a_path_with_any_characters_can_be_trained_in_and_resumed(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = RunFolder(Path(name, "run[1]"))
    assert main([*TRAIN.split(), "--steps", "2", "--out", str(run.path)]) == 0
    assert main([*TRAIN.split(), "--resume", "--steps", "4", "--out", str(run.path)]) == 0
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["0", "2", "4"]
