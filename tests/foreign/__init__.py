"""Published ports against PyTorch."""

import importlib.util

import pytest

_INSTALLED = importlib.util.find_spec("transformers.models.gpt2.modeling_flax_gpt2") is not None
MARKS = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not _INSTALLED, reason="needs tests/foreign/requirements.txt"),
]
"""Marks of the tests that need the packages of `requirements.txt`."""
