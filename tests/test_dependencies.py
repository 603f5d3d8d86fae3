"""Every import is declared in pyproject.toml, and the base install suffices for `train_step`."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxtrain.cli import _RUN_PACKAGES

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Modules whose name differs from that of their distribution.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "absl": "absl-py",
    "orbax": "orbax-checkpoint",
    "pynvml": "nvidia-ml-py",
    "sklearn": "scikit-learn",
    "mlflow": "mlflow-skinny",
    "rouge_score": "rouge-score",
    "xla": "jax",
}
# Packages of jaxtrain that need only the base install; the others name the extra that they need.
BASE = ("errors", "fields", "paths", "program", "passes", "cpu", "step", "optim", "losses", "cost")


def declared(*extras: str) -> set[str]:
    """Return the distributions of the base install and of these extras, including the extras that they contain."""
    requirements = list(PROJECT["dependencies"])
    for extra in extras:
        requirements += PROJECT["optional-dependencies"][extra]
    names = set()
    for requirement in requirements:
        name, included = re.match(r"([A-Za-z0-9_.-]+)(?:\[([^\]]*)\])?", requirement).groups()
        if name == "jaxtrain":
            names |= declared(*included.split(","))
        else:
            names.add(name)
    return names


def third_party(file: Path, *, nested: bool) -> Iterator[tuple[int, str]]:
    """Yield (line, distribution) of third-party imports; `nested` includes imports inside functions."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree) if nested else tree.body:
        match node:
            case ast.Import():
                modules = [alias.name for alias in node.names]
            case ast.ImportFrom():
                modules = [node.module or ""]
            case _:
                continue
        for module in modules:
            top = module.partition(".")[0]
            if top not in sys.stdlib_module_names and top not in ("jaxtrain", "parity", "benchmarks"):
                yield node.lineno, DISTRIBUTIONS.get(top, top)


@pytest.mark.parametrize("program", ["jaxtrain", "parity", "benchmarks"])
def test_every_import_is_declared(program):
    known = declared(*PROJECT["optional-dependencies"])
    undeclared = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file in sorted((ROOT / program).rglob("*.py"))
        for line, name in third_party(file, nested=True)
        if name not in known
    ]
    assert not undeclared, "\n".join(undeclared)


@pytest.mark.parametrize("package", BASE)
def test_a_package_of_the_base_install_imports_nothing_else(package):
    place = ROOT / "jaxtrain" / package
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    others = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file in files
        for line, name in third_party(file, nested=True)
        if name not in declared()
    ]
    assert not others, "\n".join(others)


def test_the_command_line_imports_what_its_extra_declares():
    modules = {DISTRIBUTIONS.get(name, name) for name in _RUN_PACKAGES}
    assert modules == declared("run") - declared()


@pytest.mark.parametrize("program", ["parity", "benchmarks"])
def test_parity_and_benchmarks_import_what_their_extra_declares(program):
    others = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file in sorted((ROOT / program).rglob("*.py"))
        for line, name in third_party(file, nested=False)
        if name not in declared("parity") | {"pytest"}
    ]
    assert not others, "\n".join(others)


BASE_INSTALL = """
import sys

class BaseInstall:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, BaseInstall())
"""

TRAINS = """
import jax, jax.numpy as jnp, jaxtrain, optax

def loss_fn(params, batch, rng):
    return jaxtrain.Loss(((batch @ params) ** 2).sum(), weight=len(batch)), {}

step = jaxtrain.train_step(loss_fn, jaxtrain.optim.adamw(0.1), precision="fp16", accumulate=2, clip_norm=1.0, ema=0.9)
state, metrics = step(step.init(jnp.ones(2)), jnp.ones((4, 2)))
print(float(metrics["loss"]), jaxtrain.losses.mse(jnp.ones(1), jnp.zeros(1)).tolist())
"""

COMMAND = """
from jaxtrain.cli import main
sys.exit(main(["train", "--steps", "1"]))
"""


def python_without_extras(program: str) -> subprocess.CompletedProcess:
    """Run Python code in a process that finds only the packages of the base install."""
    blocked = {*_RUN_PACKAGES, "torch", "sklearn", "scipy", "matplotlib", "transformers"}
    code = BASE_INSTALL.format(blocked=blocked) + program
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


def test_the_base_install_trains():
    result = python_without_extras(TRAINS)
    assert result.stdout == "4.0 [1.0]\n", result.stderr


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (COMMAND, r"jaxtrain: jaxtrain train needs \w+: pip install 'jaxtrain\[run\]'\n"),
        (
            "from parity.__main__ import main\nsys.exit(main())",
            r"parity: .* needs \w+: pip install 'jaxtrain\[parity\]'\n",
        ),
        (
            "from benchmarks.__main__ import main\nsys.exit(main('benchmarks'))",
            r"benchmarks: .* needs \w+: .*'jaxtrain\[parity\]'\n",
        ),
    ],
    ids=["jaxtrain", "parity", "benchmarks"],
)
def test_a_command_without_its_extra_names_it_in_one_line(program, message):
    result = python_without_extras(program)
    assert result.returncode == 2
    assert re.fullmatch(message, result.stderr)
