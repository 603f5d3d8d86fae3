"""Fine-tuning of models of `transformers` that have no implementation in `jaxtrain.models`."""

import pytest

from tests.recipes.fine_tuning_twin import Twin, assert_alike, write_examples
from tests.recipes.test_finetune_updates import trained_by_torch


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("imported")
    write_examples(root)
    return root


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("family", "loss", "method", "quantize", "packing"),
    [
        ("Gemma2", "supervised", "lora", "none", True),
        ("opt", "supervised", "dora", "nf4", True),
        ("gpt_neox", "dpo", "lora", "none", True),
        ("phi3", "supervised", "lora", "nf4", True),
        ("gpt_oss", "supervised", "full", "none", True),
        ("bloom", "supervised", "lora", "none", False),
        ("Gemma3Text", "dpo", "full", "none", True),
    ],
)
def test_twenty_updates_are_those_of_transformers_and_peft(root, monkeypatch, family, loss, method, quantize, packing):
    monkeypatch.setenv("JAXTRAIN_TOKEN_CACHE", "off")
    twin = Twin(root, family, loss, method, quantize=quantize, packing=packing)
    assert_alike(twin.train(), trained_by_torch(twin))
