"""Modules of flax.nnx, flax.linen and equinox become a loss function of parameters in one call."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx

import jaxtrain as jt
from jaxtrain.models import functional, functional_loss
from parity import AdamW, Case, check
from parity.sides.randomness import dropout_mask_fn

WIDTH = 4
BATCH = {name: np.random.default_rng(i).standard_normal((6, WIDTH), np.float32) for i, name in enumerate("xy")}


class NnxNet(nnx.Module):
    """Two layers with dropout between them, a layer of no use, a constant, and streams of its own."""

    def __init__(self, rngs):
        self.first, self.second = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2))
        self.dropouts = nnx.List(nnx.Dropout(0.5, rngs=rngs) for _ in range(2))
        self.unused = nnx.Linear(WIDTH, 1, rngs=rngs)
        self.constant = nnx.Variable(jnp.float32(2.0))

    def __call__(self, x, *, scale):
        x, again = self.dropouts[0](self.first(x)), self.dropouts[1](x)
        return self.second(jnp.sin(x) + again) * scale * self.constant / 2


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x, *, scale, train):
        linen.Dense(1, name="unused")(x)
        again = x
        x = linen.Dropout(0.5, deterministic=not train)(linen.Dense(WIDTH, name="first")(x))
        again = linen.Dropout(0.5, deterministic=not train)(again)
        return linen.Dense(WIDTH, name="second")(jnp.sin(x) + again) * scale


class EquinoxNet(eqx.Module):
    first: eqx.nn.Linear
    second: eqx.nn.Linear
    unused: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        self.first, self.second = (eqx.nn.Linear(WIDTH, WIDTH, key=k) for k in jax.random.split(key))
        self.unused, self.dropout = eqx.nn.Linear(WIDTH, 1, key=key), eqx.nn.Dropout(0.5)

    def __call__(self, x, *, scale, key):
        one, two = (None, None) if key is None else jax.random.split(key)
        y = self.dropout(jax.vmap(self.first)(x), key=one)
        return jax.vmap(self.second)(jnp.sin(y) + self.dropout(x, key=two)) * scale


def loss_of(call):
    def loss_fn(model, batch, rng):
        return jt.Loss((jnp.sin(call(model, batch["x"], rng)) * batch["y"]).sum(), len(batch["x"])), {}

    return loss_fn


NETS = {
    "nnx": (lambda: NnxNet(nnx.Rngs(0)), loss_of(lambda model, x, rng: model(x, scale=3.0))),
    "linen": (LinenNet, loss_of(lambda model, x, rng: model(x, scale=3.0, train=rng is not None))),
    "equinox": (
        lambda: EquinoxNet(jax.random.key(0)),
        loss_of(lambda model, x, rng: model(x, scale=3.0, key=rng)),
    ),
}


class TorchNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x):
        y = self.dropout(self.first(x))
        return self.second(y.sin() + self.dropout(x)) * 3


@pytest.mark.parametrize("library", NETS)
def test_a_module_of_each_library_is_checked_against_pytorch(library):
    build, loss = NETS[library]
    with pytest.warns(UserWarning, match=r"the loss does not depend on unused/\w+, unused/\w+: left out of"):
        loss_fn, params, state = functional_loss(build(), loss, BATCH)
    case = Case(
        name=library,
        torch_model=TorchNet,
        torch_loss=lambda model, batch: ((model(batch["x"]).sin() * batch["y"]).sum(), len(batch["x"])),
        loss_fn=loss_fn,
        params_like=params,
        names=None,
        batch=lambda seed, rows: {k: np.random.default_rng(seed).permuted(x) for k, x in BATCH.items()},
        rows=6,
        optimizer=AdamW(lr=1e-2),
        clip_norm=None,
        state_like=state,
    )
    verdict = check(case, steps=2)
    assert verdict.passed, verdict.faults


def test_streams_start_from_the_steps_rng_and_are_off_in_evaluation():
    build, loss = NETS["nnx"]
    with pytest.warns(UserWarning, match="left out"):
        loss_fn, params, _ = functional_loss(build(), loss, BATCH)
    first, same, other, off = (
        float(loss_fn(params, BATCH, rng)[0].total) for rng in (*map(jax.random.key, (0, 0, 1)), None)
    )
    assert first == same != other
    one, two = dropout_mask_fn(loss_fn)(params, BATCH, jax.random.key(0), None)
    assert (one != two).any()
    model = build()
    model.eval()
    assert off == float(loss(model, BATCH, None)[0].total)


class WithState(nnx.Module):
    """A norm with running statistics, a cache of decoding, and a count of its calls."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.cache, self.calls = nnx.Cache(jnp.zeros(3)), nnx.Variable(jnp.zeros((), jnp.int32))
        self.constant = nnx.Variable(jnp.float32(2.0))

    def __call__(self, x):
        self.calls.set_value(self.calls.get_value() + 1)
        self.cache.set_value(self.cache.get_value() + 1)
        return self.norm(x) * self.constant


def test_variables_that_the_loss_changes_are_the_model_state_and_caches_are_left_out():
    loss = loss_of(lambda model, x, rng: model(x))
    with pytest.warns(UserWarning, match="cache are caches of decoding: left out of the model state"):
        loss_fn, params, state = functional_loss(WithState(nnx.Rngs(0)), loss, BATCH)
    assert jax.tree.map(jnp.shape, params) == {"norm": {"bias": (WIDTH,), "scale": (WIDTH,)}}
    assert jax.tree.map(jnp.shape, state) == {"calls": (), "norm": {"mean": (WIDTH,), "var": (WIDTH,)}}
    computed, _, after = loss_fn(params, BATCH, jax.random.key(0), state)
    model = WithState(nnx.Rngs(0))
    assert float(computed.total) == float(loss(model, BATCH, None)[0].total)
    assert int(after["calls"]) == 1
    np.testing.assert_array_equal(after["norm"]["mean"], model.norm.mean.get_value())

    abstract = nnx.eval_shape(lambda: WithState(nnx.Rngs(0)))
    with (
        pytest.warns(UserWarning, match="caches"),
        pytest.raises(jt.UserError, match="the loss depends on the constant constant, of which only the shape is"),
    ):
        functional_loss(abstract, loss, BATCH)


class Statistics(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.BatchNorm(use_running_average=False, momentum=0.9)(x)


def test_linens_collections_and_equinoxs_state_are_the_model_state():
    loss = loss_of(lambda model, x, rng: model(x))
    variables = Statistics().init(jax.random.key(0), BATCH["x"])
    loss_fn, params, state = functional_loss(
        Statistics().bind(
            {**variables, "params": {"BatchNorm_0": {"bias": jnp.ones(WIDTH), "scale": jnp.ones(WIDTH)}}}
        ),
        loss,
        BATCH,
    )
    assert params["BatchNorm_0"]["bias"].tolist() == [1.0] * WIDTH
    *_, after = loss_fn(params, BATCH, None, state)
    np.testing.assert_allclose(after["batch_stats"]["BatchNorm_0"]["mean"], 0.1 * BATCH["x"].mean(0), atol=1e-7)

    def equinox_loss(model, batch, rng, state):
        norm = jax.vmap(model, axis_name="rows", in_axes=(0, None), out_axes=(0, None))
        y, state = norm(batch["x"], state)
        return jt.Loss((y * batch["y"]).sum(), len(y)), {}, state

    made = eqx.nn.make_with_state(eqx.nn.BatchNorm)(WIDTH, axis_name="rows", mode="ema", momentum=0.9)
    loss_fn, params, state = functional_loss(made, equinox_loss, BATCH)
    *_, after = loss_fn(params, BATCH, jax.random.key(0), state)
    assert len(jax.tree.leaves(params)) == 2
    assert [x.shape for x in jax.tree.leaves(after)] == [x.shape for x in jax.tree.leaves(state)]
    assert jax.tree.leaves(after)[1].any()
    assert not jax.tree.leaves(state)[1].any()


def test_other_models_are_refused():
    with pytest.raises(jt.UserError, match=r"takes a module of flax\.nnx, flax\.linen or equinox, got Linear"):
        functional_loss(torch.nn.Linear(2, 2), None, BATCH)
    with pytest.raises(jt.UserError, match="NnxNet has other variables than parameters, constant: use functional_loss"):
        functional(NnxNet(nnx.Rngs(0)))
