"""Reading of config.json."""

import json

import pytest

from jaxtrain.errors import UserError
from jaxtrain.run_folder import read_config


def test_an_unknown_recipe_is_named_with_the_known_ones(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"recipe": "nano", "settings": {}}))
    with pytest.raises(UserError, match=r"config.json: unknown recipe 'nano': choose one of gpt-stdlib, .*digits-mlp"):
        read_config(config)
