"""Commands and flags in shell blocks of the documentation exist."""

import contextlib
import itertools
import re
import shlex
from pathlib import Path

import pytest

import jaxtrain.cli
import parity.cli

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MAINS = {"jaxtrain": jaxtrain.cli.main, "parity": parity.cli.main}


def commands(page: Path) -> list[list[str]]:
    """Return the words of each `jaxtrain` and `parity` command in the shell blocks of a page."""
    blocks = re.findall(r"```sh[^\n]*\n(.*?)```", page.read_text(), re.S)
    lines = itertools.chain.from_iterable(block.replace("\\\n", " ").splitlines() for block in blocks)
    parsed = []
    for line in lines:
        words = list(shlex.shlex(line, posix=True, punctuation_chars=True))
        words = shlex.split(line, comments=True) if not set(words) & {"&&", "|", ";", "&"} else words
        for separated, part in itertools.groupby(words, key=lambda word: word in ("&&", "|", ";", "&")):
            command = list(itertools.dropwhile(lambda word: word not in MAINS, part))
            if not separated and command:
                parsed.append(command)
    return parsed


def known_flags(words: list[str], capsys: pytest.CaptureFixture[str]) -> set[str]:
    """Return the flags in the help of a command."""
    program, subcommand, *rest = words
    recipe = [rest[0]] if subcommand in ("train", "plan") and rest and rest[0][0] != "-" else []
    recipe += rest[(at := rest.index("--model")) : at + 2] if "--model" in rest else []
    with contextlib.suppress(SystemExit):  # argparse exits after printing help
        MAINS[program]([subcommand, *recipe, "--help"])
    return set(re.findall(r"--[a-z][\w-]*", capsys.readouterr().out))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_flags_of_a_page_exist(page, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    Path("examples").symlink_to(ROOT / "examples")
    for words in commands(page):
        if words[:2] == ["jaxtrain", "new"]:
            assert jaxtrain.cli.main(words[1:]) == 0  # later commands of the page use the file
        launched = words.index("--") if "--" in words else len(words)
        parts = [words[:launched], *([["jaxtrain", *words[launched + 1 :]]] if launched < len(words) else [])]
        for part in parts:
            if len(part) > 1 and part[1] != "--help":
                flags = {word.partition("=")[0] for word in part if re.match(r"--[a-z]", word)}
                assert flags <= known_flags(part, capsys) | {"--help", "--debug"}, part


def test_pages_contain_commands():
    lines = [words for page in PAGES for words in commands(page)]
    assert len(lines) > 40
    assert {words[1] for words in lines if words[0] == "jaxtrain"} >= {
        "train",
        "plan",
        "export",
        "launch",
        "replay",
    }
