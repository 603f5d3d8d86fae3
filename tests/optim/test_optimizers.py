"""Every optimizer against PyTorch's: 100 updates with a changing learning rate and some gradients zero.

In float64 the parameters and every moment agree at every update; in float32 the error is at most twice PyTorch's.
"""

import inspect
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from jaxtrain.errors import UserError
from jaxtrain.optim import (
    adadelta,
    adafactor,
    adagrad,
    adam,
    adamax,
    adamw,
    asgd,
    groups,
    muon,
    nadam,
    radam,
    rmsprop,
    rprop,
    sgd,
)
from jaxtrain.optim.radam import _length

STEPS = 100
ADAM = {"exp_avg": "mu", "exp_avg_sq": "nu"}
BETAS = {"betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.1, "maximize": True}

# name: (PyTorch's optimizer, ours, learning rate, {PyTorch's name of a moment: ours})
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, sgd, 1e-3, {"momentum_buffer": "momentum_buffer"}),
    "adam": (torch.optim.Adam, adam, 1e-3, {**ADAM, "max_exp_avg_sq": "nu_max"}),
    "adamw": (torch.optim.AdamW, adamw, 1e-3, {**ADAM, "max_exp_avg_sq": "nu_max"}),
    "nadam": (torch.optim.NAdam, nadam, 2e-3, {**ADAM, "mu_product": "mu_product"}),
    "radam": (torch.optim.RAdam, radam, 1e-3, ADAM),
    "adamax": (torch.optim.Adamax, adamax, 2e-3, {"exp_avg": "mu", "exp_inf": "norm"}),
    "adagrad": (torch.optim.Adagrad, adagrad, 1e-2, {"sum": "sum"}),
    "adadelta": (torch.optim.Adadelta, adadelta, 1.0, {"square_avg": "e_g", "acc_delta": "e_x"}),
    "rmsprop": (
        torch.optim.RMSprop,
        rmsprop,
        1e-2,
        {"square_avg": "nu", "grad_avg": "mu", "momentum_buffer": "momentum_buffer"},
    ),
    "rprop": (torch.optim.Rprop, rprop, 1e-2, {"prev": "prev", "step_size": "step_size"}),
    "asgd": (torch.optim.ASGD, asgd, 1e-2, {"ax": "ax", "eta": "eta", "mu": "mu"}),
    "adafactor": (
        torch.optim.Adafactor,
        adafactor,
        0.5,
        {"row_var": "row_var", "col_var": "col_var", "variance": "variance"},
    ),
    "muon": (torch.optim.Muon, muon, 1e-3, {"momentum_buffer": "momentum_buffer"}),
}

# Together, the entries of an optimizer set every argument to a value other than its default.
ARGUMENTS = [
    ("sgd", {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1, "maximize": True}),
    ("sgd", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("adam", BETAS),
    ("adam", {"amsgrad": True, "betas": (0.9, 0.5)}),
    ("adam", {"betas": (0.0, 0.0)}),
    ("adamw", BETAS),
    ("adamw", {"amsgrad": True, "betas": (0.9, 0.5)}),
    ("nadam", {**BETAS, "momentum_decay": 0.1}),
    ("nadam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("radam", BETAS),
    ("radam", {"decoupled_weight_decay": True, "weight_decay": 0.1, "betas": (0.9, 0.9999)}),
    ("radam", {"betas": (0.9, 0.5)}),
    ("adamax", BETAS),
    (
        "adagrad",
        {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.2, "eps": 1e-3, "maximize": True},
    ),
    ("adadelta", {"rho": 0.8, "eps": 1e-3, "weight_decay": 0.1, "maximize": True}),
    ("rmsprop", {"alpha": 0.8, "eps": 1e-3, "weight_decay": 0.1, "momentum": 0.9, "maximize": True}),
    ("rmsprop", {"centered": True, "momentum": 0.5, "eps": 1e-3}),
    ("rprop", {"etas": (0.4, 1.3), "step_sizes": (1e-3, 1e-1), "maximize": True}),
    ("asgd", {"lambd": 0.1, "alpha": 0.5, "t0": 20, "weight_decay": 0.1, "maximize": True}),
    ("adafactor", {"beta2_decay": -0.5, "eps": (1e-2, 0.5), "d": 2.0, "weight_decay": 0.1, "maximize": True}),
    ("adafactor", {"eps": (None, 1e-3), "weight_decay": 0.1}),
    (
        "muon",
        {"weight_decay": 0.3, "momentum": 0.8, "nesterov": False, "ns_coefficients": (3.0, -4.0, 2.0), "ns_steps": 3},
    ),
    ("muon", {"adjust_lr_fn": "match_rms_adamw", "eps": 1e-1}),
    ("muon", {"adjust_lr_fn": "original"}),
]
CASES = [(name, {}) for name in OPTIMIZERS] + ARGUMENTS
IDS = [f"{name}-{','.join(options) or 'defaults'}" for name, options in CASES]


def shapes(name):
    return {"a": (7, 3), "b": (3, 5)} if name == "muon" else {"a": (3, 7), "b": (5,)}


@cache
def start(name):
    """Return parameters so small that their rounding does not hide that of the updates."""
    rng = np.random.default_rng(0)
    return {k: (0.1 * rng.standard_normal(shape)).astype(np.float32) for k, shape in shapes(name).items()}


@cache
def gradients(name):
    """Return gradients [STEPS, …] of many magnitudes; one element and every fifth gradient are zero."""
    rng = np.random.default_rng(1)

    def leaf(shape):
        scale = 10.0 ** rng.integers(-3, 3, shape)
        scale.flat[0] = 0
        some = (np.arange(STEPS) % 5 != 4).reshape(-1, *[1] * len(shape))
        return (rng.standard_normal((STEPS, *shape)) * scale * some).astype(np.float32)

    return {k: leaf(shape) for k, shape in shapes(name).items()}


def fall(t):
    return 1 - t / (2 * STEPS)


def torch_run(name, dtype, param_groups):
    """Return (parameters, moments) after every update, stacked."""
    make, _, lr, moments = OPTIMIZERS[name]
    torch.set_default_dtype(dtype)
    try:
        params = {k: torch.tensor(x, dtype=dtype, requires_grad=True) for k, x in start(name).items()}
        listed = [
            {"lr": lr * scale, **options, "params": [params[k] for k in keys]} for keys, scale, options in param_groups
        ]
        # Adagrad initializes its sums in its constructor, with the optimizer's value instead of the group's.
        filled = {k: x for group in listed for k, x in group.items() if k == "initial_accumulator_value"}
        optimizer = make(listed, **filled)
        first = [group["lr"] for group in optimizer.param_groups]
        history = {k: [] for k in params}
        kept = {moment: {k: [] for k in params} for moment in moments}
        for t in range(STEPS):
            for group, rate in zip(optimizer.param_groups, first, strict=True):
                group["lr"] = rate * fall(t)
            for k, p in params.items():
                p.grad = torch.tensor(gradients(name)[k][t], dtype=dtype)
            optimizer.step()
            for k, p in params.items():
                history[k].append(p.detach().double().numpy().copy())
                for moment in moments:
                    if optimizer.state[p].get(moment) is not None:
                        kept[moment][k].append(optimizer.state[p][moment].double().numpy().copy())
        return {k: np.stack(x) for k, x in history.items()}, kept
    finally:
        torch.set_default_dtype(torch.float32)


def jax_run(name, dtype, make):
    """Return (parameters, optimizer state) after every update, stacked."""
    with jax.enable_x64(dtype == np.float64):
        tx = make()

        def update(carry, grads):
            params, state = carry
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), (params, state)

        params = {k: jnp.asarray(x, dtype) for k, x in start(name).items()}
        grads = {k: jnp.asarray(x, dtype) for k, x in gradients(name).items()}
        _, (history, states) = jax.jit(lambda p, g: jax.lax.scan(update, (p, tx.init(p)), g))(params, grads)
        return {k: np.asarray(x, np.float64) for k, x in history.items()}, states


def ours(name, scale=1.0, dtype=None, **options):
    _, make, lr, _ = OPTIMIZERS[name]
    if "betas" in options:
        options["b1"], options["b2"] = options.pop("betas")
    if name == "muon":
        options["out_axis"] = 0
        if dtype is not None:
            options["dtype"] = dtype
    # `fall`, rounded only once, so that float32 errors are those of the optimizer.
    return make(lambda t: (2 * STEPS - t).astype(jnp.result_type(float)) * (lr * scale / (2 * STEPS)), **options)


def in_double(monkeypatch):
    """Make PyTorch's Muon iterate in float64; it uses bfloat16 for every dtype."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.double().clone())


def close(a, b):
    for t in range(STEPS):
        assert np.linalg.norm(a[t] - b[t]) <= 1e-12 * np.linalg.norm(b[t]), t


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_float64_parameters_and_moments_equal_pytorch_at_every_update(name, options, monkeypatch):
    in_double(monkeypatch)
    theirs, kept = torch_run(name, torch.float64, [(shapes(name), 1.0, options)])
    params, states = jax_run(name, np.float64, lambda: ours(name, dtype=np.float64, **options))
    compared = 0
    for k in params:
        close(params[k], theirs[k])
        for moment, field in OPTIMIZERS[name][3].items():
            if kept[moment][k]:
                found = optax.tree.get(states, field, filtering=lambda _, x: x is not None)
                close(np.asarray(found[k] if isinstance(found, dict) else found), kept[moment][k])
                compared += 1
    assert compared >= 2 or (name == "sgd" and not options)


def test_every_argument_is_tested():
    tuning = {"foreach", "fused", "capturable", "differentiable", "params", "lr"}
    for name, (make, *_) in OPTIMIZERS.items():
        group = make([torch.zeros(2, 2, requires_grad=True)]).param_groups[0]
        varied = {argument for case, options in ARGUMENTS if case == name for argument in options}
        missing = set(group) - varied - tuning
        # `Adam(decoupled_weight_decay=True)` is AdamW by another name.
        assert missing <= ({"decoupled_weight_decay"} if name in ("adam", "adamw") else set()), name


def test_defaults_equal_pytorch():
    for name, (make, mine, *_) in OPTIMIZERS.items():
        theirs = make([torch.zeros(2, 2, requires_grad=True)]).defaults
        theirs = {**theirs, "learning_rate": theirs["lr"]}
        theirs["b1"], theirs["b2"] = theirs.pop("betas", (None, None))
        for argument, parameter in inspect.signature(mine).parameters.items():
            if argument in theirs:
                assert parameter.default == theirs[argument], (name, argument)


def rms(a, b):
    return np.sqrt(np.mean([np.mean((a[k] - b[k]) ** 2) for k in b]))


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_the_float32_error_is_at_most_twice_pytorchs(name, options, monkeypatch):
    listed = [(shapes(name), 1.0, options)]
    theirs, _ = torch_run(name, torch.float32, listed)
    mine, _ = jax_run(name, np.float32, lambda: ours(name, **options))
    in_double(monkeypatch)
    truth, _ = torch_run(name, torch.float64, listed)
    assert rms(mine, truth) <= 2 * rms(theirs, truth)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_groups_equal_pytorchs_param_groups(name, monkeypatch):
    in_double(monkeypatch)
    options = dict(next(options for case, options in ARGUMENTS if case == name))
    options.pop("initial_accumulator_value", None)
    theirs, _ = torch_run(name, torch.float64, [(["a"], 1.0, {}), (["b"], 0.5, options)])

    def make():
        each = {"a": ours(name, dtype=np.float64), "b": ours(name, 0.5, np.float64, **options)}
        return groups(lambda path: path, each)

    params, _ = jax_run(name, np.float64, make)
    for k in params:
        close(params[k], theirs[k])


@pytest.mark.parametrize("make", [sgd, lambda **options: sgd(dampening=0.1, momentum=0.9, **options)])
def test_nesterov_without_momentum_is_refused(make):
    with pytest.raises(UserError, match="nesterov needs momentum > 0 and dampening 0, got"):
        make(nesterov=True)


def test_muon_refuses_vectors():
    with pytest.raises(UserError, match=r"muon takes matrices only, got shape \(3,\)"):
        muon().init(jnp.zeros(3))


def test_the_muon_update_of_a_transposed_matrix_is_the_transposed_update():
    for shape in [(3, 5), (5, 3)]:
        g = jnp.asarray(np.random.default_rng(0).standard_normal(shape), np.float32)
        updates = []
        for x, out_axis in [(g, 0), (g.T, -1)]:
            tx = muon(0.1, dtype=np.float32, out_axis=out_axis)
            updates.append(tx.update(x, tx.init(x), x)[0])
        np.testing.assert_array_equal(updates[0], updates[1].T)


def test_moments_in_bfloat16_are_rounded_once_and_computed_in_float32():
    g = jnp.asarray([0.3, -1e-3], np.float32)
    for make in (adam, adamw):
        tx, wide = make(0.1, moments_dtype=jnp.bfloat16, amsgrad=True), make(0.1, amsgrad=True)
        state, wide_state = tx.init(g), wide.init(g)
        updates, state = tx.update(g, state, g)
        wide_updates, wide_state = wide.update(g, wide_state, g)
        np.testing.assert_array_equal(updates, wide_updates)
        for field in ("mu", "nu", "nu_max"):
            mine = optax.tree.get(state, field)
            assert mine.dtype == jnp.bfloat16
            np.testing.assert_array_equal(mine, optax.tree.get(wide_state, field).astype(jnp.bfloat16))


@pytest.mark.parametrize("b", [0.9, 0.999, 0.9999])
def test_radams_average_length_is_accurate_in_float32(b):
    t = np.arange(1, 3000)
    # The weighted mean age, summed in float64 without cancellation.
    age = np.cumsum(t * b ** (t - 1.0)) / np.cumsum(b ** (t - 1.0))
    np.testing.assert_allclose(_length(b, jnp.asarray(t, np.float32)), 2 * age - 1, rtol=2e-6)
