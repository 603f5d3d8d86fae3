"""The form of messages: flags on the command line, arguments in Python, no repr of an exception, one line."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import benchmarks.cli
import jaxtrain
import parity.cli
from jaxtrain.cli import main
from jaxtrain.errors import in_python
from tests.cli.curve import CURVE, run, train_curve

ROOT = Path(__file__).parents[2]
SOURCES = [path for program in ("jaxtrain", "parity", "benchmarks") for path in sorted((ROOT / program).rglob("*.py"))]
FLAG = re.compile(r"(?<![\w=-])--[a-z]")

pytestmark = pytest.mark.usefixtures("broadcasting")


def texts(path):
    """Yield the texts of a source file but for docstrings, with X for what is formatted into them."""
    tree = ast.parse(path.read_text())
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not {id(node)} & (inner | docs):
            yield node.value


def test_no_message_formats_an_exception_as_python_writes_it():
    """`{error!r}` and `repr(error)` print JSONDecodeError('Expecting value: …')."""
    found = []
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and node.name} | {"error"}
        for node in ast.walk(tree):
            is_repr = isinstance(node, ast.FormattedValue) and node.conversion == ord("r")
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "repr"
            value = node.value if is_repr else node.args[0] if is_call else None
            if isinstance(value, ast.Name) and value.id in names:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found


def test_a_message_in_python_names_no_flag():
    """Of every text in the packages that a run uses, in the words of Python only commands of a shell have flags."""
    commands = re.compile(r"(?:jaxtrain|parity|python|pip|docker|nvidia-smi) [^;,()]*|XLA_FLAGS=\S*|`[^`]*`")
    checked = 0
    for path in SOURCES:
        parts = path.relative_to(ROOT).parts
        if parts[0] == "jaxtrain" and parts[1] not in ("cli", "errors.py", "cpu", "debug"):
            for text in texts(path):
                if FLAG.search(text) and " " in text.strip():
                    checked += 1
                    assert not FLAG.search(commands.sub("", in_python(text))), (path, text)
    assert checked > 40


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("with a lower --lr or another --precision", "with a lower lr or another precision"),
        ("use --no-packing", "use packing=False"),
        ("continue training with --resume --steps N", "continue training with resume=True, steps=N"),
        ("continue with --resume auto", "continue with resume='auto'"),
        ("try the same with --accumulate 2 --remat full", "try the same with accumulate=2, remat='full'"),
        (
            "as with --loss-scale 'dynamic_loss_scale(init_scale=2.0)'",
            "as with loss_scale='dynamic_loss_scale(init_scale=2.0)'",
        ),
        ("--lr 0.1 differs from the run's 0.2: a", "lr=0.1 differs from the run's 0.2: a"),
        ("--seq-len 128 or less; --data FILE", "seq_len=128 or less; data=FILE"),
        ("set XLA_FLAGS=--xla_dump_to=x", "set XLA_FLAGS=--xla_dump_to=x"),
        (
            "jaxtrain replay runs/a --debug 3 shows it; lower --lr",
            "jaxtrain replay runs/a --debug 3 shows it; lower lr",
        ),
    ],
)
def test_flags_in_python(message, expected):
    assert in_python(message) == expected


@pytest.mark.parametrize(
    ("program", "name"), [(main, "jaxtrain"), (parity.cli.main, "parity"), (benchmarks.cli.main, "benchmarks")]
)
def test_the_version(program, name, capsys):
    try:
        status = program(["--version"])
    except SystemExit as stop:
        status = stop.code
    assert status in (0, None)
    out = capsys.readouterr().out.split()
    assert (out[0], out[-1]) == (name, jaxtrain.__version__)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folder that holds curve.py and its run."""
    return train_curve(tmp_path_factory.mktemp("own"), CURVE)


NOTHING, TEXT, LATIN = b"", b"no JSON at all", '{"recipe": "é"}'.encode("latin-1")
BROKEN = [
    NOTHING,
    TEXT,
    LATIN,
    b"[1, 2]",
    b"null",
    b"{}",
    b'{"recipe": "x"',
    b"[" * 20000,
    b'{"recipe": 3, "settings": 4}',
]
READERS = {
    "config.json": [
        "train --resume --out here", "train --from here/config.json --out other", "eval here", "sample here",
        "report here", "replay here 3", "profile here", "export here --format torch",
    ],
    "metrics.jsonl": ["report here"],
    "result.json": ["report here"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "command", "content"),
    [(name, command, i) for i in range(len(BROKEN)) for name in READERS for command in READERS[name]],
)
def test_a_broken_file_is_reported_in_words(name, command, content, trained, capsys):
    shutil.copytree(trained / "run", "here")
    Path("here", name).write_bytes(BROKEN[content] + (b"\n" if name.endswith("jsonl") else b""))
    status = run(command)
    error = capsys.readouterr().err
    if status == 0:
        assert name != "config.json"  # the empty file and null are no wrong metrics
        return
    (line,) = error.splitlines()
    assert status in (1, 2)
    assert not re.search(r"\b\w*(Error|Exception)\(", line), line
    assert "here" in line


def test_a_file_that_is_missing_is_reported_in_words(trained, capsys):
    shutil.copytree(trained / "run", "here")
    Path("here/config.json").unlink()
    for command in READERS["config.json"][2:4]:
        assert run(command) == 2
        assert "holds no run" in capsys.readouterr().err


def test_an_empty_out_is_refused(capsys):
    for flags in (["--out", ""], ["--out="]):
        assert main(["train", "digits-mlp", *flags]) == 2
        assert capsys.readouterr().err == "jaxtrain: --out is empty: give it a value, or leave it out\n"
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "report.html", "recipe.py", "result.json", "tensorboard/events", "media/a.png"]
)
def test_files_of_others_are_not_overwritten(name, capsys):
    mine = Path("folder", name)
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    assert run("train digits-mlp --steps 1 --out folder") == 2
    error = capsys.readouterr().err
    assert f"folder/{name.partition('/')[0]} exists, and a run would write to it: move it" in error
    assert mine.read_text() == "mine"


def test_numbers_in_another_form_are_proposed(capsys):
    assert run("train digits-mlp --steps 1e3") == 2
    assert "--steps must be an integer, got '1e3': use 1000; see" in capsys.readouterr().err


def test_a_mesh_of_more_devices_than_there_are_is_refused_as_such(capsys):
    assert run("train digits-mlp --mesh data=64 --out run") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "mesh 'data=64' has 64 devices, got " in line


def test_an_import_that_fails_is_named_with_its_line(capsys):
    Path("mine.py").write_text("import jaxtrain\nimport nosuchmodule\n")
    assert run("train mine.py::Mine") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("mine.py:2: No module named 'nosuchmodule': install nosuchmodule, or correct the name")
    Path("named.py").write_text("from jaxtrain import Recepie\n")
    assert run("train named.py::Mine") == 2
    assert "named.py:1: cannot import name 'Recepie' from 'jaxtrain'" in capsys.readouterr().err


def test_the_remedy_for_a_folder_without_a_run_names_the_recipe(capsys):
    Path("curve.py").write_text(CURVE)
    assert run("train curve.py::Curve --resume --out typo") == 2
    error = "jaxtrain: typo holds no run: start one with jaxtrain train {} --out typo\n"
    assert capsys.readouterr().err == error.format("curve.py::Curve")
    assert run("train --resume --out typo") == 2
    assert capsys.readouterr().err == error.format("RECIPE")


def test_resuming_without_a_checkpoint_is_refused_before_the_data_are_read(trained, capsys):
    shutil.copytree(trained / "run", "here")
    shutil.rmtree("here/checkpoints")
    assert run("train --resume --out here") == 2
    captured = capsys.readouterr()
    announced, message = captured.err.splitlines()
    assert announced == f"jaxtrain: running {(trained / 'curve.py').resolve()}"
    assert message == "jaxtrain: here has no checkpoint: start it again with --resume auto"
    assert "reading the data" not in captured.out


SCRIPT = """
import jaxtrain as jt

def mine():
    jt.fit(3)

mine()
"""


def test_an_error_of_a_script_ends_with_its_line():
    Path("script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True)
    lines = [line for line in done.stderr.splitlines() if not line.startswith(("E1", "W1"))]
    assert lines[-1].startswith("jaxtrain.errors.UserError: recipe must be a jaxtrain.Recipe, got int")
    where = [line for line in lines if line.strip().startswith("File ")]
    assert where[-1].strip().startswith(f'File "{Path("script.py").resolve()}", line 5, in mine')
