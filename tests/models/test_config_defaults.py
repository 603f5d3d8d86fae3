"""Defaults of every configuration equal those of the library it follows, except for the differences listed here."""

import dataclasses
import importlib
from typing import Any

import pytest

from jaxtrain import models
from jaxtrain.errors import UserError
from jaxtrain.models.layers.rope import to_hf as rope_to_hf
from jaxtrain.models.llama import MODEL_TYPES

CONFIGS = {
    "BertConfig": "transformers",
    "GPT2Config": "transformers",
    "LlamaConfig": "transformers",
    "LoraConfig": "peft",
    "MixtralConfig": "transformers",
    "ResNetConfig": "transformers",
    "T5Config": "transformers",
    "ViTConfig": "transformers",
}
RENAMED = {
    ("GPT2Config", "dropout"): "resid_pdrop",
    ("T5Config", "dropout"): "dropout_rate",
    ("LoraConfig", "alpha"): "lora_alpha",
    ("LoraConfig", "dropout"): "lora_dropout",
    ("LoraConfig", "trained"): "modules_to_save",
    ("LoraConfig", "rslora"): "use_rslora",
    ("LoraConfig", "dora"): "use_dora",
    ("LoraConfig", "targets"): "target_modules",
}
ABSENT = "absent"
NOT_OF_LLAMA = "one class for the family: the value that switches the setting off"
SMALL_STEM = "not in transformers: the value that gives its stem"
# (class, field): (our default, theirs, why).
DIFFERENT: dict[tuple[str, str], tuple[Any, Any, str]] = {
    ("BertConfig", "num_labels"): (None, 2, "None selects the masked-language-modeling head"),
    ("GPT2Config", "dropout"): (0.0, 0.1, "training from scratch sees most tokens once; files state their rate"),
    ("LlamaConfig", "sliding_window"): (None, ABSENT, NOT_OF_LLAMA),
    ("LlamaConfig", "layer_types"): (None, ABSENT, NOT_OF_LLAMA),
    ("LlamaConfig", "no_rope_layers"): (None, ABSENT, NOT_OF_LLAMA),
    ("LoraConfig", "out_in"): ("", ABSENT, "weights of imported modules: peft reads the layout from the layer"),
    ("LoraConfig", "targets"): (dataclasses.MISSING, None, "required: peft derives it from the model type"),
    ("LoraConfig", "trained"): ("", None, "a regular expression: the empty one matches nothing"),
    ("MixtralConfig", "head_dim"): (128, None, "None stands for hidden_size / num_attention_heads, 128"),
    ("MixtralConfig", "attention_bias"): (False, ABSENT, NOT_OF_LLAMA),
    ("MixtralConfig", "mlp_bias"): (False, ABSENT, NOT_OF_LLAMA),
    ("MixtralConfig", "layer_types"): (None, ABSENT, NOT_OF_LLAMA),
    ("MixtralConfig", "no_rope_layers"): (None, ABSENT, NOT_OF_LLAMA),
    ("ResNetConfig", "num_labels"): (1000, 2, "the classes of ImageNet; files state their labels"),
    ("ResNetConfig", "stem_kernel"): (7, ABSENT, SMALL_STEM),
    ("ResNetConfig", "stem_stride"): (2, ABSENT, SMALL_STEM),
    ("ResNetConfig", "stem_pool"): (True, ABSENT, SMALL_STEM),
    ("T5Config", "dropout"): (0.0, 0.1, "pretraining of v1.1 has none; files state their rate"),
    ("T5Config", "decoder_start_token_id"): (0, ABSENT, "files of all T5s state 0, which is their padding"),
    ("ViTConfig", "num_labels"): (1000, 2, "the classes of ImageNet; files state their labels"),
}


def their_default(name: str, field: str) -> Any:
    """Return the default of a field in the library's class, lists as tuples."""
    config = getattr(importlib.import_module(CONFIGS[name]), name)()
    value = getattr(config, RENAMED.get((name, field), field), ABSENT)
    return tuple(value) if isinstance(value, list) else value


def our_default(field: dataclasses.Field[Any]) -> Any:
    """Return our default, with rotary embeddings as in a config.json."""
    return rope_to_hf(field.default) if field.name == "rope_parameters" else field.default


def test_every_configuration_is_compared() -> None:
    # That of a classifier has no defaults but those of its decoder.
    assert {*CONFIGS, "SequenceClassifierConfig"} == {name for name in models.__all__ if name.endswith("Config")}


@pytest.mark.parametrize(
    ("name", "field"),
    [(name, field.name) for name in CONFIGS for field in dataclasses.fields(getattr(models, name))],
)
def test_a_default_equals_that_of_the_library(name: str, field: str) -> None:
    pytest.importorskip(CONFIGS[name])
    (ours,) = [our_default(f) for f in dataclasses.fields(getattr(models, name)) if f.name == field]
    theirs = their_default(name, field)
    if (name, field) in DIFFERENT:
        assert (ours, theirs) == DIFFERENT[name, field][:2]
    else:
        assert ours == theirs


def test_every_listed_difference_is_an_existing_field() -> None:
    fields = {(name, field.name) for name in CONFIGS for field in dataclasses.fields(getattr(models, name))}
    assert set(DIFFERENT) | set(RENAMED) <= fields


FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "smollm3"), models.llama),
    **{"mixtral": models.mixtral, "gpt2": models.gpt2, "bert": models.bert, "vit": models.vit},
    **{"resnet": models.resnet, "t5": models.t5},
}
SIZES = {"num_hidden_layers": 4, "num_attention_heads": 32, "hidden_size": 1024}
"""Sizes that every config.json of a decoder must have."""


def test_the_model_types_are_those_that_are_read() -> None:
    assert set(MODEL_TYPES) <= set(FAMILIES)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_keys_that_a_config_json_lacks_have_the_defaults_of_transformers(model_type: str) -> None:
    transformers = pytest.importorskip("transformers")
    family, sizes = FAMILIES[model_type], SIZES if model_type in MODEL_TYPES else {}
    classes = {"bert": ["BertForMaskedLM"], "vit": ["ViTForImageClassification"]}
    given = {**sizes, "architectures": classes.get(model_type)}
    complete = transformers.AutoConfig.for_model(model_type, **given).to_dict()
    assert family.from_hf({"model_type": model_type, **given}) == family.from_hf(complete)


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("GPT2Config", {"n_embd": 10, "n_head": 4}, "n_embd 10 is not divisible by n_head 4: change one of them"),
        ("BertConfig", {"hidden_size": 9, "num_attention_heads": 2}, "hidden_size 9 is not divisible by num_att"),
    ],
)
def test_sizes_that_are_not_divisible_are_refused(name: str, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        getattr(models, name)(**sizes)
