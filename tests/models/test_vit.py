"""ViT: patches, positions, and conversion of the config.json of `transformers`."""

import dataclasses
import json
import tempfile

import jax
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from safetensors.numpy import load_file

from jaxtrain.errors import UserError
from jaxtrain.models import functional
from jaxtrain.models.vit import ViT, ViTConfig, file_names, from_hf, to_hf, torch_names
from tests.models.programs import assert_float64_throughout, enlarged

CONFIG = ViTConfig(
    image_size=(8, 12),
    patch_size=4,
    hidden_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=12,
    hidden_dropout_prob=0.25,
    attention_probs_dropout_prob=0.25,
    num_labels=5,
)
IMAGES = np.random.default_rng(0).standard_normal((3, 8, 12, 3)).astype(np.float32)


def model(**changes):
    return enlarged(ViT(dataclasses.replace(CONFIG, **changes), rngs=nnx.Rngs(0)))


def test_images_give_logits_and_blocks_are_stacked():
    apply, params = model()
    assert apply(params, IMAGES).shape == (3, 5)
    assert params["blocks"]["fc1"]["kernel"].shape == (2, 8, 12)
    # Two rows of three patches, and the class token.
    assert params["position_embeddings"].shape == (1, 7, 8)


def test_logits_depend_on_every_pixel_and_its_position():
    apply, params = model()
    before = apply(params, IMAGES)
    for row, column in [(0, 0), (7, 11), (3, 8)]:
        changed = IMAGES.copy()
        changed[1, row, column] += 1
        after = apply(params, changed)
        assert (after[1] != before[1]).any()
        np.testing.assert_array_equal(after[::2], before[::2])
    exchanged = np.concatenate([IMAGES[:, 4:], IMAGES[:, :4]], axis=1)
    assert np.abs(apply(params, exchanged) - before).max() > 1e-3


def test_dropout_is_applied_only_with_a_key():
    apply, params = model()
    one, again, other = (apply(params, IMAGES, jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one, other)
    plain, _ = model(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    np.testing.assert_array_equal(apply(params, IMAGES), plain(params, IMAGES, jax.random.key(0)))


def test_float64_stays_float64_throughout():
    apply, params = model()

    def loss(params, rng):
        return (apply(params, IMAGES.astype(np.float64), rng) ** 2).sum()

    assert_float64_throughout(jax.value_and_grad(loss), params, jax.random.key(0))


@pytest.mark.parametrize("changes", [{}, {"qkv_bias": False, "image_size": 8, "patch_size": (4, 2)}])
def test_names_and_configuration_equal_transformers(changes):
    config = dataclasses.replace(CONFIG, **changes)
    written = json.loads(json.dumps(to_hf(config)))
    theirs = transformers.ViTForImageClassification(transformers.ViTConfig(**written)).eval()
    apply, like = functional(ViT(config, rngs=nnx.Rngs(0)))
    names = torch_names(config)
    assert names.torch_order(like) == [name for name, _ in theirs.named_parameters()]
    assert from_hf(theirs.config.to_dict() | {"architectures": written["architectures"]}) == config
    params = names.to_jax({name: tensor.numpy() for name, tensor in theirs.state_dict().items()}, like=like)
    images = IMAGES[:, :, : config.image_shape[1]]
    with torch.no_grad():
        expected = theirs(torch.tensor(images.transpose(0, 3, 1, 2)))
    np.testing.assert_allclose(apply(params, images), expected.logits, rtol=1e-4, atol=1e-6)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        saved = file_names(config).to_jax(load_file(f"{folder}/model.safetensors"), like=like)
    jax.tree.map(np.testing.assert_array_equal, saved, params)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"architectures": ["ViTForMaskedImageModeling"]}, "'ViTForMaskedImageModeling'"),
        ({"model_type": "deit"}, "model_type 'deit'"),
    ],
)
def test_an_unsupported_configuration_is_refused(change, message):
    with pytest.raises(UserError, match=message):
        from_hf(to_hf(CONFIG) | change)


def test_images_of_another_size_are_refused():
    apply, params = functional(ViT(CONFIG, rngs=nnx.Rngs(0)))
    with pytest.raises(UserError, match=r"images must be \[8, 12, 3\], got \[8, 8, 3\]"):
        apply(params, IMAGES[:, :, :8])
