"""Reading of config.json."""

import dataclasses
import importlib.metadata
import json
from pathlib import Path

import pytest

import jaxtrain as jt
from jaxtrain.errors import UserError
from jaxtrain.run_folder import environment, read_config, read_settings


def test_an_unknown_recipe_is_named_with_the_known_ones(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"recipe": "nano", "settings": {}}))
    with pytest.raises(UserError, match=r"config.json: unknown recipe 'nano': choose one of gpt-stdlib, .*digits-mlp"):
        read_config(config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wide(jt.Recipe):
    widths: tuple[int, ...] = ()
    data: Path | None = None


def test_settings_have_the_types_of_their_fields(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"recipe": "wide.py::Wide", "settings": {"widths": [2, 3], "data": "a.npz"}}))
    assert read_settings(config, Wide) == Wide(widths=(2, 3), data=Path("a.npz"))


def test_a_checkout_without_metadata_has_its_version(monkeypatch):
    version = importlib.metadata.version

    def of_others(name):
        if name == "jaxtrain":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", of_others)
    assert environment()["versions"]["jaxtrain"] == jt.__version__
