"""Functions exported to StableHLO: any batch size, every platform, no dependency on this project."""

import importlib.util
import re
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.errors import RunFailed, UserError
from jaxtrain.export import stablehlo

pytest.importorskip("flatbuffers")

WEIGHTS = {"body/w": np.arange(6, dtype=np.float32).reshape(3, 2), "b": np.ones(2, np.float32)}


def model(weights, x):
    return jnp.tanh(x @ weights["body/w"]) + weights["b"][None]


@pytest.fixture
def folder(tmp_path):
    (rows,) = jax.export.symbolic_shape("rows")
    folder = tmp_path / "model"
    stablehlo.write_stablehlo(folder, model, WEIGHTS, [jax.ShapeDtypeStruct((rows, 3), np.float32)])
    return folder


def test_a_folder_runs_in_a_separate_process_with_any_batch_size(folder):
    assert sorted(path.name for path in folder.iterdir()) == ["load.py", "model.safetensors", "model.stablehlo"]
    batches = [np.random.default_rng(n).normal(size=(n, 3)).astype(np.float32) for n in (1, 4)]
    for x, logits in zip(batches, stablehlo.run_stablehlo(folder, [[x] for x in batches]), strict=True):
        np.testing.assert_array_equal(logits, jax.jit(model)(WEIGHTS, x))


def test_the_loader_can_be_imported(folder):
    logits = runpy.run_path(str(folder / "load.py"))["logits"]
    np.testing.assert_array_equal(logits(np.ones((2, 3), np.float32)), jax.jit(model)(WEIGHTS, jnp.ones((2, 3))))


def test_the_program_supports_every_platform_in_float32(folder):
    exported = jax.export.deserialize((folder / "model.stablehlo").read_bytes())
    assert exported.platforms == stablehlo.PLATFORMS
    assert set(re.findall(r"precision = \[(.*?)\]", exported.mlir_module())) == {"HIGHEST, HIGHEST"}


def test_a_missing_flatbuffers_raises_an_error_that_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^flatbuffers is not installed: pip install 'jaxtrain\[stablehlo\]'$"):
        stablehlo.write_stablehlo(tmp_path / "model", model, WEIGHTS, [])
    assert not (tmp_path / "model").exists()


def test_the_page_shows_the_loader():
    page = Path(__file__).parent.parent.parent / "docs" / "export.md"
    assert f"```py\n{stablehlo.LOADER}```" in page.read_text()


def test_a_program_that_fails_reports_the_reason(folder):
    (folder / "model.stablehlo").write_bytes(b"none")
    with pytest.raises(RunFailed, match=r"^the exported program failed \(.+\): not written$"):
        list(stablehlo.run_stablehlo(folder, [[np.ones((1, 3), np.float32)]]))
