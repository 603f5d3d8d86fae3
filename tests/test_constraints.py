"""constraints.txt pins what the README's commands install, on each supported version of Python."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from jaxtrain.debug.installation import TESTED_JAX, TESTED_TORCH

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LINES = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
COMMANDS = re.findall(r"pip install (.*?) &&", (ROOT / "README.md").read_text())
OF_LINUX = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}


def requirements(*extras: str) -> list[Requirement]:
    """Return what the base install and these extras require, including the extras that they contain."""
    found = [Requirement(text) for text in PROJECT["dependencies"]]
    for extra in extras:
        for requirement in map(Requirement, PROJECT["optional-dependencies"][extra]):
            found += requirements(*requirement.extras) if requirement.name == "jaxtrain" else [requirement]
    return found


def pins(python: str) -> dict[str, str]:
    """Return the version of each package on a version of Python."""
    found = {}
    for constraint in map(Requirement, LINES):
        if constraint.marker is None or constraint.marker.evaluate({**OF_LINUX, "python_version": python}):
            (pin,) = constraint.specifier
            assert pin.operator == "=="
            name = canonicalize_name(constraint.name)
            assert name not in found, f"{name} is pinned twice on Python {python}"
            found[name] = pin.version
    return found


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_each_requirement_has_one_version_that_satisfies_it(python):
    pinned = pins(python)
    for requirement in requirements("test", "integrations", "gpu-programs"):
        if requirement.marker is None or requirement.marker.evaluate({**OF_LINUX, "python_version": python}):
            assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement
    assert pinned["jax"] == pinned["jaxlib"] == pinned["jax-cuda12-plugin"] == pinned["jax-cuda12-pjrt"]


def test_each_requirement_of_jax_excludes_the_release_that_computes_wrong_numbers():
    of_jax = [r for r in requirements(*PROJECT["optional-dependencies"]) if r.name.startswith("jax")]
    assert {r.name for r in of_jax} >= {"jax", "jax-cuda12-plugin"}
    assert not [str(r) for r in of_jax if r.name.split("-")[0] == "jax" and r.specifier.contains("0.10.2")]


def test_the_commands_of_the_readme_install_the_pinned_versions():
    installs = [command for command in COMMANDS if "docs" not in command]
    assert len(installs) == 2
    assert all(command.startswith("-c constraints.txt ") for command in installs)


def test_doctor_advises_the_pinned_versions():
    pinned = pins(f"{sys.version_info.major}.{sys.version_info.minor}")
    assert (pinned["jax"], pinned["torch"]) == (TESTED_JAX, TESTED_TORCH)
