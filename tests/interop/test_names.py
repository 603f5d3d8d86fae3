"""The name table: exact round trips, PyTorch's meaning of every layout, and all mismatches in one message."""

import jax
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import jaxtrain as jt
from jaxtrain.interop import (
    AS_IS,
    CONV,
    LINEAR,
    NameTable,
    TorchParam,
    bias_to_heads,
    linear_after_flatten,
    linear_from_heads,
    linear_to_heads,
)

SIZE = st.integers(1, 4)
LAYOUTS = st.one_of(
    st.tuples(st.just(AS_IS), st.lists(SIZE, max_size=3).map(tuple)),
    st.tuples(st.just(LINEAR), st.tuples(SIZE, SIZE)),
    st.tuples(st.just(CONV), st.lists(SIZE, min_size=3, max_size=5).map(tuple)),
    st.builds(lambda out, h, d: (linear_to_heads(h, d), (h * d, out)), SIZE, SIZE, SIZE),
    st.builds(lambda out, h, d: (linear_from_heads(h, d), (out, h * d)), SIZE, SIZE, SIZE),
    st.builds(lambda h, d: (bias_to_heads(h, d), (h * d,)), SIZE, SIZE),
    st.builds(
        lambda out, c, h, w: (linear_after_flatten(c, h, w), (out, c * h * w)),
        SIZE, SIZE, SIZE, SIZE,
    ),
)  # fmt: skip
DTYPES = st.sampled_from([np.float32, np.float64, np.float16, np.int32])


def numbered(shape, dtype, start=0):
    return (np.arange(np.prod(shape, dtype=int)) + start).reshape(shape).astype(dtype)


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        np.testing.assert_array_equal(a[name], b[name])


@given(st.lists(st.tuples(LAYOUTS, DTYPES, st.integers(0, 3)), min_size=1, max_size=4))
def test_round_trip_is_exact(leaves):
    params, tensors, like = {}, {}, {}
    for i, ((layout, shape), dtype, layers) in enumerate(leaves):
        torch_name = f"h.{{layer}}.p{i}" if layers else f"p{i}"
        names = [f"h.{layer}.p{i}" for layer in range(layers)] if layers else [f"p{i}"]
        params[f"outer/p{i}"] = TorchParam(torch_name, layout)
        tensors |= {name: numbered(shape, dtype, start=7 * j) for j, name in enumerate(names)}
        jax_shape = layout.to_jax(np.zeros(shape)).shape
        like[f"p{i}"] = np.zeros((layers, *jax_shape) if layers else jax_shape)
    table = NameTable(params)
    in_jax = table.to_jax(tensors, like={"outer": like})
    assert {name: x.shape for name, x in in_jax["outer"].items()} == {name: x.shape for name, x in like.items()}
    assert_same(table.to_torch(in_jax), tensors)
    assert_same(table.to_jax(table.to_torch(in_jax), like={"outer": like})["outer"], in_jax["outer"])


def test_linear_equals_torch_linear():
    weight, x = np.random.default_rng(0).normal(size=(3, 4)), np.random.default_rng(1).normal(size=(5, 4))
    expected = torch.nn.functional.linear(torch.tensor(x), torch.tensor(weight))
    np.testing.assert_allclose(x @ LINEAR.to_jax(weight), expected, rtol=1e-13)


def test_conv_equals_torch_conv2d():
    weight, x = np.random.default_rng(0).normal(size=(3, 2, 3, 2)), np.random.default_rng(1).normal(size=(1, 5, 6, 2))
    expected = torch.nn.functional.conv2d(torch.tensor(x.transpose(0, 3, 1, 2)), torch.tensor(weight))
    with jax.enable_x64(True):
        dimensions = ("NHWC", "HWIO", "NHWC")
        ours = jax.lax.conv_general_dilated(x, CONV.to_jax(weight), (1, 1), "VALID", dimension_numbers=dimensions)
    np.testing.assert_allclose(ours, expected.permute(0, 2, 3, 1), rtol=1e-12, atol=1e-14)


def test_linear_after_flatten_equals_torch_on_channels_first_inputs():
    weight, x = np.random.default_rng(0).normal(size=(3, 24)), np.random.default_rng(1).normal(size=(5, 2, 3, 4))
    expected = torch.nn.functional.linear(torch.tensor(x).flatten(1), torch.tensor(weight))
    ours = x.transpose(0, 2, 3, 1).reshape(5, 24) @ linear_after_flatten(2, 3, 4).to_jax(weight)
    np.testing.assert_allclose(ours, expected, rtol=1e-13)


TABLE = NameTable(
    {
        "wte": TorchParam("wte.weight"),
        "blocks/fc": TorchParam("h.{layer}.fc.weight", LINEAR),
        "head": TorchParam("head.weight", LINEAR),
    },
    tied={"lm_head.weight": "wte.weight"},
)
LIKE = {"wte": np.zeros((5, 4)), "blocks": {"fc": np.zeros((2, 4, 3))}, "head": np.zeros((4, 2))}


def valid_tensors():
    return {
        "wte.weight": numbered((5, 4), np.float32),
        "h.0.fc.weight": numbered((3, 4), np.float32),
        "h.1.fc.weight": numbered((3, 4), np.float32, 12),
        "head.weight": numbered((2, 4), np.float32),
    }


def mismatches(tensors):
    with pytest.raises(jt.UserError) as error:
        TABLE.to_jax(tensors, like=LIKE)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_all_mismatches_are_reported_at_once():
    tensors = valid_tensors()
    del tensors["wte.weight"], tensors["h.1.fc.weight"]
    message = mismatches(
        {**tensors, "head.weight": np.zeros((3, 4)), "h.2.fc.weight": np.zeros((3, 4)), "extra": np.ones(1)}
    )
    for mismatch in (
        "missing wte.weight",
        "missing h.1.fc.weight",
        "mis-shaped head.weight: (3, 4) for head (4, 2)",
        "unexpected extra",
        "unexpected h.2.fc.weight",
    ):
        assert mismatch in message
    assert "h.0.fc.weight" not in message


@pytest.mark.parametrize(
    ("layout", "wrong", "like"),
    [
        (CONV, (3, 4), (3, 3, 2, 4)),
        (linear_after_flatten(2, 3, 4), (3, 25), (24, 3)),
        (linear_after_flatten(2, 3, 4), (3,), (24, 3)),
        (LINEAR, (3,), (4, 3)),
    ],
)
def test_a_tensor_of_the_wrong_rank_or_size_is_reported_with_the_other_mismatches(layout, wrong, like):
    table = NameTable({"p": TorchParam("p.weight", layout), "q": TorchParam("q.weight")})
    with pytest.raises(jt.UserError, match=r"mis-shaped p\.weight.*; unexpected r") as error:
        table.to_jax({"p.weight": np.zeros(wrong), "r": np.zeros(1)}, like={"p": np.zeros(like), "q": np.zeros(1)})
    assert "missing q.weight" in str(error.value)


def test_layers_of_different_shapes_are_reported():
    assert "mis-shaped h." in mismatches({**valid_tensors(), "h.1.fc.weight": np.zeros((3, 5))})


def test_a_tied_tensor_is_optional_but_must_be_equal():
    tensors = valid_tensors()
    without = TABLE.to_jax(tensors, like=LIKE)
    tied = TABLE.to_jax({**tensors, "lm_head.weight": tensors["wte.weight"].copy()}, like=LIKE)
    np.testing.assert_array_equal(without["wte"], tied["wte"])
    assert "lm_head.weight" not in TABLE.to_torch(tied)
    message = mismatches({**tensors, "lm_head.weight": tensors["wte.weight"] + 1})
    assert "untied lm_head.weight: differs from wte.weight" in message


def test_a_table_that_does_not_match_the_model_names_unmatched_leaves_and_entries():
    with pytest.raises(jt.UserError, match=r"without an entry \['new'\], without a leaf \['head'\]"):
        TABLE.to_torch({"wte": LIKE["wte"], "blocks": LIKE["blocks"], "new": np.zeros(1)})


def _modules():
    from transformers import GPT2Config, GPT2LMHeadModel

    from jaxtrain.models import cnn, gpt2, mlp

    sizes = {"n_layer": 2, "n_embd": 4, "n_head": 2, "n_positions": 3, "vocab_size": 5}
    linear, conv = torch.nn.Linear, torch.nn.Conv2d
    return {
        "mlp": (
            mlp.torch_names(2),
            torch.nn.Sequential(torch.nn.Flatten(), linear(4, 3), torch.nn.ReLU(), linear(3, 2)),
        ),
        "cnn": (
            cnn.torch_names((4, 4, 3), 2, batch_norm=True),
            torch.nn.Sequential(
                conv(3, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.ReLU(), torch.nn.Flatten(), linear(8, 2)
            ),
        ),
        "gpt2": (gpt2.torch_names(), GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))),
    }


@pytest.mark.parametrize("model", ["mlp", "cnn", "gpt2"])
def test_a_table_is_in_the_order_of_pytorchs_parameters(model):
    table, module = _modules()[model]
    tensors = {name: p.detach().numpy() for name, p in module.named_parameters()}
    shapes = {path: _stacked(tensors, param) for path, param in table.params.items()}
    assert table.torch_order(shapes) == list(tensors)


def _stacked(tensors, param):
    own = tensors[param.name.replace("{layer}", "0")]
    layers = sum(param.name.replace("{layer}", str(i)) in tensors for i in range(9))
    return np.zeros((layers, *own.shape)) if "{layer}" in param.name else own
