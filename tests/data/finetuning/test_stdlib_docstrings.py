"""Pairs of questions and documentation: what is held out is in no other module, and the files decide every byte."""

import hashlib
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from jaxtrain.cli import main
from jaxtrain.data import stdlib_files
from jaxtrain.data.finetuning import read_examples, split_examples, stdlib_pairs
from jaxtrain.data.finetuning.stdlib_docstrings import MAX_BYTES, split_pairs
from jaxtrain.data.text.text_files import split_files

SHAPES = '''"""Geometry of plane shapes: areas and lengths."""

def area(radius: float, *, unit="m") -> float:
    """Return the area
    of a circle.  It is positive. %s

    Not part of the answer.
    """
    def nested():
        """Return what nobody calls."""

async def _length(): "Return the length of a circle."

def area(radius: float, *, unit="m") -> float: "Return the area once more."

def todo(): "Not yet."

def empty(): """ """

def example(): ">>> area(1.0) and so on"

class Square:
    """A square with sides."""
    class Side:
        def length(self, /, x=(1, 2)): "Return its length in meters."
''' % ("A" + " long" * 50)
HELD_OUT = '''"""Return the area of a circle. It is positive."""

class Square: "A square with sides."

def new(): "Return a text that no other module has."
'''


@pytest.fixture
def pairs(tmp_path):
    """The pairs of a package, a file that is not Python, and a held-out module."""
    files = [tmp_path / name for name in ("shapes/__init__.py", "broken.py", "held.py")]
    files[0].parent.mkdir()
    for file, source in zip(files, (SHAPES, "def", HELD_OUT), strict=True):
        file.write_text(source)
    return split_pairs(files[:2], files[2:], tmp_path)


def test_the_pairs_of_a_module_are_its_docstrings(pairs):
    assert [(pair.question, pair.answer) for pair in pairs.train] == [
        ("What is the module shapes for?", "Geometry of plane shapes: areas and lengths."),
        (
            "shapes: def area(radius: float, *, unit='m') -> float:",
            "Return the area of a circle. It is positive.",
        ),
        ("What does shapes.area do?", "Return the area of a circle. It is positive."),
        ("shapes: async def _length():", "Return the length of a circle."),
        ("What is shapes.Square?", "A square with sides."),
        (
            "shapes: class Square: class Side: def length(self, /, x=(1, 2)):",
            "Return its length in meters.",
        ),
        ("What does shapes.Square.Side.length do?", "Return its length in meters."),
    ]


def test_answers_that_other_modules_contain_are_not_held_out(pairs):
    assert {pair.answer for pair in pairs.validation} == {"Return a text that no other module has."}
    assert {pair.module for pair in pairs.validation} == {"held"}
    assert pairs.known == 2
    assert pairs.lines() == [
        "7 pairs of 1 modules to train on",
        "2 pairs of 1 modules held out, whole modules; 2 pairs of them were omitted because the source of other "
        "modules contains their answers",
    ]


def test_the_command_writes_a_split_dataset(pairs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jaxtrain.data.finetuning.stdlib_docstrings.stdlib_pairs", lambda: pairs)
    assert main(["data", "stdlib-pairs", "--out", "new"]) == 0
    assert "7 pairs of 1 modules to train on" in capsys.readouterr().out
    train, validation = split_examples("new")
    assert (len(train), len(validation)) == (7, 2)
    assert [message["content"] for message in train[0].messages] == list(pairs.train[0][1:])
    for command, message in {
        "data stdlib-pairs --out new": "new cannot be created (File exists): choose another folder",
        "data stdlib-pair": "no data 'stdlib-pair', did you mean 'stdlib-pairs'",
        "data": "a name is required: jaxtrain data stdlib-pairs",
    }.items():
        assert main(command.split()) == 2
        assert message in capsys.readouterr().err


@pytest.mark.nightly
def test_the_pairs_of_the_standard_library(tmp_path):
    digests = set()
    for seed in ("1", "2"):
        folder = tmp_path / seed
        command = [sys.executable, "-m", "jaxtrain.cli", "data", "stdlib-pairs", "--out", str(folder)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": seed})
        files = sorted(folder.iterdir())
        assert [file.name for file in files] == ["train.jsonl", "validation.jsonl"]
        digests.add(hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest())
    assert len(digests) == 1

    pairs, root = stdlib_pairs(), Path(sysconfig.get_paths()["stdlib"])
    assert len(pairs.train) > 5000
    assert len(pairs.validation) > 300
    assert len(read_examples(folder / "train.jsonl")) == len(pairs.train)
    rows = [json.loads(line) for line in (folder / "validation.jsonl").read_text("utf-8").splitlines()]
    assert rows == [pair.row() for pair in pairs.validation]
    everything = [*pairs.train, *pairs.validation]
    assert len({pair.question for pair in everything}) == len(everything)
    assert all(len(pair.answer.split()) > 2 for pair in everything)
    assert all(len((pair.question + pair.answer).encode()) <= MAX_BYTES for pair in everything)

    # What a recipe on the source of the standard library reads: no answer, and no module, is held out.
    read, held_out = split_files(stdlib_files(), root)
    text = " ".join(" ".join(file.read_text("utf-8", "replace").split()) for file in read)
    assert not any(pair.answer in text for pair in pairs.validation)
    module = lambda file: ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")  # noqa: E731
    assert {pair.module for pair in pairs.train} <= {module(file) for file in read}
    assert {pair.module for pair in pairs.validation} <= {module(file) for file in held_out}
