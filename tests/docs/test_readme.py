"""The README: its code runs, its images exist, and it names every command and recipe."""

import re
import subprocess
import sys
from pathlib import Path

from jaxtrain.cli import COMMANDS
from jaxtrain.recipes import RECIPES

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_python_code_of_the_readme_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out


def test_the_readme_names_every_command_and_recipe():
    for name in COMMANDS:
        assert f"`jaxtrain {name}" in README
    for name in RECIPES:
        assert f"`{name}`" in README


def test_the_images_of_the_readme_exist():
    for path in re.findall(r"!\[.*?\]\((.*?)\)", README):
        assert (ROOT / path).stat().st_size > 1000


def test_the_console_scripts_print_help():
    for module in ("jaxtrain.cli", "parity.cli"):
        done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=False)
        assert done.returncode == 0
        assert "usage" in done.stdout
