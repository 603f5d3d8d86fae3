"""`jaxtrain doctor` finds problems, names their fixes, and reports none on a healthy machine."""

import importlib.metadata
import json
import resource
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxtrain.cli.compilation_cache import enable_compilation_cache
from jaxtrain.cli.doctor import main
from jaxtrain.debug import installation


@pytest.fixture
def versions(monkeypatch):
    """Fake package versions by name."""
    fake = {"jax": "0.10.1", "jaxlib": "0.10.1"}

    def version(name):
        if name not in fake:
            raise importlib.metadata.PackageNotFoundError(name)
        return fake[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    return fake


def only(findings):
    (finding,) = findings
    return finding


def test_every_check_runs_on_this_machine(capsys):
    status = main(["--json"])
    report = json.loads(capsys.readouterr().out)
    names = [finding["name"] for finding in report["findings"]]
    assert names[:3] == ["python", "packages", "torch"]
    assert {"devices", "compiler", "compilation cache", "collectives", "open files", "disk"} <= {*names}
    assert status == (1 if report["problems"] else 0)
    by_name = {finding["name"]: finding for finding in report["findings"]}
    assert by_name["packages"]["status"] == by_name["devices"]["status"] == "fine"
    for device in jax.local_devices():
        assert by_name[str(device)]["status"] == "fine"


def test_the_text_output_reports_the_findings(capsys):
    main([])
    text = capsys.readouterr().out
    assert "python" in text
    assert "correct products" in text


def test_a_terminal_shows_each_name_beside_its_message(capsys, monkeypatch):
    """The spinner erases an unfinished line."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(
        "jaxtrain.debug.run_checks", lambda: iter([installation.Finding("disk", "fine", "9 GiB [free]")])
    )
    main([])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "9 GiB [free]" in line)
    assert "disk" in line.rpartition("\x1b[2K")[2]


def test_problems_are_counted_and_are_the_exit_status(capsys, monkeypatch):
    found = [installation.Finding(name, status, "") for name, status in (("disk", "problem"), ("torch", "note"))]
    for n, text in enumerate(("no problems", "1 problem", "2 problems")):
        monkeypatch.setattr("jaxtrain.debug.run_checks", lambda n=n: iter([*[found[0]] * n, found[1]]))
        assert main([]) == (1 if n else 0)
        assert capsys.readouterr().out.splitlines()[-1] == text


@pytest.mark.parametrize(
    ("installed", "fix"),
    [
        ({}, ""),
        ({"jaxlib": "0.9.0"}, "pip install jaxlib==0.10.1"),
        ({"jax-cuda13-plugin": "0.10.1", "jax-cuda13-pjrt": "0.10.1"}, ""),
        ({"jax-cuda13-plugin": "0.9.1", "jax-cuda13-pjrt": "0.10.1"}, "pip install jax-cuda13-plugin==0.10.1"),
        ({"jax-cuda12-plugin": "0.10.1", "jax-cuda13-plugin": "0.10.1"}, "pip uninstall jax-cuda12-plugin"),
    ],
)
def test_incompatible_versions_are_reported(versions, installed, fix):
    versions |= installed
    finding = only(installation.packages())
    assert finding.status == ("problem" if fix else "fine")
    assert finding.fix == fix


def test_a_missing_torch_is_a_note(versions):
    assert only(installation.torch()).status == "note"
    versions["torch"] = "2.11"
    assert only(installation.torch()).message == "torch 2.11"


def test_small_limits_are_problems(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    monkeypatch.setattr(installation.shutil, "disk_usage", lambda _: SimpleNamespace(total=64 * 2**20, free=2**20))
    found = {finding.name: finding for finding in installation.limits()}
    assert {name for name, finding in found.items() if finding.status == "problem"} == {*found}
    assert found["open files"].fix == "ulimit -n 1024"


@pytest.mark.parametrize(
    ("environment", "fix"),
    [
        ({"JAX_PLATFORMS": "cpu"}, "unset JAX_PLATFORMS"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "unset CUDA_VISIBLE_DEVICES"),
        ({"JAX_PLATFORMS": ""}, "pip install 'jaxtrain[cuda13]', or [cuda12] for a driver before 580"),
    ],
)
def test_a_gpu_that_jax_does_not_see_is_a_problem(monkeypatch, tmp_path, environment, fix):
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86  Wed Jan 1 00:00:00 UTC 2025\n")
    monkeypatch.setattr(installation, "DRIVER", driver)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    finding = next(installation.devices())
    assert (finding.status, finding.fix) == ("problem", fix)


def test_a_device_with_wrong_products_is_found(monkeypatch):
    right = jnp.matmul
    monkeypatch.setattr(jnp, "matmul", lambda *args, **kwargs: right(*args, **kwargs).at[3, 3].add(1))
    finding = only(installation.products(jax.local_devices()[0]))
    assert finding.status == "problem"
    assert finding.message.startswith("wrong products: errors in units of epsilon float32 ")


def test_a_cache_that_cannot_be_written_is_a_problem(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    for path, status in {None: "fine", str(tmp_path / "file" / "cache"): "problem", str(tmp_path): "fine"}.items():
        monkeypatch.setattr(type(jax.config), "jax_compilation_cache_dir", path, raising=False)
        assert only(installation.cache()).status == status


def test_the_cache_without_a_variable_is_that_of_the_commands(monkeypatch, tmp_path):
    monkeypatch.setattr(type(jax.config), "jax_compilation_cache_dir", None, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    assert f"0 files in {enable_compilation_cache()};" in only(installation.cache()).message
