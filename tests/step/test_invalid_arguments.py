"""Invalid settings, losses, states and batches are refused in one line."""

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx

import jaxtrain as jt
from tests.step.regression import BATCH32, INPUTS


def linear_loss(params, batch, rng):
    return jt.Loss((batch["x"] @ params).sum(), 1), {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": "fp7"}, r"precision 'fp7' is unknown: choose one of .*bf16"),
        ({"remat": "some"}, r"remat 'some' is unknown: choose one of none, full"),
        ({"accumulate": 0}, r"accumulate must be an integer of at least 1, or a schedule, got 0$"),
        ({"accumulate": -2}, r"accumulate must be an integer of at least 1, or a schedule, got -2$"),
        ({"accumulate": 2.5}, r"accumulate must be an integer of at least 1, or a schedule, got 2\.5$"),
        ({"gradient_sums": "half"}, r"gradient_sums must be 'whole' or 'sharded', got 'half'"),
        ({"reshard_after": "step"}, r"reshard_after must be 'forward' or 'window', got 'step'"),
        ({"clip_norm": 0}, r"clip_norm must be positive, got 0: "),
        ({"clip_norm": -1.5}, r"clip_norm must be positive, got -1\.5: "),
        ({"clip_norm": float("nan")}, r"clip_norm must be positive, got nan: "),
    ],
)
def test_an_invalid_setting_is_refused_with_its_value(arguments, message):
    with pytest.raises(jt.UserError, match=message):
        jt.train_step(linear_loss, optax.sgd(0.1), **arguments)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda loss: loss.total, r"must return \(jaxtrain\.Loss\(total, weight\), metrics\), got float32\[\]"),
        (lambda loss: loss, r"metrics\), got Loss\(total=float32\[\], weight="),
        (lambda loss: (loss.total, {}), r"metrics\), got \(float32\[\], \{\}\)"),
        (lambda loss: (loss, {}, None), r"metrics\), got \(Loss\("),
        (lambda loss: (loss, None), r"metrics\), got \(Loss\("),
        (lambda loss: None, r"metrics\), got None"),
        (
            lambda loss: (jt.Loss(loss.total * jnp.ones(3), 1), {}),
            r"scalar total.*total=float32\[3\].*use Loss\.of",
        ),
        (
            lambda loss: (jt.Loss(loss.total, jnp.ones(4)), {}),
            r"a scalar total and weight, got .*weight=float32\[4\]",
        ),
    ],
)
def test_a_loss_fn_that_returns_an_invalid_value_is_refused(returned, message, precision):
    step = jt.train_step(
        lambda params, batch, rng: returned(linear_loss(params, batch, rng)[0]), optax.sgd(0.1), precision=precision
    )
    with pytest.raises(jt.UserError, match=message):
        step(step.init(jnp.ones(4)), BATCH32)


def test_fp64_without_x64_mode_is_refused():
    # JAX would train in float32, with a warning at most.
    with pytest.raises(jt.UserError, match="x64"):
        jt.train_step(linear_loss, optax.sgd(0.1), precision="fp64").init(jnp.ones(4))


def test_a_loss_fn_that_does_not_return_its_model_state_is_refused():
    step = jt.train_step(lambda params, batch, rng, state: linear_loss(params, batch, rng), optax.sgd(0.1))
    with pytest.raises(jt.UserError, match=r"metrics, model_state\)"):
        step(step.init(jnp.ones(4), model_state=jnp.zeros(2)), BATCH32)


def test_a_metric_that_is_not_a_scalar_is_refused():
    step = jt.train_step(
        lambda params, batch, rng: (linear_loss(params, batch, rng)[0], {"out": batch["x"]}), optax.sgd(0.1)
    )
    with pytest.raises(jt.UserError, match="out"):
        step(step.init(jnp.ones(4)), BATCH32)


@pytest.mark.parametrize("name", ["loss", "weight", "grad_norm", "skipped"])
def test_a_metric_with_a_reserved_name_is_refused(name):
    step = jt.train_step(
        lambda params, batch, rng: (linear_loss(params, batch, rng)[0], {name: jnp.float32(7)}), optax.sgd(0.1)
    )
    with pytest.raises(jt.UserError, match=name):
        step(step.init(jnp.ones(4)), BATCH32)


@functools.cache
def linear_step(k=1):
    return jt.train_step(linear_loss, optax.sgd(0.1), accumulate=k)


@pytest.mark.parametrize("call", ["__call__", "micro"])
def test_a_state_of_another_type_is_refused_with_the_call_that_creates_one(call):
    with pytest.raises(jt.UserError, match=r"^state must be a jaxtrain.TrainState, got dict: use step.init\(params\)"):
        getattr(linear_step(), call)({"params": jnp.ones(4)}, INPUTS)


def test_evaluation_of_a_state_of_another_type_is_refused():
    with pytest.raises(jt.UserError, match=r"state must be a jaxtrain\.TrainState, got dict"):
        jt.eval_step(linear_loss)({"params": jnp.ones(4)}, INPUTS)


def test_a_torch_optimizer_is_refused():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(jt.UserError, match=r"^optimizer must be an optax.GradientTransformation, got SGD: .*interop"):
        jt.train_step(linear_loss, optimizer)


def test_an_optimizer_factory_is_refused():
    with pytest.raises(jt.UserError, match=r"got function: call it, as in adamw\(1e-3\)"):
        jt.train_step(linear_loss, optax.adamw)


def test_a_schedule_or_a_class_in_place_of_an_optimizer_is_refused():
    with pytest.raises(jt.UserError, match=r"got a schedule: give it to an optimizer, as in .*adamw\(schedule\)"):
        jt.train_step(linear_loss, optax.cosine_decay_schedule(0.1, 10))
    with pytest.raises(jt.UserError, match="got the class Optimizer: use one of jaxtrain"):
        jt.train_step(linear_loss, nnx.Optimizer)


def test_a_loss_of_counts_is_refused():
    step = jt.train_step(lambda params, batch, rng: (jt.Loss.of((batch > params).astype(int)), {}), optax.sgd(0.1))
    with pytest.raises(jt.UserError, match="must return a floating-point total, got a sum of integers, which has no"):
        step(step.init(jnp.ones(4)), jnp.ones(4))


def test_an_error_within_optax_is_named():
    step = jt.train_step(lambda params, batch, rng: (jt.Loss.of(batch * params["b"]), {}), optax.sm3(0.1))
    with pytest.raises(jt.UserError, match=r"the optimizer's (init|update) fails"):
        step(step.init({"b": jnp.ones(())}), jnp.ones(4))


def test_a_donated_state_used_again_is_refused():
    old = linear_step().init(jnp.ones(4))
    linear_step()(old, INPUTS)
    with pytest.raises(jt.UserError, match="the state was donated to an earlier call"):
        linear_step()(old, INPUTS)


def test_torch_tensors_in_the_batch_are_refused():
    with pytest.raises(jt.UserError, match=r"^the batch must hold NumPy or JAX arrays, got a torch.Tensor at x: "):
        linear_step()(linear_step().init(jnp.ones(4)), {"x": torch.ones(12, 4)})


def test_a_scalar_in_an_accumulated_batch_is_refused_by_its_name():
    step = jt.train_step(linear_loss, optax.sgd(0.1), accumulate=2)
    with pytest.raises(jt.UserError, match=r"^scale is a scalar, which cannot be split into 2 micro-batches"):
        step(step.init(jnp.ones(4)), {**INPUTS, "scale": 2.0})


@pytest.mark.parametrize(
    ("params", "frozen", "message"),
    [
        ({"w": np.ones(4)}, lambda path: path == "v", "^frozen matches no parameter: the paths are w"),
        ({"w": np.ones(4)}, lambda path: True, "^no parameter is trained, frozen matches all of them"),
        ({"w": np.ones(4, np.int32)}, None, "^no parameter is trained, params hold no floating-point array"),
        ({"w": np.ones(4), "scale": 0}, None, "^parameter scale is the Python int 0, which has no gradient: use 0.0"),
    ],
)
def test_parameters_that_would_silently_not_be_trained_are_refused(params, frozen, message):
    step = jt.train_step(linear_loss, optax.sgd(0.1), **({} if frozen is None else {"frozen": frozen}))
    for init in (step.init, step.shapes):
        with pytest.raises(jt.UserError, match=message):
            init(params)


def test_a_python_float_parameter_is_trained():
    def loss_fn(params, batch, rng):
        return jt.Loss((batch["x"] * params["scale"]).sum(), 1), {}

    step = jt.train_step(loss_fn, optax.sgd(1.0))
    state, _ = step(step.init({"scale": 0.0}), {"x": np.ones(3, np.float32)})
    assert float(state.params["scale"]) == -3.0
