"""The Python code and the commands of the pages run without errors."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxtrain import cli
from jaxtrain.losses import subgradients
from parity.cases import CASES

ROOT = Path(__file__).parent.parent.parent
PAGES = [path for path in sorted((ROOT / "docs").glob("*.md")) if "```python" in path.read_text()]
# Those without a recipe; tests/examples has the others.
SCRIPTS = [path for path in sorted((ROOT / "examples").glob("*.py")) if "jt.Recipe" not in path.read_text()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_of_a_page_runs_from_top_to_bottom_and_prints_what_the_page_shows(page, capsys):
    blocks = re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", page.read_text(), re.S)
    names: dict[str, object] = {"__name__": "__main__"}
    # The defaults of JAX, not the strict modes of the tests.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        for i, (block, printed) in enumerate(blocks, start=1):
            capsys.readouterr()
            exec(compile(block, f"{page.name}, block {i}", "exec"), names)
            assert not printed or capsys.readouterr().out.strip() == printed.strip()


def test_the_commands_of_the_first_five_minutes_run(tmp_path):
    _, first_steps = (ROOT / "docs" / "start.md").read_text().split("## Train\n")  # the section above installs
    commands = "".join(re.findall(r"```sh\n(.*?)```", first_steps, re.S))
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    shell = ["bash", "-euxc", commands]
    done = subprocess.run(shell, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "digits" / "report.html").exists()
    assert "held" in done.stdout


def test_exported_files_load_as_the_page_on_export_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```(sh|py)\n(.*?)```", (ROOT / "docs" / "export.md").read_text(), re.S)
    read = []
    for kind, block in blocks:
        if kind == "sh":
            # Any weights will do.
            for words in map(str.split, block.replace("--steps 120", "--steps 2").splitlines()):
                assert words[0] == "pip" or cli.main(words[1:]) == 0, words
        elif "__file__" not in block:  # otherwise the listing of load.py
            exec(block, names := {})
            read.append(names)
    assert read[0]["logits"].shape == (1, 9, 256)
    assert read[1]["model"].config.n_layer == 2


def test_the_page_on_autograd_names_every_subgradient_and_case():
    page = (ROOT / "docs" / "autograd.md").read_text()
    public = {name for name, x in vars(subgradients).items() if getattr(x, "__module__", "") == subgradients.__name__}
    assert {name for name in public if name[0] != "_"} == set(re.findall(r"`subgradients\.(\w+)`", page))
    commands = re.findall(r"`parity run\s([^`]+)`", page)
    assert commands
    assert {name for command in commands for name in command.split()} <= set(CASES)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_prints_a_decreasing_loss(script, capsys):
    assert len(script.read_text().splitlines()) <= 60
    runpy.run_path(str(script), run_name="__main__")
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) >= 4
    assert losses[-1] < losses[0] / 4


def test_there_are_scripts():
    assert {"gradient_penalty.py", "maml.py"} <= {script.name for script in SCRIPTS}
