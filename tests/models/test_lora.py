"""Low-rank adapters: unmerged, merged, trained with a frozen base, and stored in peft's format."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file

import jaxtrain as jt
from jaxtrain.interop.names import leaves
from jaxtrain.losses import cross_entropy
from jaxtrain.models import (
    GPT2,
    MLP,
    GPT2Config,
    LoraConfig,
    Sampling,
    functional,
    generate,
    load_adapters,
    lora,
    quantize_params,
    save_adapters,
    stream,
)
from jaxtrain.models.gpt2 import torch_names
from jaxtrain.models.layers.dropout import dropout
from jaxtrain.passes.memory.remat import remat
from jaxtrain.passes.numerics.autocast import autocast
from jaxtrain.program.equations import visit
from parity.sides.randomness import dropout_mask_fn
from tests.models.programs import widened

SIZES = GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2)
CONFIG = LoraConfig(r"blocks/(qkv|fc|mlp_proj)/kernel", r=3, alpha=5.0)
TOKENS = np.random.default_rng(0).integers(0, 11, size=(3, 6)).astype(np.int32)
APPLY, PARAMS = functional(GPT2(SIZES, rngs=nnx.Rngs(0)))
NAMES = torch_names()


def random_like(tree, scale=0.3):
    draw = np.random.default_rng(1)
    return jax.tree.map(lambda x: jnp.asarray(scale * draw.normal(size=x.shape), x.dtype), tree)


def some_adapters(config=CONFIG, params=PARAMS):
    return random_like(lora.init(jax.random.key(0), params, config))


def loss_of(apply):
    return lambda params, *rng: cross_entropy(apply(params, TOKENS[:, :-1], *rng), TOKENS[:, 1:]).sum()


@pytest.mark.parametrize("policy", ["none", "full", "names:hidden"])
def test_merged_and_unmerged_adapters_give_the_same_loss_and_gradients(policy):
    adapters = some_adapters()
    unmerged, plain = loss_of(lora.with_adapters(APPLY, CONFIG)), loss_of(APPLY)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        base, wide = widened(PARAMS), widened(adapters)
        value, grads = jax.jit(jax.value_and_grad(remat(lambda a: unmerged({"base": base, "lora": a}), policy)))(wide)
        expected, expected_grads = jax.jit(jax.value_and_grad(lambda a: plain(lora.merge(base, a, CONFIG))))(wide)
        unadapted = jax.jit(plain)(base)
    np.testing.assert_allclose(value, expected, rtol=1e-13)
    assert abs(float(unadapted) - float(expected)) > 0.01
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-11), grads, expected_grads)
    assert all(np.abs(g).max() > 1e-3 for g in jax.tree.leaves(grads))


def test_initial_adapters_change_nothing_and_are_drawn_as_in_peft():
    adapters = lora.init(jax.random.key(0), PARAMS, CONFIG)
    found = dict(leaves(adapters))
    assert set(found) == {f"blocks/{name}/kernel/{half}" for name in ("qkv", "fc", "mlp_proj") for half in "ab"}
    for path, half in found.items():
        if path.endswith("b"):
            assert not half.any()
        else:
            bound = half.shape[1] ** -0.5
            assert 0.9 * bound < jnp.abs(half).max() <= bound
            assert not np.array_equal(half[0], half[1])
    plain, unmerged = jax.jit(APPLY)(PARAMS, TOKENS), jax.jit(lora.with_adapters(APPLY, CONFIG))
    np.testing.assert_array_equal(unmerged({"base": PARAMS, "lora": adapters}, TOKENS), plain)


def test_no_array_of_the_size_of_a_kernel_is_computed():
    config = LoraConfig(r"blocks/fc/kernel", r=3)
    adapters, plain = some_adapters(config), loss_of(APPLY)
    unmerged = loss_of(lora.with_adapters(APPLY, config))
    losses = {
        "unmerged": lambda a: unmerged({"base": PARAMS, "lora": a}),
        "merged": lambda a: plain(lora.merge(PARAMS, a, config)),
    }
    traced = {name: jax.make_jaxpr(jax.grad(loss))(adapters).jaxpr for name, loss in losses.items()}
    shapes = {name: {v.aval.shape for eqn in visit(t) for v in eqn.outvars} for name, t in traced.items()}
    assert not shapes["unmerged"] & {(8, 32), (2, 8, 32)}
    assert shapes["merged"] >= {(8, 32), (2, 8, 32)}
    assert (2, 3, 32) in shapes["unmerged"]


def test_only_the_adapters_are_trained():
    def loss_fn(params, batch, rng):
        losses = cross_entropy(apply(params, batch[:, :-1], None, rng=rng), batch[:, 1:])
        return jt.Loss(losses.sum(), losses.size), {}

    config = LoraConfig(CONFIG.targets, r=2, alpha=8, dropout=0.1)
    apply = lora.with_adapters(APPLY, config)
    step = jt.train_step(
        loss_fn, optax.adam(1e-2), precision="bf16", accumulate=3, remat="full", frozen=lora.frozen, clip_norm=1.0
    )
    before = {"base": PARAMS, "lora": lora.init(jax.random.key(0), PARAMS, config)}
    state = step.init(before)
    losses = []
    for _ in range(25):
        state, metrics = step(state, TOKENS)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.05
    jax.tree.map(np.testing.assert_array_equal, state.params["base"], PARAMS)
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(state.params["lora"]))
    moments = optax.tree.get(state.opt_state, "mu")
    assert sum(x.size for x in jax.tree.leaves(moments)) == sum(x.size for x in jax.tree.leaves(before["lora"]))


def test_dropout_applies_to_the_input_of_each_adapter_with_a_separate_mask():
    params, apply = {"base": PARAMS, "lora": some_adapters()}, lora.with_adapters(APPLY, replace(CONFIG, dropout=0.5))

    def loss_fn(params, batch, rng):
        return jt.Loss(apply(params, batch, rng=rng).sum(), 1), {}

    masks = jax.jit(dropout_mask_fn(loss_fn))(params, TOKENS, jax.random.key(0), None)
    assert [mask.shape for mask in masks] == [(18, 8), (18, 8), (18, 32)] * 2
    assert len({np.asarray(mask).tobytes() for mask in masks}) == 6
    whole = lora.with_adapters(APPLY, CONFIG)(params, TOKENS)
    assert np.abs(apply(params, TOKENS, rng=jax.random.key(0)) - whole).max() > 1e-3
    np.testing.assert_array_equal(apply(params, TOKENS), whole)


def test_dropout_of_a_kernel_that_is_used_otherwise_than_in_products_is_refused():
    """Only in x @ W does the adapter have an input to drop from."""
    base = {"w": jnp.ones((4, 4))}
    config = LoraConfig("w", r=2, dropout=0.5)
    apply = lora.with_adapters(lambda p, x: x @ p["w"].T, config)
    params = {"base": base, "lora": some_adapters(config, base)}
    apply(params, jnp.ones((1, 4)))
    assert "w is used otherwise than in x @ W" in refused(
        lambda: apply(params, jnp.ones((1, 4)), rng=jax.random.key(0))
    )


def test_the_mean_over_dropout_masks_is_the_product_without_dropout():
    x, halves = jnp.ones((2000, 8)), random_like({"a": jnp.ones((8, 2)), "b": jnp.ones((2, 1))})
    params = {"base": {"w": jnp.zeros((8, 1))}, "lora": {"w": halves}}
    apply = lora.with_adapters(lambda p, x: x @ p["w"], LoraConfig("w", r=2, alpha=2, dropout=0.5))
    dropped, whole = apply(params, x, rng=jax.random.key(0)), apply(params, x)
    assert dropped.std() > 0.01
    np.testing.assert_allclose(dropped.mean(), whole.mean(), atol=5 * float(dropped.std()) / 2000**0.5)


def test_a_kernel_that_is_used_otherwise_than_in_products_is_merged():
    def apply(params, x):
        w = params["w"]
        y = jax.lax.fori_loop(0, 2, lambda i, y: jnp.tanh(y @ w), x)
        _, y = jax.lax.scan(lambda c, _: (c, c @ w), y, None, length=2)
        y, _ = jax.lax.scan(lambda c, _: (c @ c, None), w + y[0], None, length=2)
        kept = jax.lax.cond(y.sum() > 0, lambda w: w @ w, lambda w: w, w)
        return y @ w.T + jnp.square(w).sum() + w.reshape(2, 8).sum() + jax.jit(jnp.tanh)(w) + kept, w

    config = LoraConfig("w", r=2, alpha=4)
    base = random_like({"w": jnp.ones((4, 4))})
    adapters, x = some_adapters(config, base), jnp.ones((4, 4))
    found = lora.with_adapters(apply, config)({"base": base, "lora": adapters}, x)
    expected = apply(lora.merge(base, adapters, config), x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), found, expected)


def test_under_autocast_a_biased_layer_stays_in_low_precision():
    base = {"w": jnp.ones((4, 3)), "b": jnp.ones(3)}
    config = LoraConfig("w", r=2)
    params = {"base": base, "lora": some_adapters(config, base)}
    layer = lora.with_adapters(lambda p, x: x @ p["w"] + p["b"][None], config)
    assert autocast(layer, jnp.bfloat16)(params, jnp.ones((2, 4))).dtype == jnp.bfloat16


def test_a_bias_is_added_to_a_transposed_product():
    def apply(params, x):
        product = jnp.tensordot(x, params["w"], 1)
        return jnp.swapaxes(product, 0, 1) + params["b"][None, None]

    config, base = LoraConfig("w", r=1), random_like({"w": jnp.ones((4, 4)), "b": jnp.ones(4)})
    adapters, x = some_adapters(config, base), random_like(jnp.ones((4, 4, 4)))
    found = lora.with_adapters(apply, config)({"base": base, "lora": adapters}, x)
    np.testing.assert_allclose(found, apply(lora.merge(base, adapters, config), x), rtol=1e-5, atol=1e-6)


def test_initial_norms_of_dora_change_nothing_and_have_no_inverse():
    config = replace(CONFIG, dora=True)
    adapters = lora.init(jax.random.key(0), PARAMS, config)
    kernel, norms = PARAMS["blocks"]["fc"]["kernel"], adapters["blocks"]["fc"]["kernel"]["m"]
    np.testing.assert_allclose(norms, np.linalg.norm(kernel, axis=1), rtol=1e-6)
    merged = lora.merge(PARAMS, adapters, config)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), merged, PARAMS)
    assert "cannot be unmerged" in refused(lambda: lora.unmerge(merged, adapters, config))


def test_dropout_of_dora_applies_to_the_base_product_of_what_is_added():
    """As in peft: x W + (m / norm - 1) · dropout(x) W + m / norm · α/r · (dropout(x) A) B."""
    base, x = {"w": random_like(jnp.ones((4, 3)))}, random_like(jnp.ones((5, 4)))
    config = LoraConfig("w", r=2, dora=True, dropout=0.5)
    adapters = some_adapters(config, base)
    halves, key = adapters["w"], jax.random.key(0)
    found = lora.with_adapters(lambda p, x: x @ p["w"], config)({"base": base, "lora": adapters}, x, rng=key)
    dropped = dropout(x, 0.5, jax.random.fold_in(key, 0))
    delta = config.scale * halves["a"] @ halves["b"]
    factor = (halves["m"] / jnp.linalg.norm(base["w"] + delta, axis=0))[None]
    expected = x @ base["w"] + (factor - 1) * (dropped @ base["w"]) + factor * (dropped @ delta)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_unmerging_restores_the_base_up_to_rounding():
    adapters = some_adapters()
    merged = lora.merge(PARAMS, adapters, CONFIG)
    back = lora.unmerge(merged, adapters, CONFIG)
    for (path, x), (_, y), (_, z) in zip(leaves(PARAMS), leaves(merged), leaves(back), strict=True):
        if f"{path}/a" in dict(leaves(adapters)):
            assert np.abs(x - y).max() > 0.01
            np.testing.assert_allclose(x, z, rtol=0, atol=2e-7 * float(np.abs(y).max()))
        else:
            np.testing.assert_array_equal(x, y)


def test_unstacked_kernels_are_adapted():
    apply, params = functional(MLP((6, 5, 4), rngs=nnx.Rngs(0)))
    config = LoraConfig(r"layers/\d/kernel", r=2, rslora=True)
    adapters = some_adapters(config, params)
    x = np.random.default_rng(0).normal(size=(3, 6)).astype(np.float32)
    found = lora.with_adapters(apply, config)({"base": params, "lora": adapters}, x)
    np.testing.assert_allclose(found, apply(lora.merge(params, adapters, config), x), rtol=1e-5)


def refused(call):
    with pytest.raises(jt.UserError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_targets_that_match_nothing_or_are_not_kernels_are_refused():
    assert "'kernel' match no whole path" in refused(lambda: some_adapters(LoraConfig("kernel")))
    assert "blocks/fc/bias [2, 32]" in refused(lambda: some_adapters(LoraConfig("blocks/fc/.*")))
    conv = {"conv": {"kernel": jnp.ones((3, 3, 2, 2))}}
    assert "conv/kernel [3, 3, 2, 2]" in refused(lambda: some_adapters(LoraConfig(".*"), conv))
    assert "r must be at least 1, got 0" in refused(lambda: LoraConfig("w", r=0))
    assert "LoRA dropout must be in [0, 1), got 1.0" in refused(lambda: LoraConfig("w", dropout=1.0))


def test_adapters_of_another_model_are_refused():
    adapters = some_adapters()
    alone = {"w": {"a": jnp.ones((4, 2)), "b": jnp.ones((2, 3))}}
    assert "w/a" in refused(lambda: lora.merge(PARAMS, alone, CONFIG))
    _, wider = functional(GPT2(GPT2Config(11, 8, 16, 2, 2), rngs=nnx.Rngs(0)))
    assert "use the model they belong to" in refused(lambda: lora.merge(wider, adapters, CONFIG))


def test_a_peft_folder_is_written_and_read_to_the_bit(tmp_path):
    adapters = some_adapters()
    save_adapters(tmp_path, adapters, CONFIG, NAMES, base="org/tiny")
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert len(tensors) == 2 * 2 * 3
    name = "base_model.model.transformer.h.1.attn.c_attn.lora_A.weight"
    np.testing.assert_array_equal(tensors[name], adapters["blocks"]["qkv"]["kernel"]["a"][1].T)
    read, config = load_adapters(tmp_path, PARAMS, NAMES)
    jax.tree.map(np.testing.assert_array_equal, read, adapters)
    assert (config.r, config.alpha, config.dropout, config.rslora) == (3, 5.0, 0.0, False)
    assert lora.init(jax.random.key(0), PARAMS, config).keys() == read.keys()
    assert "contains adapter_model.safetensors already" in refused(
        lambda: save_adapters(tmp_path, adapters, CONFIG, NAMES)
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"peft_type": "LOHA"}, {"lora_bias": True}, {"trainable_token_indices": [1]},
        {"rank_pattern": {"c_attn": 2}}, {"init_lora_weights": "pissa_niter_4"},
        {"r": "3"}, {"r": 0}, {"lora_alpha": None},
    ],
)  # fmt: skip
def test_an_unsupported_adapter_configuration_is_refused(tmp_path, changes):
    save_adapters(tmp_path, some_adapters(), CONFIG, NAMES)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    assert next(iter(changes)) in refused(lambda: load_adapters(tmp_path, PARAMS, NAMES))


def test_parameters_that_are_trained_themselves_are_written_and_read_to_the_bit(tmp_path):
    for number, (trained, settings) in enumerate(
        {
            r".*/bias": ("all", None),
            r"blocks/(qkv|fc|mlp_proj)/bias": ("lora_only", None),
            r"ln_f/.*|wpe": ("none", ["transformer.ln_f", "transformer.wpe"]),
        }.items()
    ):
        config = replace(CONFIG, trained=trained)
        adapters = some_adapters(config)
        folder = tmp_path / str(number)
        save_adapters(folder, adapters, config, NAMES)
        stored = json.loads((folder / "adapter_config.json").read_text())
        assert (stored["bias"], stored["modules_to_save"]) == settings
        read, found = load_adapters(folder, PARAMS, NAMES)
        jax.tree.map(np.testing.assert_array_equal, read, adapters)
        np.testing.assert_array_equal(lora.merge(PARAMS, read, found)["ln_f"]["bias"], merged_bias(adapters))
    assert "cannot be unmerged" in refused(lambda: lora.unmerge(PARAMS, adapters, config))
    half = some_adapters(replace(CONFIG, trained="ln_f/scale"))
    assert "ln_f/bias must be trained too" in refused(lambda: save_adapters(tmp_path / "half", half, CONFIG, NAMES))
    tied = replace(CONFIG, trained="wte")
    save_adapters(tmp_path / "tied", some_adapters(tied), tied, NAMES)
    assert "trains transformer.wte.weight apart" in refused(lambda: load_adapters(tmp_path / "tied", PARAMS, NAMES))
    assert "match no whole path" not in refused(lambda: some_adapters(replace(CONFIG, trained="blocks/qkv/kernel")))


def merged_bias(adapters):
    return adapters["ln_f"]["bias"] if "bias" in adapters.get("ln_f", {}) else PARAMS["ln_f"]["bias"]


def test_mis_shaped_tensors_are_named(tmp_path):
    save_adapters(tmp_path, some_adapters(), CONFIG, NAMES)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "r": 4}))
    assert "mis-shaped base_model.model.transformer.h.0" in refused(lambda: load_adapters(tmp_path, PARAMS, NAMES))


@pytest.mark.parametrize("form", ["lora", "quantized dora"])
def test_texts_generated_through_adapters_are_those_of_the_merged_model(form):
    config = replace(CONFIG, dora=form != "lora")
    model = GPT2(SIZES, rngs=nnx.Rngs(0))
    prompts, mask = TOKENS[:, :4], np.array([[0, 0, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1]], bool)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        base = widened(random_like(PARAMS))
        if form != "lora":
            base = quantize_params(base, config.targets)
        adapters = widened(some_adapters(config, base))
        merged, adapted = lora.merge(base, adapters, config), lora.adapted(base, adapters, config)
        drawn = {"new_tokens": 4, "sampling": Sampling(1.0)}
        expected = np.asarray(generate(model, merged, prompts, mask=mask, **drawn))
        assert len(np.unique(expected)) > 5
        np.testing.assert_array_equal(generate(model, adapted, prompts, mask=mask, **drawn), expected)
        assert [*stream(model, adapted, prompts[2], **drawn)] == [*stream(model, merged, prompts[2], **drawn)]
        program = jax.make_jaxpr(lambda adapted: generate(model, adapted, prompts, 4, mask=mask))(adapted)
    kernels = {base["blocks"][name]["kernel"].shape for name in ("qkv", "fc", "mlp_proj")}
    # A kernel or a stack of them, merged; of a quantized one a layer is dequantized at a time.
    unwanted = kernels if form != "lora" else kernels | {shape[1:] for shape in kernels}
    shapes = {out.aval.shape for eqn in visit(program) for out in eqn.outvars if eqn.primitive.name == "add"}
    assert not unwanted & shapes
