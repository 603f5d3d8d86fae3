"""PyTorch's side is recorded, and replayed where PyTorch cannot be imported."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from jaxtrain.errors import UserError
from parity.bundle import FORMAT, INDEX, open_bundle
from parity.cli import main
from parity.settings import Settings
from tests.fuzz.mutations import mutated_tree

CASE_FILE = """
import jax, jax.numpy as jnp, numpy as np
import jaxtrain as jt
from jaxtrain.interop import LINEAR, NameTable, TorchParam
from parity import AdamW, Case

FACTOR = 1.0


def model():
    import torch
    return torch.nn.Linear(3, 2)


def torch_loss(model, batch):
    return model(batch["x"]).square().sum(), len(batch["x"])


def loss_fn(params, batch, rng):
    out = FACTOR * (batch["x"] @ params["kernel"]) + params["bias"][None]
    return jt.Loss((out**2).sum(), weight=len(out)), {}


case = Case(
    name="own", torch_model=model, torch_loss=torch_loss, loss_fn=loss_fn,
    params_like={"kernel": np.zeros((3, 2)), "bias": np.zeros(2)},
    names=NameTable({"kernel": TorchParam("weight", LINEAR), "bias": TorchParam("bias")}),
    batch=lambda seed, rows: {"x": np.random.default_rng(seed).normal(size=(rows, 3)).astype(np.float32)},
    rows=4, optimizer=AdamW(lr=1e-2), clip_norm=1.0,
)
"""
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from parity.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    (folder / "own.py").write_text(CASE_FILE)
    argv = ["record", f"{folder / 'own.py'}::case", "--precision", "fp64,bf16", "--steps", "3"]
    assert main([*argv, "--out", str(folder / "kept")]) == 0
    return folder


def replayed(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_TORCH, "run", f"{folder / 'own.py'}::case", "--bundle", *argv]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_bundle_is_replayed_without_torch(recorded: Path) -> None:
    ran = replayed(recorded, str(recorded / "kept"), "--remat", "full", "--json", str(recorded / "found.json"))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count(" held") == 4
    rows = json.loads((recorded / "found.json").read_text())["cases"]
    assert [row["precision"] for row in rows] == ["fp64", "bf16"]
    assert {row["steps"] for row in rows} == {3}


def test_a_port_changed_after_recording_differs_from_its_bundle(recorded: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(CASE_FILE.replace("FACTOR = 1.0", "FACTOR = 1.000001"))
    ran = replayed(tmp_path, str(recorded / "kept"))
    assert ran.returncode == 1, ran.stderr
    assert "own fp64 differs" in ran.stdout


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["nowhere"], "nowhere contains no bundle.json: create it with parity record"),
        (["{kept}", "--precision", "fp16"], "contains fp64, bf16 with seed 0: use these"),
    ],
)
def test_settings_that_were_not_recorded_are_refused_in_one_line(
    recorded: Path, argv: list[str], expected: str
) -> None:
    ran = replayed(recorded, *(arg.format(kept=recorded / "kept") for arg in argv))
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1)
    assert expected in ran.stderr


def test_a_bundle_is_not_overwritten(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", f"{recorded / 'own.py'}::case", "--out", str(recorded / "kept")]) == 2
    assert "already contains a bundle" in capsys.readouterr().err


GOOD = {
    "format": FORMAT,
    "case": "mlp",
    "precisions": ["fp64"],
    "accumulate": 1,
    "remat": "none",
    "steps": 2,
    "seed": 0,
}
TEXTS = ["", "{", "[]", "5", "null", "[" * 100_000, '{"format": 2}', "\x00"]


def read_all(folder: Path) -> None:
    bundle = open_bundle(folder)
    bundle.reference("fp64", bundle.settings)


@settings(max_examples=80, deadline=None, database=None)
@given(content=st.sampled_from(TEXTS) | mutated_tree(GOOD).map(json.dumps), weights=st.none() | st.binary(max_size=40))
def test_a_malformed_bundle_is_refused_in_one_line(content: str, weights: bytes | None) -> None:
    with tempfile.TemporaryDirectory() as place:
        Path(place, INDEX).write_text(content)
        if weights is not None:
            Path(place, "fp64-0-weights.safetensors").write_bytes(weights)
        with pytest.raises(UserError) as refused:
            read_all(Path(place))  # its tensors are missing or damaged
        assert "\n" not in str(refused.value)
        assert place in str(refused.value)


def test_links_out_of_a_bundle_are_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    folder.mkdir()
    save_file({"losses": np.zeros(2)}, tmp_path / "outside.safetensors")
    (folder / INDEX).write_text(json.dumps(GOOD))
    (folder / "fp64-0-weights.safetensors").symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(UserError, match="symbolic link"):
        open_bundle(folder).reference("fp64", Settings(steps=2))
    (folder / INDEX).unlink()
    (folder / INDEX).symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(UserError, match="symbolic link"):
        open_bundle(folder)
