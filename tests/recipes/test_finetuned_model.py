"""Pretrained weights in a fine-tuning run: read into shards, kept in the dtype of their files, created nowhere else."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx

import jaxtrain as jt
from jaxtrain.distributed import make_mesh, param_shardings, shard
from jaxtrain.models import (
    Llama,
    LlamaConfig,
    LoraConfig,
    functional,
    generate,
    lora,
    nf4,
    open_pretrained,
    save_pretrained,
)
from jaxtrain.recipes.finetuning.losses import preference_loss, supervised_loss
from jaxtrain.recipes.finetuning.trained_decoder import FineTunedModel
from jaxtrain.recipes.finetuning.zoo_decoder import ZooDecoder
from jaxtrain.run import Initial
from jaxtrain.runner import Unsaved

CONFIG = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=16,
)  # fmt: skip
KERNELS = "layers/.*/(gate|down|q)_proj/kernel"
ROWS = np.random.default_rng(0).integers(1, 32, size=(4, 8), dtype=np.int32)
BATCH = {
    "tokens": ROWS, "targets": np.roll(ROWS, -1, 1), "weight": np.ones((4, 8), np.float32),
    "positions": np.tile(np.arange(8, dtype=np.int32), (4, 1)), "segments": np.ones((4, 8), np.int32),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model in bfloat16, in shards."""
    _, params = functional(Llama(CONFIG, rngs=nnx.Rngs(0)))
    low = jax.tree.map(lambda x: np.asarray(x).astype(ml_dtypes.bfloat16), params)
    path = tmp_path_factory.mktemp("model")
    save_pretrained(path, low, CONFIG, max_shard_size=4000)
    assert len([*path.glob("*.safetensors")]) > 3
    return path


def task_of(model, loss_fn=None):
    loss = loss_fn or partial(supervised_loss, model, False)
    return jt.Task(
        init=model.init, load=model.load, loss_fn=loss, train=[], frozen=model.frozen, unsaved=model.frozen,
        sharding=model.sharding,
    )  # fmt: skip


def dtypes(tree):
    return {x.dtype.name for x in jax.tree.leaves(tree)}


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_parameters_are_read_into_shards_and_what_a_checkpoint_lacks_is_read_again(folder, monkeypatch):
    opened = open_pretrained(folder)
    model = FineTunedModel(decoder=ZooDecoder(opened), config=LoraConfig(KERNELS, r=2, dora=True), quantized=True)
    task, mesh = task_of(model), make_mesh("data=2,fsdp=2", jax.devices()[:4])
    whole = task.initial().params
    shapes = task.shapes().params
    assert jax.tree.map(lambda x: (x.shape, x.dtype), whole) == jax.tree.map(lambda x: (x.shape, x.dtype), shapes)
    # Every layer is quantized as in a stack, and adapters are those of the whole base.
    base = nf4.quantize_params(open_pretrained(folder, dtype=np.float32).params(), "layers/.*/kernel")
    equal(jax.tree.leaves(whole["base"]), jax.tree.leaves(base))
    adapters = lora.init(jax.random.key(0), base, model.config)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), whole["lora"], adapters)
    assert dtypes(whole["base"]) == {"uint8", "float32", "bfloat16"}

    shardings = param_shardings(shapes, mesh, task.sharding)
    like = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
    sharded = task.initial(Initial(like)).params
    assert jax.tree.map(lambda x: x.sharding, sharded) == shardings
    equal(sharded["base"], whole["base"])
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), sharded["lora"], whole["lora"])

    unsaved = Unsaved.of(task)
    saved = unsaved.saved(sharded)
    assert not jax.tree.leaves(saved["base"])
    monkeypatch.setattr(FineTunedModel, "init", lambda model: pytest.fail("nothing is created"))
    completed = unsaved.complete(saved, like)
    equal(completed, sharded)
    assert jax.tree.map(lambda x: x.sharding, completed) == shardings


def test_init_creates_what_load_leaves_out():
    def init():
        return jt.Initial({"base": jnp.zeros(3), "head": {"kernel": jnp.full(2, 4.0)}}, jnp.ones(1))

    def load(like):
        return {"base": None if like["base"] is None else jnp.arange(3.0), "head": None}

    task = jt.Task(init=init, load=load, loss_fn=lambda params, batch, rng: (jt.Loss(0.0, 1.0), {}), train=[])
    made = task.initial()
    equal(made, jt.Initial({"base": jnp.arange(3.0), "head": {"kernel": jnp.full(2, 4.0)}}, jnp.ones(1)))
    shapes = task.shapes()
    only = task.initial(Initial({"base": None, "head": shapes.params["head"]}))
    assert only.params["base"] is None
    equal(only.params["head"], made.params["head"])
    nothing = task.initial(Initial({"base": None, "head": {"kernel": None}}))
    assert nothing == Initial({"base": None, "head": {"kernel": None}})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_frozen_weights_in_bfloat16_give_the_bits_of_the_same_in_float32(folder, precision):
    for is_dpo in (False, True):
        bits = []
        for dtype in (None, np.float32):
            opened = open_pretrained(folder, dtype=dtype)
            config = None if is_dpo else LoraConfig(KERNELS, r=2)
            model = FineTunedModel(decoder=ZooDecoder(opened), config=config, keeps_base=is_dpo)
            batch = {name: np.concatenate([x, x[::-1]], 1) for name, x in BATCH.items()} if is_dpo else BATCH
            task = task_of(model, partial(preference_loss, model, 0.1) if is_dpo else None)
            # The change of a parameter is its gradient.
            step = jt.train_step(task.loss_fn, optax.sgd(1.0), precision=precision, frozen=model.frozen)
            params = task.initial(Initial(step.shapes(lambda task=task: task.create().params).params)).params
            if is_dpo:
                params["model"] = jax.tree.map(lambda x: x * 1.1, params["model"])
            assert dtypes(params["base"]) == {"bfloat16" if dtype is None else "float32"}
            assert dtypes({**params, "base": None}) == {"float32"}
            state, metrics = step(step.init(params, donate=True), batch)
            assert all(x.is_deleted() for x in jax.tree.leaves(params))
            trained = state.params["model" if is_dpo else "lora"]
            written = None
            if precision == "fp32" and not is_dpo:
                adapted = model.adapted(state.params)
                assert dtypes(adapted["layers"]["mlp"]) == ({"bfloat16", "float32"} if dtype is None else {"float32"})
                written = generate(opened.model, adapted, ROWS, 4)
            bits.append((metrics["loss"], trained, written))
        equal(*bits)


def test_a_donated_state_has_the_arrays_that_it_was_given():
    def loss_fn(params, batch, rng):
        return jt.Loss((params["w"] * batch).sum(), 1.0), {}

    step = jt.train_step(loss_fn, optax.sgd(0.1))
    params = {"w": jnp.arange(8.0)}
    place = params["w"].unsafe_buffer_pointer()
    assert step.init(params).params["w"].unsafe_buffer_pointer() != place
    assert step.init(params, donate=True).params["w"].unsafe_buffer_pointer() == place
    sharded = shard(step, make_mesh("fsdp=2", jax.devices()[:2]))
    params = {"w": jax.device_put(jnp.arange(8.0), sharded.shapes(params).params["w"].sharding)}
    places = [x.data.unsafe_buffer_pointer() for x in params["w"].addressable_shards]
    state = sharded.init(params, donate=True)
    assert [x.data.unsafe_buffer_pointer() for x in state.params["w"].addressable_shards] == places
