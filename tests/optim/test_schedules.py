"""Every schedule equals PyTorch's scheduler in float64, over 1,000 updates with random arguments."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler as theirs

import jaxtrain as jt
from jaxtrain.errors import UserError
from jaxtrain.optim import (
    at_turn,
    clipped,
    groups,
    rate_of_metric,
    reduce_lr_on_plateau,
    schedules,
    sgd,
    used_learning_rate,
)

STEPS = 1000
LR = st.floats(1e-4, 10)
MOST = 1500
COUNT = st.integers(1, MOST)


def drawn(*strategies):
    return lambda test: settings(max_examples=12)(given(*strategies)(test))


def optimizer(lr=0.1, kind=torch.optim.SGD):
    p = torch.zeros(1, requires_grad=True)
    return kind([p], lr=lr, **({"momentum": 0.5} if kind is torch.optim.SGD else {}))


def torch_values(o, scheduler, steps=STEPS, what="lr"):
    """Return the option `what` of each update, [steps]."""
    values = []
    for t in range(steps):
        values.append(o.param_groups[0]["betas"][0] if what == "b1" else o.param_groups[0][what])
        o.step()
        if t < steps - 1:
            scheduler.step()
    return np.array(values)


def values(schedule, steps=STEPS):
    # Of one length, so that operations are compiled once.
    with jax.enable_x64(True):
        return np.asarray(jax.vmap(schedule)(jnp.arange(max(steps, MOST), dtype=np.int32)))[:steps]


def assert_equals_torch(schedule, make, lr, floor=True, what="lr", bound=1e-12, **kwargs):
    """Compare within 1e-12, relative to the largest rate where a rate passes through zero."""
    o = optimizer(lr)
    expected = torch_values(o, make(o), what=what, **kwargs)
    found = values(schedule, len(expected))
    scale = np.abs(expected).max() if floor else np.abs(expected)
    assert found.dtype == np.float64
    assert np.all(np.abs(found - expected) <= bound * scale), np.max(np.abs(found - expected) / scale)


@drawn(LR, COUNT.filter(lambda n: n > 9), st.floats(0.1, 1.0))
def test_step(lr, size, gamma):
    assert_equals_torch(schedules.step_lr(lr, size, gamma), lambda o: theirs.StepLR(o, size, gamma), lr, floor=False)


@drawn(LR, st.lists(st.integers(0, 1200), max_size=5), st.just(0.0) | st.floats(1e-3, 1.0))
def test_multi_step(lr, milestones, gamma):
    mine = schedules.multi_step_lr(lr, milestones, gamma)
    assert_equals_torch(mine, lambda o: theirs.MultiStepLR(o, milestones, gamma), lr, floor=False)


@drawn(LR, st.floats(0.01, 1), st.integers(0, 1200))
def test_constant(lr, factor, n):
    assert_equals_torch(
        schedules.constant_lr(lr, factor, n), lambda o: theirs.ConstantLR(o, factor, n), lr, floor=False
    )


@drawn(LR, st.floats(0.01, 1), st.floats(0, 1), st.integers(0, 1200))
def test_linear(lr, start, end, n):
    assert_equals_torch(schedules.linear_lr(lr, start, end, n), lambda o: theirs.LinearLR(o, start, end, n), lr)


@drawn(LR, st.floats(0.9, 1.1))
def test_exponential(lr, gamma):
    assert_equals_torch(schedules.exponential_lr(lr, gamma), lambda o: theirs.ExponentialLR(o, gamma), lr, floor=False)


@drawn(LR, st.integers(0, 1200), st.floats(0.25, 4))
def test_polynomial(lr, n, power):
    assert_equals_torch(schedules.polynomial_lr(lr, n, power), lambda o: theirs.PolynomialLR(o, n, power), lr)


@drawn(LR, COUNT, st.floats(0, 1e-4))
def test_cosine(lr, n, low):
    mine = schedules.cosine_annealing_lr(lr, n, low)
    # Beyond the minimum PyTorch's recursion amplifies rounding errors; its closed form does not.
    drift = max(1e-12, n**2 * np.finfo(np.float64).eps)
    assert_equals_torch(mine, lambda o: theirs.CosineAnnealingLR(o, n, low), lr, bound=drift)
    scheduler = theirs.CosineAnnealingLR(optimizer(lr), n, low)
    closed = []
    for scheduler.last_epoch in range(STEPS):
        closed += scheduler._get_closed_form_lr()
    assert np.all(np.abs(values(mine) - closed) <= 1e-12 * lr)


@drawn(LR, st.integers(1, 400), st.integers(1, 4), st.floats(0, 1e-4))
def test_cosine_with_warm_restarts(lr, n, times, low):
    mine = schedules.cosine_annealing_warm_restarts(lr, n, times, low)
    assert_equals_torch(mine, lambda o: theirs.CosineAnnealingWarmRestarts(o, n, times, low), lr)


@drawn(
    LR,
    st.floats(1, 5),
    st.integers(1, 600),
    st.none() | st.integers(1, 600),
    st.sampled_from(["triangular", "triangular2", "exp_range"]),
    st.floats(0.99, 1.0),
    st.floats(0.5, 0.8),
    st.floats(0.8, 0.95),
)
def test_cyclic(lr, times, up, down, mode, gamma, low, high):
    args = (up, down, mode, gamma)
    mine = schedules.cyclic_lr(lr, lr * times, *args)
    momentum = schedules.cyclic_momentum(low, high, *args)

    def make(o):
        return theirs.CyclicLR(o, lr, lr * times, *args, base_momentum=low, max_momentum=high)

    assert_equals_torch(mine, make, lr)
    assert_equals_torch(momentum, make, lr, what="momentum")


@pytest.mark.parametrize("scale_mode", ["cycle", "iterations"])
def test_cyclic_with_a_scale_function(scale_mode):
    def scale(x):
        return 0.9 ** (x / 7)

    mine = schedules.cyclic_lr(0.1, 1.0, 20, scale_fn=scale, scale_mode=scale_mode)
    assert_equals_torch(mine, lambda o: theirs.CyclicLR(o, 0.1, 1.0, 20, scale_fn=scale, scale_mode=scale_mode), 0.1)


@drawn(
    LR,
    st.integers(5, 1000),
    st.floats(0.25, 0.45),
    st.sampled_from(["cos", "linear"]),
    st.booleans(),
    st.floats(2, 50),
    st.floats(2, 1e4),
)
def test_one_cycle(lr, n, share, strategy, three, div, final):
    def make(o):
        return theirs.OneCycleLR(
            o,
            lr,
            n,
            pct_start=share,
            anneal_strategy=strategy,
            div_factor=div,
            final_div_factor=final,
            three_phase=three,
        )

    assert_equals_torch(schedules.one_cycle_lr(lr, n, share, strategy, div, final, three), make, lr, steps=n)
    assert_equals_torch(
        schedules.one_cycle_momentum(n, share, strategy, three_phase=three), make, lr, steps=n, what="momentum"
    )


def test_lambda_and_multiplicative():
    def fall(t):
        return 1 / (1 + 0.01 * t)

    def shrink(t):
        return 1 - 0.1 / (10 + t)

    assert_equals_torch(schedules.lambda_lr(0.3, fall), lambda o: theirs.LambdaLR(o, fall), 0.3, floor=False)
    assert_equals_torch(
        schedules.multiplicative_lr(0.3, shrink), lambda o: theirs.MultiplicativeLR(o, shrink), 0.3, floor=False
    )


@drawn(LR, st.integers(1, 300), st.integers(1, 300), st.floats(0.9, 1.0))
def test_sequential(lr, first, second, gamma):
    mine = schedules.sequential(
        [
            schedules.linear_lr(lr, 0.1, total_iters=first),
            schedules.cosine_annealing_lr(lr, 50, 1e-3),
            schedules.exponential_lr(lr, gamma),
        ],
        [first, first + second],
    )

    def make(o):
        parts = [
            theirs.LinearLR(o, 0.1, total_iters=first),
            theirs.CosineAnnealingLR(o, 50, 1e-3),
            theirs.ExponentialLR(o, gamma),
        ]
        return theirs.SequentialLR(o, parts, [first, first + second])

    assert_equals_torch(mine, make, lr)


PARTS = {
    "step": (lambda lr: schedules.step_lr(lr, 30, 0.9), lambda o: theirs.StepLR(o, 30, 0.9)),
    "constant": (lambda lr: schedules.constant_lr(lr, 0.5, 40), lambda o: theirs.ConstantLR(o, 0.5, 40)),
    "linear": (
        lambda lr: schedules.linear_lr(lr, 0.1, total_iters=9),
        lambda o: theirs.LinearLR(o, 0.1, total_iters=9),
    ),
    "linear to 0": (lambda lr: schedules.linear_lr(lr, 1, 0, 70), lambda o: theirs.LinearLR(o, 1, 0, 70)),
    "polynomial": (lambda lr: schedules.polynomial_lr(lr, 80, 2), lambda o: theirs.PolynomialLR(o, 80, 2)),
    "exponential": (lambda lr: schedules.exponential_lr(lr, 0.999), lambda o: theirs.ExponentialLR(o, 0.999)),
    "multiplicative": (
        lambda lr: schedules.multiplicative_lr(lr, lambda t: 1 - 0.1 / (10 + t)),
        lambda o: theirs.MultiplicativeLR(o, lambda t: 1 - 0.1 / (10 + t)),
    ),
    "cosine": (lambda lr: schedules.cosine_annealing_lr(lr, 50, 1e-3), lambda o: theirs.CosineAnnealingLR(o, 50, 1e-3)),
    "restarts": (
        lambda lr: schedules.cosine_annealing_warm_restarts(lr, 30, 2),
        lambda o: theirs.CosineAnnealingWarmRestarts(o, 30, 2),
    ),
}


@pytest.mark.parametrize(
    "parts",
    [
        ("constant", "exponential"),
        ("step", "linear", "polynomial"),
        ("linear to 0", "exponential"),
        ("linear", "cosine"),
        ("cosine", "step"),
        ("restarts", "step"),
        ("step", "restarts", "multiplicative"),
    ],
    ids=",".join,
)
def test_chained(parts):
    mine = schedules.chained([PARTS[part][0](0.3) for part in parts])
    assert_equals_torch(mine, lambda o: theirs.ChainedScheduler([PARTS[part][1](o) for part in parts]), 0.3, steps=200)


@drawn(
    st.sampled_from(["min", "max"]),
    st.floats(0.1, 0.9),
    st.integers(0, 5),
    st.floats(0, 0.2),
    st.sampled_from(["rel", "abs"]),
    st.integers(0, 4),
    st.floats(0, 1e-2),
    st.sampled_from([1e-8, 1e-3]),
    st.integers(0, 9),
)
def test_reduce_on_plateau(mode, factor, patience, threshold, threshold_mode, cooldown, low, eps, seed):
    options = (mode, factor, patience, threshold, threshold_mode, cooldown, low, eps)
    losses = np.random.default_rng(seed).random(STEPS)
    losses[7] = math.nan
    o = optimizer(0.5)
    scheduler = theirs.ReduceLROnPlateau(o, *options)
    expected = []
    for loss in losses:
        expected.append(o.param_groups[0]["lr"])
        scheduler.step(loss)
    with jax.enable_x64(True):
        tx = sgd(reduce_lr_on_plateau(0.5, *options))

        def update(state, loss):
            _, state = tx.update(jnp.ones(1), state, value=loss)
            return state, used_learning_rate(state)

        _, found = jax.lax.scan(update, tx.init(jnp.ones(1)), jnp.asarray(losses))
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_a_plateau_without_a_value_keeps_the_rate():
    tx = sgd(reduce_lr_on_plateau(0.5, patience=0))
    state = tx.init(jnp.ones(1))
    for _ in range(3):
        updates, state = tx.update(jnp.ones(1), state)
    assert float(updates[0]) == -0.5


def test_warmup_cosine_and_wsd_start_at_zero_and_end_at_final_lr():
    for schedule in (
        schedules.warmup_cosine(1.0, 10, 100, 0.1),
        *(schedules.wsd(1.0, 10, 60, 30, 0.1, decay) for decay in ("linear", "cosine", "1-sqrt")),
    ):
        rates = values(schedule, 150)
        np.testing.assert_allclose(rates[[0, 5, 10]], [0, 0.5, 1])
        np.testing.assert_allclose(rates[100:], 0.1)
        assert np.all(np.diff(rates[10:]) <= 0)
        assert np.all(values(schedules.wsd(1.0, 10, 60, 30))[10:71] == 1)
    # Without a warmup the first update already has the whole rate.
    assert float(schedules.warmup_cosine(1.0, 0, 10)(0)) == float(schedules.wsd(1.0, 0, 1, 1)(0)) == 1


def test_float32_rates_are_accurate_for_a_million_updates():
    t = jnp.asarray([999_999], np.int32)
    for schedule, exact in [
        (schedules.exponential_lr(1.0, 0.99999), 0.99999**999_999),
        (schedules.step_lr(1.0, 3, 0.99999), 0.99999 ** (999_999 // 3)),
        (schedules.cosine_annealing_lr(1.0, 10), (1 + math.cos(math.pi * 1.9)) / 2),
        (schedules.cyclic_lr(0.0, 1.0, 10), 0.1),
    ]:
        np.testing.assert_allclose(jax.vmap(schedule)(t)[0], exact, rtol=3e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: schedules.linear_lr(1.0, 0.0), r"start_factor must be in \(0, 1\], got 0\.0"),
        (lambda: schedules.cyclic_lr(0, 1, mode="square"), "mode 'square'"),
        (lambda: schedules.one_cycle_lr(1, 10, anneal_strategy="exp"), "anneal_strategy 'exp'"),
        (lambda: schedules.one_cycle_lr(1, 10, pct_start=0.1), "end at .* include one without steps: change pct_start"),
        (lambda: schedules.wsd(1, 1, 1, 1, decay="quick"), "decay 'quick'"),
        (lambda: schedules.sequential([optax.constant_schedule(1)], [3]), "1 schedules need 0 milestones, got 1"),
        (
            lambda: schedules.sequential([schedules.multiplicative_lr(1, abs)] * 2, [3]),
            "multiplicative_lr continues",
        ),
        (lambda: reduce_lr_on_plateau(1, factor=1.0), r"factor must be < 1, got 1\.0"),
        (lambda: reduce_lr_on_plateau(1, mode="low"), "mode 'low'"),
    ],
)
def test_invalid_arguments_are_named(call, message):
    with pytest.raises(UserError, match=message):
        call()


def test_momentum_cycles_in_optimizers_as_in_pytorch():
    from jaxtrain.optim import adamw

    for kind, make in ((torch.optim.SGD, sgd), (torch.optim.AdamW, adamw)):
        p = torch.ones(3, dtype=torch.float64, requires_grad=True)
        o = kind([p], lr=0.1, **({"momentum": 0.5} if make is sgd else {}))
        scheduler = theirs.OneCycleLR(o, 0.1, 50)
        for _ in range(50):
            p.grad = p.detach() ** 3 - 0.5
            o.step()
            if scheduler.last_epoch < 49:
                scheduler.step()
        with jax.enable_x64(True):
            cycle = {"momentum" if make is sgd else "b1": schedules.one_cycle_momentum(50)}
            tx = make(schedules.one_cycle_lr(0.1, 50), **cycle)

            def update(carry, _, tx=tx):
                q, state = carry
                updates, state = tx.update(q**3 - 0.5, state, q)
                return (q + updates, state), None

            q = jnp.ones(3, np.float64)
            (q, _), _ = jax.lax.scan(update, (q, tx.init(q)), length=50)
        np.testing.assert_allclose(q, p.detach().numpy(), rtol=1e-12)


def test_a_plateau_in_a_training_step_uses_the_loss_of_each_window():
    step = jt.train_step(
        lambda p, batch, rng: (jt.Loss(((p - batch) ** 2).sum(), len(batch)), {}),
        sgd(reduce_lr_on_plateau(0.25, patience=1, factor=0.5)),
        accumulate=2,
    )
    p = torch.nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.SGD([p], lr=0.25)
    scheduler = theirs.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)
    state, rates = step.init(jnp.float32(1.0)), set()
    for i in range(12):
        batch = np.array([1.0, -1.5, 0.5, 0.25], np.float32) * (-1) ** i  # so that the loss improves only sometimes
        state, metrics = step(state, batch)
        optimizer.zero_grad()
        loss = ((p - torch.from_numpy(batch)) ** 2).sum() / 4
        loss.backward()
        assert float(metrics["lr"]) == optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler.step(loss.item())
        np.testing.assert_allclose(float(state.params), p.item(), rtol=1e-5)
        rates.add(float(metrics["lr"]))
    assert len(rates) > 2


@pytest.mark.parametrize("streaming", [False, True])
def test_a_plateau_uses_the_mean_loss_of_the_window(streaming):
    # The window's summed loss grows with the weights, while its mean is constant: only the mean stops improving.
    def loss_fn(params, batch, rng):
        return jt.Loss((params * 0 + batch).sum(), batch.size), {}

    step = jt.train_step(loss_fn, sgd(reduce_lr_on_plateau(1.0, mode="max", patience=0)), accumulate=2)
    state = step.init(jnp.zeros(()), streaming=streaming)
    rates = []
    for rows in (2, 4, 8):
        batch = np.full(rows, 3.0, np.float32)
        if streaming:
            state, _ = step.micro(state, batch[: rows // 2])
            state, metrics = step.micro(state, batch[rows // 2 :])
        else:
            state, metrics = step(state, batch)
        rates.append(float(metrics["lr"]))
        best = float(optax.tree.get(state.opt_state, "best"))
        assert best == 3.0
    np.testing.assert_allclose(rates, [1.0, 1.0, 0.1])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_rate_of_a_metric_is_that_of_a_schedule(accumulate):
    rates = jnp.array([0.5, 0.25, 0.125, 1.0])

    def loss_fn(params, batch, rng):
        return jt.Loss(jnp.square(params["w"] - batch["x"].sum(0)).sum(), 1), {"rate": batch["rate"][0]}

    def run(learning_rate):
        step = jt.train_step(loss_fn, sgd(learning_rate, momentum=0.9), accumulate=accumulate)
        state, used = step.init({"w": jnp.ones(3)}), []
        for i in range(4):
            batch = {"x": jnp.arange(6.0).reshape(2, 3) - i, "rate": jnp.full(2, rates[i])}
            state, metrics = step(state, batch)
            used.append(float(metrics["lr"]))
        return state.params["w"].tolist(), used

    assert run(rate_of_metric("rate")) == run(lambda count: rates[count])


def test_a_rate_that_the_loss_function_does_not_return_is_refused():
    step = jt.train_step(lambda params, batch, rng: (jt.Loss(params.sum(), 1), {}), sgd(rate_of_metric("rate")))
    with pytest.raises(UserError, match=r"loss_fn returns no metric 'rate': return it, as in \{'rate': rate\}"):
        step(step.init(jnp.ones(2)), {"x": jnp.ones(2)})


def test_a_transformation_is_given_what_it_takes_alone():
    seen = {}

    def update(updates, state, params=None, *, value):
        seen["value"] = value
        return updates, state

    tx = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    step = jt.train_step(lambda params, batch, rng: (jt.Loss(params.sum(), 1), {"a": 1.0}), tx)
    step(step.init(jnp.ones(2)), {"x": jnp.ones(2)})
    assert "value" in seen


def test_optimizers_that_take_turns_are_those_of_two_loops():
    def loss_fn(params, batch, rng):
        return jt.Loss(sum(jnp.square(x - batch["x"].sum()).sum() for x in params.values()), 1), {
            "turn": batch["turn"][0]
        }

    both = {"a": at_turn(sgd(0.1, momentum=0.9), 0), "b": at_turn(sgd(0.2, momentum=0.5), 1)}
    step = jt.train_step(loss_fn, groups(lambda path: path, both))
    state = step.init({"a": jnp.ones(2), "b": jnp.ones(3)})
    expected = {"a": np.ones(2), "b": np.ones(3)}
    velocity = {"a": np.zeros(2), "b": np.zeros(3)}
    for i, turn in enumerate([0, 1, 1, 0, 1]):
        state, _ = step(state, {"x": jnp.full(1, float(i)), "turn": jnp.array([turn], jnp.int32)})
        name, lr, momentum = ("a", 0.1, 0.9) if turn == 0 else ("b", 0.2, 0.5)
        velocity[name] = momentum * velocity[name] + 2 * (expected[name] - i)
        expected[name] = expected[name] - lr * velocity[name]
    for name, x in expected.items():
        np.testing.assert_allclose(state.params[name], x, rtol=1e-6)


@pytest.mark.parametrize("bounds", [{"max_norm": 0.7}, {"max_value": 0.3}, {"max_norm": 1.5, "max_value": 0.2}])
def test_a_clipped_optimizer_updates_as_pytorchs_after_clipping(bounds):
    tx, start = clipped(sgd(0.1, momentum=0.9), **bounds), np.array([[0.5, -2.0], [1.0, 0.1]])
    theirs = torch.nn.Parameter(torch.tensor(start))
    optimizer = torch.optim.SGD([theirs], lr=0.1, momentum=0.9)
    with jax.enable_x64(True):
        ours, state = jnp.asarray(start), tx.init(jnp.asarray(start))
        for i in range(4):
            grad = np.sin(np.arange(4.0).reshape(2, 2) + i) / (1 + i)  # over the bounds at first, within them later
            theirs.grad = torch.tensor(grad)
            if "max_norm" in bounds:
                torch.nn.utils.clip_grad_norm_([theirs], bounds["max_norm"])
            if "max_value" in bounds:
                torch.nn.utils.clip_grad_value_([theirs], bounds["max_value"])
            optimizer.step()
            updates, state = tx.update(jnp.asarray(grad), state, ours)
            ours = ours + updates
            np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=1e-14)


def test_a_turn_that_the_loss_function_does_not_return_is_refused():
    step = jt.train_step(lambda params, batch, rng: (jt.Loss(params.sum(), 1), {}), at_turn(sgd(0.1), 0))
    with pytest.raises(UserError, match="loss_fn returns no metric 'turn'"):
        step(step.init(jnp.ones(2)), {"x": jnp.ones(2)})
