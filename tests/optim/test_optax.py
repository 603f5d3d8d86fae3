"""Every transformation of optax: a step updates as a plain loop of optax, or refuses it in one line."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import jaxtrain as jt

STEPS = 5
RATE = 0.05
PARAMS = {"w": jnp.array([[1.0, -2.0], [0.5, 3.0], [2.0, 1.0]]), "v": jnp.array([[0.5, 1.0], [-1.0, 2.0]])}
BATCH = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)


def mean_loss(params, batch):
    return (((batch @ params["w"] @ params["v"]) - 1.0) ** 2).sum(1)


def loss_fn(params, batch, rng):
    del rng
    return jt.Loss.of(mean_loss(params, batch)), {}


# Arguments where there are no defaults, or where these do nothing in five steps.
ARGUMENTS = {
    "adaptive_grad_clip": lambda f: f(0.1),
    "add_noise": lambda f: f(0.01, 0.5, 0),
    "apply_every": lambda f: f(2),
    "apply_if_finite": lambda f: f(optax.adam(RATE), 2),
    "chain": lambda f: f(optax.clip(1.0), optax.adam(RATE)),
    "clip": lambda f: f(0.5),
    "clip_by_block_rms": lambda f: f(0.5),
    "clip_by_global_norm": lambda f: f(0.5),
    "conditionally_mask": lambda f: f(optax.sgd(RATE), lambda step: step % 2 == 0),
    "conditionally_transform": lambda f: f(optax.sgd(RATE), lambda step: step % 2 == 0),
    "ema": lambda f: f(0.5),
    "flatten": lambda f: f(optax.adam(RATE)),
    "freeze": lambda f: f({"w": True, "v": False}),
    "lookahead": lambda f: f(optax.sgd(RATE), 2, 0.5),
    "masked": lambda f: f(optax.adam(RATE), {"w": True, "v": False}),
    "measure_with_ema": lambda f: f(optax.tree.norm, 0.9),
    "monitor": lambda f: f({"norm": optax.tree.norm}),
    "multi_transform": lambda f: f({"a": optax.adam(RATE), "b": optax.set_to_zero()}, {"w": "a", "v": "b"}),
    "named_chain": lambda f: f(("clip", optax.clip(1.0)), ("adam", optax.adam(RATE))),
    "noisy_sgd": lambda f: f(RATE, key=0),
    "partition": lambda f: f({"a": optax.adam(RATE), "b": optax.sgd(RATE)}, {"w": "a", "v": "b"}),
    "scale": lambda f: f(-RATE),
    "scale_by_backtracking_linesearch": lambda f: f(3),
    "scale_by_learning_rate": lambda f: f(RATE),
    "scale_by_schedule": lambda f: f(lambda step: -RATE / (step + 1)),
    "scale_by_zoom_linesearch": lambda f: f(3),
    "selective_transform": lambda f: f(optax.adam(RATE), freeze_mask={"w": True, "v": False}),
    "snapshot": lambda f: f("norm", optax.tree.norm),
    "stateless": lambda f: f(lambda updates, params: jax.tree.map(lambda u: -RATE * u, updates)),
    "stateless_with_tree_map": lambda f: f(lambda update, param: -RATE * update - 0.01 * param),
    "trace": lambda f: f(0.9),
    "with_extra_args_support": lambda f: f(optax.adam(RATE)),
    "add_decayed_weights": lambda f: f(0.1),
    "fromage": lambda f: f(RATE),
    "cocob": lambda f: f(),
    "differentially_private_aggregate": lambda f: f(1.0, 0.1, 0),
    "dpsgd": lambda f: f(RATE, 1.0, 0.1, seed=0),
    "mechanize": lambda f: f(optax.sgd(RATE)),
    "reduce_on_plateau": lambda f: f(patience=1, cooldown=0),
    "sam": lambda f: f(optax.sgd(RATE), optax.chain(contrib.normalize(), optax.sgd(0.05))),
    "schedule_free": lambda f: f(optax.sgd(RATE), RATE),
    "split_real_and_imaginary": lambda f: f(optax.adam(RATE)),
    "scale_by_adopt": lambda f: f(),
    "galore": lambda f: f(RATE, rank=1),
    "scale_by_galore": lambda f: f(rank=1),
    "lbfgs": lambda f: f(),
    "scale_by_muon": lambda f: f(weight_dimension_numbers=dict.fromkeys(PARAMS, contrib.MuonDimensionNumbers())),
    "adan": lambda f: f(RATE),
}
WRAPPED = {
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=RATE),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.adam)(learning_rate=RATE),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(RATE), 2),
    "MultiSteps transformation": lambda: optax.MultiSteps(optax.adam(RATE), 2).gradient_transformation(),
    "MultiSteps of momo": lambda: optax.MultiSteps(contrib.momo(RATE), 2),
    "chain with sam": lambda: optax.chain(optax.clip(1.0), contrib.sam(optax.sgd(RATE), optax.sgd(0.05))),
    "chain with momo": lambda: optax.chain(optax.clip(1.0), contrib.momo(RATE)),
    "chain with momo and sam": lambda: optax.chain(contrib.momo(RATE), contrib.sam(optax.sgd(RATE), optax.sgd(0.05))),
    "masked polyak_sgd": lambda: optax.masked(optax.polyak_sgd(), {"w": True, "v": False}),
    "apply_if_finite of polyak_sgd": lambda: optax.apply_if_finite(optax.polyak_sgd(), 2),
    "sam in opaque mode": lambda: contrib.sam(optax.sgd(RATE), optax.sgd(0.05), opaque_mode=True),
    "plateau behind adam": lambda: optax.chain(optax.adam(RATE), contrib.reduce_on_plateau(patience=1)),
}
REFUSED = {
    "scale_by_backtracking_linesearch": r"needs grad and value_fn|needs value_fn",
    "scale_by_zoom_linesearch": r"needs grad and value_fn|needs value_fn",
    "lbfgs": r"needs grad and value_fn",
    "sophia": r"obj_fn must be provided",
    "lookahead": r"update fails, 'dict' object has no attribute 'fast'",
    "measure_with_ema": r"returns updates of another structure than the parameters",
    "differentially_private_aggregate": r"returns float32\[2\] for the parameter|expects|fails",
    "dpsgd": r"returns float32\[2\] for the parameter|expects|fails",
    "sam in opaque mode": r"fails",
    "chain with momo and sam": r"needs value",
}


def transformations():
    """Return all functions of optax that return a transformation, by name, as builders without arguments."""
    found = dict(WRAPPED)
    for module in (contrib, optax):
        for name, function in vars(module).items():
            if not inspect.isfunction(function) or name.startswith("_") or name in found:
                continue
            if "GradientTransformation" not in str(inspect.signature(function).return_annotation):
                continue
            if name.startswith("inject_"):
                continue
            found[name] = lambda name=name, function=function: _build(name, function)
    return found


def _build(name, function):
    if name in ARGUMENTS:
        return ARGUMENTS[name](function)
    required = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty and p.kind < 2]
    assert [p.name for p in required] in ([], ["learning_rate"]), f"{name} needs arguments: add it to ARGUMENTS"
    return function(*[RATE] * len(required))


ALL = transformations()
COMMON = ["adam", "chain with sam", "sam", "momo", "reduce_on_plateau", "MultiSteps of momo", "lbfgs", "sophia"]


def plain_loop(rule):
    """Return the parameters of a loop as in optax's documentation."""
    params = PARAMS

    @jax.jit
    def update(params, state):
        value, grads = jax.value_and_grad(lambda p: mean_loss(p, BATCH).mean())(params)
        updates, state = _plain_update(rule, grads, state, params, value)
        return optax.apply_updates(params, updates), state

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        state = rule.init(params)
        for _ in range(STEPS):
            params, state = update(params, state)
    return params


def _plain_update(rule, grads, state, params, value):
    try:
        return rule.update(grads, state, params, value=value)
    except TypeError:
        return rule.update(grads, state, params)


def check(name):
    step = jt.train_step(loss_fn, ALL[name]())
    if name in REFUSED:
        with pytest.raises(jt.UserError, match=REFUSED[name]) as raised:
            step(step.init(PARAMS), BATCH)
        assert "\n" not in str(raised.value)
        return
    state = step.init(PARAMS)
    for _ in range(STEPS):
        state, _ = step(state, BATCH)
    expected = plain_loop(ALL[name]())
    for key, value in expected.items():
        np.testing.assert_allclose(state.params[key], value, rtol=2e-5, atol=1e-6, err_msg=name)
        assert state.params[key].shape == PARAMS[key].shape


@pytest.mark.parametrize("name", COMMON)
def test_a_step_updates_as_a_loop_of_optax(name):
    check(name)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", sorted(set(ALL) - set(COMMON)))
def test_every_transformation_updates_as_in_a_loop_of_optax(name):
    check(name)


def test_every_refusal_is_of_a_transformation():
    assert REFUSED.keys() <= ALL.keys()
    assert len(ALL) > 110


def test_an_optimizer_that_cannot_be_initialized_is_refused():
    step = jt.train_step(loss_fn, optax.partition({"a": optax.sgd(RATE)}, {"w": "a", "v": "b"}))
    with pytest.raises(jt.UserError, match=r"the optimizer's init fails with these parameters, .*: use an optimizer"):
        step.init(PARAMS)


def test_a_mistake_in_a_transformation_of_the_user_keeps_its_traceback():
    def update(updates, state, params=None):
        raise ValueError("mine")

    step = jt.train_step(loss_fn, optax.GradientTransformation(lambda params: (), update))
    with pytest.raises(ValueError, match="mine"):
        step(step.init(PARAMS), BATCH)
