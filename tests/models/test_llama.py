"""The Llama family equals transformers in float64 for every setting; packing, windows, config conversion, precision."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from jaxtrain.errors import UserError
from jaxtrain.losses import cross_entropy
from jaxtrain.models import functional
from jaxtrain.models.layers.rope import Rope
from jaxtrain.models.llama import Llama, LlamaConfig, from_hf, to_hf, torch_names
from jaxtrain.passes.memory.remat import remat
from jaxtrain.passes.numerics.autocast import autocast
from jaxtrain.program.equations import visit
from parity.cases.built_in import token_batches
from parity.oracle.in_jax import in_float64
from parity.oracle.in_torch import InFloat64
from tests.models.programs import widened

TOKENS = np.random.default_rng(0).integers(0, 31, size=(3, 9)).astype(np.int32)
LONG = np.random.default_rng(1).integers(0, 31, size=(1, 260)).astype(np.int32)
SIZES = {
    "vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64, "initializer_range": 0.3,
}  # fmt: skip
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama3": LlamaConfig(**SIZES, rope_parameters=Rope(rope_type="llama3", factor=8.0, **LLAMA3)),
    "yarn": LlamaConfig(
        **SIZES, rope_parameters=Rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
    ),
    "mistral": LlamaConfig(**SIZES, model_type="mistral", sliding_window=3),
    "qwen2": LlamaConfig(**SIZES, model_type="qwen2", tie_word_embeddings=True),
    "qwen3": LlamaConfig(
        **{**SIZES, "head_dim": 8}, model_type="qwen3", sliding_window=4, pad_token_id=int(TOKENS[1, 4])
    ),
    "qwen3-by-layer": LlamaConfig(
        **SIZES, model_type="qwen3", sliding_window=3, layer_types=("sliding_attention", "full_attention")
    ),
    "smollm3": LlamaConfig(
        **{**SIZES, "num_hidden_layers": 3}, model_type="smollm3", tie_word_embeddings=True, attention_bias=True,
        sliding_window=3, layer_types=("full_attention", "sliding_attention", "full_attention"),
        no_rope_layers=(1, 0, 1),
    ),
}  # fmt: skip


def model(**changes):
    config = dataclasses.replace(CONFIGS["llama"], **changes)
    apply, params = functional(Llama(config, rngs=nnx.Rngs(0)))
    return apply, params


def randomized_model(config):
    """Return the float64 model of transformers, with no scale at 1 and no bias at 0."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = token_batches.torch_model(to_hf(config))
        with torch.no_grad():
            for p in theirs.parameters():
                p += 0.1 * torch.randn_like(p)
    return theirs.double()


@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradients_equal_transformers_in_float64(name):
    config = CONFIGS[name]
    theirs, names = randomized_model(config), torch_names(config)
    inputs = LONG if name == "smollm3" else TOKENS
    tokens = torch.tensor(inputs, dtype=torch.int64)
    with InFloat64():
        logits = theirs(tokens).logits
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    apply, like = functional(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))

    def loss(params):
        logits = apply(params, inputs)
        return cross_entropy(logits[:, :-1], inputs[:, 1:]).mean(), logits

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        params = names.to_jax({k: v.numpy() for k, v in theirs.state_dict().items()}, like=like)
        grads, ours = jax.jit(jax.grad(in_float64(loss), has_aux=True))(params)
    np.testing.assert_allclose(ours, logits.detach().numpy(), rtol=0, atol=1e-12)
    expected = {k: p.grad.numpy() for k, p in theirs.named_parameters()}
    found = names.to_torch(grads)
    assert found.keys() == expected.keys()
    scale = max(np.abs(g).max() for g in expected.values())
    for key, grad in expected.items():
        np.testing.assert_allclose(found[key], grad, rtol=0, atol=1e-12 * scale, err_msg=key)
    if config.pad_token_id is not None:
        assert not grads["embed_tokens"][config.pad_token_id].any()


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_round_trip_through_transformers(name):
    config = CONFIGS[name]
    written = to_hf(config)
    read = AutoConfig.for_model(written["model_type"], **{k: v for k, v in written.items() if k != "model_type"})
    assert from_hf(written) == config
    assert from_hf(read.to_dict()) == config


def test_an_older_config_is_read_as_transformers_reads_it():
    older = {
        "model_type": "llama", "vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64, "rope_theta": 5e5, "rms_norm_eps": 1e-5,
        "rope_scaling": {"type": "linear", "factor": 2.0}, "torch_dtype": "bfloat16", "pretraining_tp": 1,
    }  # fmt: skip
    config = from_hf(older)
    assert config.rope_parameters == Rope(rope_theta=5e5, rope_type="linear", factor=2.0)
    assert (config.num_key_value_heads, config.head_dim, config.rms_norm_eps) == (4, 4, 1e-5)
    assert from_hf({**older, "model_type": "mistral"}).sliding_window == 4096
    assert from_hf({**older, "model_type": "qwen3"}).head_dim == 128
    assert from_hf({**older, "model_type": "qwen2", "sliding_window": 8}).sliding_window is None


WINDOW = {"use_sliding_window": True, "sliding_window": 8}


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen2", {"sliding_window": 8}),
        ("qwen2", {"use_sliding_window": True, "num_hidden_layers": 30}),
        ("qwen2", {**WINDOW, "max_window_layers": 3}),
        ("qwen3", {**WINDOW, "max_window_layers": 0}),
        ("qwen3", {**WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 3}),
        ("smollm3", {}),
        ("smollm3", {**WINDOW, "no_rope_layer_interval": 3}),
        ("smollm3", {"no_rope_layers": [0, 1, 1, 0, 1, 1, 0]}),
        ("smollm3", {"no_rope_layers": [1] * 6, "layer_types": ["full_attention"] * 6}),
    ],
)
def test_the_kinds_of_layers_equal_transformers(model_type, changes):
    settings = {
        "vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 6, "num_attention_heads": 4, "pad_token_id": None,
        **changes,
    }  # fmt: skip
    layers = settings["num_hidden_layers"]
    theirs, ours = AutoConfig.for_model(model_type, **settings), from_hf({"model_type": model_type, **settings})
    kind = "full_attention" if ours.sliding_window is None else "sliding_attention"
    assert list(ours.layer_types or [kind] * layers) == theirs.layer_types
    if kind == "sliding_attention":
        assert ours.sliding_window == theirs.sliding_window
    rotary = theirs.no_rope_layers[:layers] if model_type == "smollm3" else [1] * layers
    assert list(ours.no_rope_layers or [1] * layers) == rotary
    assert ours.num_key_value_heads == theirs.num_key_value_heads
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.rope_parameters.rope_theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma"}, "model_type 'gemma' is not supported"),
        ({"model_type": "mixtral"}, "model_type 'mixtral' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported: only 'silu' is"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_type 'linear' needs factor"),
        ({"rope_parameters": {"rope_type": "default", "spin": 2}}, "spin 2 in rope_parameters is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config {'bits': 4} is not supported"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "layer_types": ["chunked"] * 2},
            "layer_types 'chunked' is not supported",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": None}, "'dynamic' is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention .* is not supported"),
        ({"is_causal": False}, "is_causal False is not supported: only True is"),
        ({"sliding_window": 4}, "sliding_window 4 is not a setting of llama"),
        ({"layer_types": ["sliding_attention"] * 2}, r"layer_types \['sliding_attention'\] is not a setting of llama"),
        (
            {"model_type": "mistral", "sliding_window": 4, "layer_types": ["full_attention"] * 2},
            r"layer_types \['full_attention'\] is not a setting of mistral",
        ),
        (
            {"model_type": "qwen3", "layer_types": ["sliding_attention"] * 2},
            "layer_types 'sliding_attention' needs sliding_window",
        ),
        (
            {"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"] * 2},
            "layer_types must have num_hidden_layers 2 entries, got 4",
        ),
        (
            {"model_type": "qwen3", "layer_types": ["full_attention"]},
            "layer_types must have num_hidden_layers 2 entries, got 1",
        ),
        (
            {"model_type": "smollm3", "no_rope_layers": [0]},
            "no_rope_layers must have num_hidden_layers 2 entries, got 1",
        ),
        (
            {"model_type": "smollm3", "no_rope_layers": []},
            "no_rope_layers must have num_hidden_layers 2 entries, got 0",
        ),
        ({"no_rope_layers": [0, 1]}, r"no_rope_layers \(0, 1\) is not a setting of llama"),
        ({"num_hidden_layers": 10**10}, "num_hidden_layers must be at most 10000, got 10000000000"),
        ({"model_type": "qwen2", "attention_bias": True}, "attention_bias True is not a setting of qwen2"),
    ],
)
def test_an_unsupported_configuration_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        from_hf({**to_hf(CONFIGS["llama"]), **changes})


ROPES = {
    "default": Rope(rope_theta=5e5),
    "linear": Rope(rope_type="linear", factor=3.0),
    "llama3": Rope(rope_theta=5e5, rope_type="llama3", factor=8.0, **LLAMA3),
    "yarn": Rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=4096),
    "yarn-without-a-ramp": Rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=6),
    "yarn-temperature": Rope(
        rope_type="yarn", factor=40.0, original_max_position_embeddings=4096, mscale=0.7, mscale_all_dim=1.1,
        beta_fast=16.0, truncate=False,
    ),
    "yarn-given": Rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=4096, attention_factor=1.5),
}  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
def test_rotary_frequencies_equal_transformers(name):
    rope = ROPES[name]
    for head_dim in (8, 64, 128):
        sizes = {**SIZES, "head_dim": head_dim, "max_position_embeddings": 65536}
        written = to_hf(LlamaConfig(**sizes, rope_parameters=rope))
        config = AutoConfig.for_model("llama", **{k: v for k, v in written.items() if k != "model_type"})
        compute = ROPE_INIT_FUNCTIONS.get(rope.rope_type, LlamaRotaryEmbedding.compute_default_rope_parameters)
        frequencies, magnitude = compute(config)
        # About one in a hundred of PyTorch's powers is not rounded to the nearest float32.
        np.testing.assert_array_max_ulp(rope.frequencies(head_dim), frequencies.numpy(), 1)
        assert rope.magnitude == pytest.approx(magnitude, rel=1e-15)


def test_packed_sequences_equal_separate_sequences():
    apply, params = model()
    lengths = (4, 3, 2)
    segments = np.repeat([1, 2, 3], lengths)[None]
    positions = np.concatenate([np.arange(n) for n in lengths])[None]
    with jax.enable_x64(True):
        params = widened(params)
        packed = apply(params, TOKENS[:1], None, positions, segments)
        start = 0
        for n in lengths:
            alone = apply(params, TOKENS[:1, start : start + n])
            np.testing.assert_allclose(packed[:, start : start + n], alone, rtol=0, atol=1e-13)
            start += n


def test_attention_is_causal_and_limited_to_the_window():
    changed = TOKENS.copy()
    changed[:, 2] = (changed[:, 2] + 1) % 31
    for window, last in ((None, 9), (3, 5), (1, 3)):
        apply, params = model(model_type="mistral", sliding_window=window, num_hidden_layers=1)
        affected = np.abs(np.asarray(apply(params, changed) - apply(params, TOKENS))).max(axis=(0, 2)) > 0
        assert affected.tolist() == [2 <= i < last for i in range(9)]


def test_float64_stays_float64_and_products_are_in_low_precision_under_autocast():
    apply, params = model(model_type="qwen3", attention_dropout=0.1)

    def loss(params, rng):
        return cross_entropy(apply(params, TOKENS[:, :-1], rng), TOKENS[:, 1:]).sum()

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        found = list(visit(jax.make_jaxpr(jax.value_and_grad(loss))(widened(params), jax.random.key(0)).jaxpr))
    # Only inputs such as positions and frequencies may be float32, no result.
    low = [eqn for eqn in found if "float32" in {v.aval.dtype.name for v in eqn.outvars if hasattr(v.aval, "dtype")}]
    assert not low, low
    cast = autocast(loss, jnp.bfloat16)
    found = list(visit(jax.make_jaxpr(jax.grad(cast))(params, jax.random.key(0)).jaxpr))
    products = [eqn for eqn in found if eqn.primitive.name == "dot_general"]
    assert len(products) >= 27
    assert all(v.aval.dtype == jnp.bfloat16 for eqn in products for v in eqn.invars)
    roots = [eqn for eqn in found if eqn.primitive.name in ("rsqrt", "cos", "sin")]
    assert roots
    assert all(v.aval.dtype == np.float32 for eqn in roots for v in eqn.outvars)


@pytest.mark.parametrize("policy", ["full", "names:attention,hidden"])
def test_rematerialised_gradients_are_the_same_with_dropout(policy):
    apply, params = model(attention_dropout=0.3)

    def loss(params):
        return cross_entropy(apply(params, TOKENS, jax.random.key(1)), TOKENS).sum()

    plain, again = jax.jit(jax.grad(loss))(params), jax.jit(jax.grad(remat(loss, policy)))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), plain, again)
    undropped = jax.jit(jax.grad(lambda params: cross_entropy(apply(params, TOKENS), TOKENS).sum()))(params)
    assert not np.allclose(plain["embed_tokens"], undropped["embed_tokens"], atol=1e-3)


def test_torch_names_cover_every_parameter():
    for config in CONFIGS.values():
        _, like = functional(nnx.eval_shape(lambda config=config: Llama(config, rngs=nnx.Rngs(0))))
        theirs = randomized_model(config).state_dict()
        assert set(torch_names(config).to_torch(jax.tree.map(lambda x: np.zeros(x.shape), like))) == set(theirs) - set(
            torch_names(config).tied
        )


def test_query_heads_that_are_not_divisible_by_the_key_and_value_heads_are_refused():
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=3)
    with pytest.raises(UserError, match="num_attention_heads 4 is not divisible by num_key_value_heads 3: change one"):
        Llama(config, rngs=nnx.Rngs(0))
