"""Frozen parameters in low precision are stored as they are, and computed with as if they were float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxtrain as jt
from jaxtrain import optim
from jaxtrain.distributed import make_mesh, shard
from jaxtrain.losses import cross_entropy
from jaxtrain.models import LoraConfig, lora, nf4
from jaxtrain.passes.numerics.stored import convert_where_used
from jaxtrain.planning.state_parts import state_parts
from jaxtrain.program.equations import visit

LAYERS, WIDTH, CLASSES = 3, 8, 11
TOKENS = np.random.default_rng(0).integers(0, CLASSES, (4, 6)).astype(np.int32)
CONFIG = LoraConfig("kernel", r=2)


def apply(params, tokens):
    """A tied embedding, scanned and rematerialized linear layers with a bias, and a norm."""

    @jt.block
    def layer(x, kernel, bias):
        return x + jnp.tanh(x @ kernel.astype(x.dtype) + bias[None, None])  # as nnx.Linear converts it

    x = params["embedding"][tokens]
    x, _ = lax.scan(lambda x, layers: (layer(x, *layers), None), x, (params["kernel"], params["bias"]))
    return (x * params["scale"][None, None]) @ params["embedding"].T


def loss_fn(params, batch, rng):
    logits = lora.with_adapters(apply, CONFIG)(params, batch[:, :-1])
    return jt.Loss.of(cross_entropy(logits, batch[:, 1:])), {}


def base(dtype):
    draw = np.random.default_rng(1)
    shapes = {
        "embedding": (CLASSES, WIDTH),
        "kernel": (LAYERS, WIDTH, WIDTH),
        "bias": (LAYERS, WIDTH),
        "scale": (WIDTH,),
    }
    return {name: jnp.asarray(draw.normal(size=s), jnp.bfloat16).astype(dtype) for name, s in shapes.items()}


def parameters(dtype):
    adapters = lora.init(jax.random.key(0), base(np.float32), CONFIG)
    return {"base": base(dtype), "lora": jax.tree.map(lambda x: x + 0.1, adapters)}


def step_in(precision, **options):
    return jt.train_step(loss_fn, optim.adamw(1e-2), precision=precision, frozen=lora.frozen, clip_norm=1.0, **options)


def after_updates(step, dtype):
    state = step.init(parameters(dtype))
    for _ in range(2):
        state, metrics = step(state, TOKENS)
    return state, metrics


def assert_alike(precision, tolerance, **options):
    step = step_in(precision, **options)
    (low, metrics), (wide, expected) = after_updates(step, jnp.bfloat16), after_updates(step, np.float32)
    assert {x.dtype.name for x in jax.tree.leaves(low.params["base"])} == {"bfloat16"}
    jax.tree.map(np.testing.assert_array_equal, low.params["base"], base(jnp.bfloat16))
    for found, of_wide in ((low.params["lora"], wide.params["lora"]), (metrics, expected)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), found, of_wide)


def test_frozen_bfloat16_parameters_train_adapters_as_their_float32_copies_do():
    assert_alike("bf16", 0)


@pytest.mark.parametrize(
    ("precision", "tolerance", "options"),
    [
        ("bf16", 0, {"remat": "full", "unroll": True, "accumulate": 2}),
        ("bf16_compute", 0, {"ema": 0.9}),
        ("fp32", 1e-6, {"remat": "dots"}),
        ("fp64", 1e-13, {"accumulate": 2}),
        ("fp16", 1e-6, {"loss_scale": jt.static_loss_scale(8.0)}),
    ],
)
def test_frozen_storage_changes_no_number_in_any_precision(precision, tolerance, options):
    with jax.enable_x64(precision == "fp64"):
        assert_alike(precision, tolerance, **options)


def test_frozen_storage_changes_no_number_on_a_mesh():
    step = step_in("bf16", accumulate=2)
    on_mesh = shard(step, make_mesh("fsdp=2", jax.devices()[:2]), None)
    (low, metrics), (expected, of_one) = after_updates(on_mesh, jnp.bfloat16), after_updates(step, np.float32)
    assert {x.dtype.name for x in jax.tree.leaves(low.params["base"])} == {"bfloat16"}
    np.testing.assert_allclose(metrics["loss"], of_one["loss"], rtol=1e-3)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-3), low.params["lora"], expected.params["lora"]
    )


def test_every_use_of_a_frozen_parameter_has_the_numbers_of_its_float32_copy():
    def uses(w, rows):
        moved = w.T, w[1:3], w[::-1].reshape(2, 12), w[rows], lax.dynamic_slice(w, (rows[0], 0), (2, 3)), w[None]
        scanned = lax.scan(lambda x, row: (jnp.tanh(x + row), x), jnp.zeros(6), w)
        computed = -w / 3, jnp.exp(w), w.sum(0), jnp.cumsum(w, 1), w * 0.1, jnp.sort(w), w @ w.T
        return *moved, *computed, scanned, *(jnp.exp(x) for x in moved)

    w, rows = jax.random.normal(jax.random.key(0), (4, 6), jnp.bfloat16), jnp.array([2, 0, 2])
    found, expected = convert_where_used(uses, np.float32)(w, rows), uses(w.astype(np.float32), rows)
    jax.tree.map(functools.partial(np.testing.assert_array_equal, strict=True), found, expected)


def test_no_converted_copy_of_all_layers_is_computed():
    """Neither a master of the frozen kernels, nor their conversions as residuals, nor their gradients."""
    for precision, platform in (("bf16", "gpu"), ("bf16_compute", "gpu"), ("fp32", "cpu")):
        step = step_in(precision).for_platform(platform)
        state = step.shapes(parameters(jnp.bfloat16))
        assert stacks_of_kernels(step, state) == set(), precision
    parts = {(part.name, part.dtype): part.bytes for part in state_parts(state, lora.frozen)}
    trained = sum(x.nbytes for x in jax.tree.leaves(parameters(np.float32)["lora"]))
    assert parts == {
        ("frozen parameters", "bfloat16"): 2 * sum(x.size for x in jax.tree.leaves(base(np.float32))),
        ("trained parameters", "float32"): trained,
        ("optimizer state", "float32"): 2 * trained + 4,  # and the learning rate
        ("optimizer state", "int32"): 8,  # counts of updates
    }


def stacks_of_kernels(step, state):
    """Return the arrays with the elements of the kernels of all layers that a step computes."""
    avals = [v.aval for e in visit(jax.make_jaxpr(step.pure)(state, TOKENS).jaxpr) for v in e.outvars]
    stacks = (x for x in avals if x.size >= LAYERS * WIDTH**2 and x.shape[0] == LAYERS)
    return {str(x) for x in stacks if x.shape[1:] != (4, 5, WIDTH)}  # but activations


def test_a_quantized_kernel_of_a_low_precision_model_is_multiplied_by_not_merged():
    """Its dtype is that of the model, and the activations are float32: the program converts it."""
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in base(jnp.bfloat16).items()}
    quantized = jax.eval_shape(lambda params: nf4.quantize_params(params, "kernel"), shapes)
    adapters = jax.eval_shape(lambda params: lora.init(jax.random.key(0), params, CONFIG), quantized)
    step = step_in("bf16").for_platform("gpu")
    state = step.shapes({"base": quantized, "lora": adapters})
    assert stacks_of_kernels(step, state) == set()
    traced = jax.make_jaxpr(step.pure)(state, TOKENS)
    shaped = [v.aval.shape for e in visit(traced.jaxpr) for v in e.outvars if e.primitive.name == "dot_general"]
    assert (WIDTH, WIDTH) not in shaped  # no A B, and no gradient of a kernel
    assert (WIDTH, 2) in shaped


def test_a_quantized_kernel_takes_4_127_bits_a_weight():
    kernel = jax.ShapeDtypeStruct((2, 4096, 11008), jnp.bfloat16)
    state = jax.eval_shape(lambda kernel: nf4.quantize_params({"kernel": kernel}, "kernel"), kernel)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert abs(8 * size / kernel.size - 4.127) < 5e-4
