"""Each notebook is generated from its tutorial, and its outputs are those shown on the page."""

import doctest
import importlib.util
import math
import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

DOCS = Path(__file__).parent.parent.parent / "docs"
SPEC = importlib.util.spec_from_file_location("notebooks", DOCS / "notebooks.py")
notebooks = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = notebooks  # required by dataclass
SPEC.loader.exec_module(notebooks)

LESSONS = {"train", "port", "migrate", "scale", "plan", "nans", "data", "finetuning"}
NUMBER = r"\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def by_name():
    return [pytest.param(page, id=page.stem) for page in notebooks.PAGES]


def agrees(expected, line):
    """Return whether a line matches the one expected: `…` matches anything, words and integers must be equal.

    Other numbers may differ by a twentieth, and memory by a fifth, because it depends on the version of XLA.
    """
    words = re.split(rf"(…|{NUMBER}|\s+)", expected.strip())
    patterns = [
        ".*" if word == "…" else f"({NUMBER})" if i % 2 and not word.isspace() else r"\s+" if i % 2 else re.escape(word)
        for i, word in enumerate(words)
    ]
    match = re.fullmatch("".join(patterns), line.strip())
    if not match:
        return False
    numbers = re.findall(rf"({NUMBER})(\s+[KMG]iB)?", expected)
    return all(numbers_agree(a, b, 0.2 if unit else 0.05) for (a, unit), b in zip(numbers, match.groups(), strict=True))


def numbers_agree(expected, printed, tolerance):
    expected, printed = expected.replace(",", ""), printed.replace(",", "")
    if expected.isdecimal() and printed.isdecimal():
        return int(expected) == int(printed)
    return math.isclose(float(expected), float(printed), rel_tol=tolerance)


def missing(expected, printed):
    """Return the first line shown that is not printed after the preceding one, or None."""
    lines = iter(printed.splitlines())
    wanted = [line for line in expected.splitlines() if line.strip() not in ("", "…")]
    return next((line for line in wanted if not any(agrees(line, other) for other in lines)), None)


def text_of(cell):
    return ESCAPES.sub("", "".join(x.get("text") or x.get("data", {}).get("text/plain", "") for x in cell.outputs))


@pytest.fixture
def reader_environment(tmp_path, monkeypatch):
    """Return a new folder, with one device, JAX's default settings and the commands of this Python."""
    for name in ("JAX_NUMPY_DTYPE_PROMOTION", "JAX_NUMPY_RANK_PROMOTION"):
        monkeypatch.delenv(name)
    settings = os.environ["XLA_FLAGS"].split()
    monkeypatch.setenv("XLA_FLAGS", " ".join(s for s in settings if "device_count" not in s))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    folder = tmp_path / "lesson"
    folder.mkdir()
    return folder


def run(notebook, folder):
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=1800, kernel_name="python3", resources=resources).execute()
    return [text_of(cell) for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("page", by_name())
def test_a_tutorial_runs_and_prints_what_its_page_shows(page, reader_environment):
    printed = run(notebooks.notebook(page.read_text()), reader_environment)
    code = [part for part in notebooks.parts(page.read_text()) if isinstance(part, notebooks.Code)]
    assert any(part.output for part in code)
    for part, output in zip(code, printed[1:], strict=True):
        line = missing(part.output, output)
        assert line is None, f"{part.source}\n\nprints no {line!r} but\n\n{output}"


@pytest.mark.parametrize("page", notebooks.PAGES, ids=lambda page: page.stem)
def test_a_notebook_is_generated_from_its_page(page):
    stored = nbformat.read(notebooks.path_of(page), as_version=4)
    nbformat.validate(stored)
    assert stored == notebooks.notebook(page.read_text()), "regenerate it with python -m docs.notebooks"


def test_the_doctests_of_the_generator_pass():
    assert doctest.testmod(notebooks).attempted > 0
    assert doctest.testmod(notebooks).failed == 0


def test_every_tutorial_has_a_notebook():
    assert {page.stem for page in notebooks.PAGES} == LESSONS
    assert {path.stem for path in (DOCS / "notebooks").glob("*.ipynb")} == LESSONS


@pytest.mark.parametrize("page", notebooks.PAGES, ids=lambda page: page.stem)
def test_links_of_a_tutorial_exist(page):
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    assert links
    for link in links:
        assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", notebooks.PAGES, ids=lambda page: page.stem)
def test_every_block_of_a_tutorial_is_parsed(page):
    text = page.read_text()
    code = [part for part in notebooks.parts(text) if isinstance(part, notebooks.Code)]
    outputs = sum(bool(part.output) for part in code)
    assert text.count("\n```\n") == len(code) + outputs == len(re.findall(r"^```\w", text, re.M))


def test_printed_lines_are_compared_with_those_shown():
    assert agrees("step 30  loss 0.749 …", "step 30  loss 0.7391  0:00 left")
    assert agrees("1,618 rows", "1,618   rows  ")
    assert not agrees("step 30  loss 0.749", "step 31  loss 0.749")
    assert not agrees("step 30  loss 0.749", "step 30  loss 0.949")
    assert not agrees("loss 0.749", "a loss 0.749")
    assert not agrees("1,618 rows", "1,617 rows")
    assert agrees("31.2 MiB", "29.2 MiB")
    assert not agrees("31.2 MiB", "15.2 MiB")
    assert missing("a 1\n…\nb 2", "a 1\nother\nb 2\n") is None
    assert missing("a 1\nb 2", "b 2\na 1\n") == "b 2"


def test_a_cell_that_fails_is_an_error(reader_environment):
    for block in ("```python\n1 / 0\n```\n", "```sh\nfalse\necho on\n```\n"):
        with pytest.raises(Exception, match=r"ZeroDivisionError|CalledProcessError"):
            run(notebooks.notebook(block), reader_environment)
