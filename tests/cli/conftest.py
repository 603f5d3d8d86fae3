"""An empty working folder and small texts to train on."""

import os

import jax
import pytest

TINY_GPT = "--n-layer 1 --n-embd 16 --n-head 2 --seq-len 16 --batch-size 8 --eval-sequences 16"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", os.environ.get("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "xla")))
    # The same terminal width in CI and locally.
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def text_folder(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(4):
        (folder / f"{i}.txt").write_text(f"the quick brown fox {i} jumps over the lazy dog\n" * 40)
    return folder


@pytest.fixture
def broadcasting():
    """Allow implicit broadcasting, which users' own files may rely on."""
    with jax.numpy_rank_promotion("allow"):
        yield
