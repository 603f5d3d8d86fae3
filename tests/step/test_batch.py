"""Batches at a step's boundary: numbers keep their values, rows agree, no array is donated and read."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.distributed import make_mesh, place_batch, shard

BEYOND = {
    "int64": (np.array([0, 2**32 + 1]), "4294967297", "int32"),
    "least int64": (np.array([[-(2**31) - 1, 5]]).T, "-2147483649", "int32"),
    "uint64": (np.array([1, 2**32], np.uint64), "4294967296", "uint32"),
    "another byte order": (np.array([0, 2**33], ">i8"), "8589934592", "int32"),
    "scalar": (np.int64(2**31), "2147483648", "int32"),
    "Python int": (2**40, "1099511627776", "int32"),
    "huge Python int": (2**70, str(2**70), "int32"),
    "float64": (np.array([0.5, -1e300]), "-1e[+]300", "float32"),
    "float64 beside infinity": (np.array([np.inf, -1e39]), "-1e[+]39", "float32"),
    "Python float": (1e300, "1e[+]300", "float32"),
}
WITHIN = [
    np.array([2**31 - 1, -(2**31)]),
    np.array([0, 2**32 - 1], np.uint64),
    np.array([2**32 - 1, 0], np.uint32),
    np.array([], np.int64).reshape(2, 0),
    2**31 - 1,
]


def loss_fn(params, batch, rng):
    del rng
    return jt.Loss.of((batch["x"] @ params["w"]) ** 2), {}


def batch_with(**others):
    return {"x": np.ones((2, 4), np.float32), **others}


@pytest.fixture(scope="module")
def steps():
    step = jt.train_step(loss_fn, optax.sgd(0.1))
    streaming = jt.train_step(loss_fn, optax.sgd(0.1), accumulate=2)
    mesh = make_mesh("data=1", jax.devices()[:1])
    params = {"w": jnp.ones(4)}
    return {
        "call": lambda batch: step(step.init(params), batch),
        "micro": lambda batch: streaming.micro(streaming.init(params, streaming=True), batch),
        "eval_step": lambda batch: jt.eval_step(loss_fn)(step.init(params), batch),
        "mesh": lambda batch: shard(step, mesh)(shard(step, mesh).init(params), batch),
        "place": step.place,
        "place_batch": lambda batch: place_batch(batch, mesh),
    }


@pytest.mark.parametrize("name", ["call", "micro", "eval_step", "mesh", "place", "place_batch"])
@pytest.mark.parametrize("kind", BEYOND)
def test_numbers_that_jax_would_replace_are_refused(steps, name, kind):
    value, shown, dtype = BEYOND[kind]
    with pytest.raises(jt.UserError, match=rf"the batch holds {shown} at id, which {dtype} cannot hold: use smaller"):
        steps[name](batch_with(id=value))


def test_integers_of_32_bits_are_passed_on():
    seen = {}

    def reading(params, batch, rng):
        seen.update(jax.tree.map(lambda x: x.dtype.name, batch))
        return jt.Loss.of((batch["x"] @ params["w"]) ** 2), {"id": (batch["id"] % 7).sum().astype(np.float32)}

    step = jt.train_step(reading, optax.sgd(0.1))
    for value in WITHIN:
        _, metrics = step(step.init({"w": jnp.ones(4)}), batch_with(id=value))
        assert float(metrics["id"]) == float(np.sum(np.asarray(value).astype(np.int64) % 7))


def test_infinity_and_rounding_are_passed_on(steps):
    for value in (np.array([np.inf, -np.inf]), np.array([0.1, np.nan]), np.finfo(np.float32).max.astype(float)):
        steps["place"](batch_with(value=value))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([1, 2], "timedelta64[s]"), r"arrays of numbers, got a timedelta64\[s\] array at id"),
        (
            np.ma.masked_array(np.ones(2, np.float32), [0, 1]),
            r"the array id of the batch is masked: pass x\.filled\(0\)",
        ),
    ],
)
def test_arrays_that_are_no_plain_numbers_are_refused(steps, array, message):
    with pytest.raises(jt.UserError, match=message):
        steps["call"](batch_with(id=array))


def test_a_batch_without_rows_is_refused():
    step = jt.train_step(loss_fn, optax.sgd(0.1))
    with pytest.raises(jt.UserError, match="the arrays of the batch have no rows: leave such batches out"):
        step(step.init({"w": jnp.ones(4)}), {"x": np.ones((0, 4), np.float32)})


def test_integers_among_the_parameters_are_kept_or_refused():
    step = jt.train_step(loss_fn, optax.sgd(0.1))
    for options in ({}, {"model_state": {"id": np.array([2**40])}}):
        params = {"w": np.ones(4, np.float32), "table": np.array([1, 2**40 * (not options)])}
        with pytest.raises(jt.UserError, match=r"(params|model_state) holds 1099511627776 at (table|id), which int32"):
            step.init(params, **options)
    with jax.enable_x64(True):
        wide = jnp.array([2**40])
    with pytest.raises(jt.UserError, match="the batch holds 1099511627776 at id"):
        step(step.init({"w": jnp.ones(4)}), batch_with(id=wide))


def test_random_integers_are_right_or_refused():
    step = jt.train_step(
        lambda params, batch, rng: (jt.Loss.of(batch["x"] @ params), {"even": (batch["id"] % 2 == 0).mean()}),
        optax.sgd(0.1),
    )
    generator, refused = np.random.default_rng(0), 0
    for _ in range(40):
        dtype = generator.choice([np.int64, np.uint64, np.int32])
        ids = generator.integers(0, 2 ** int(generator.integers(8, 62 if dtype != np.int32 else 31)), 2).astype(dtype)
        try:
            _, metrics = step(step.init(jnp.ones(4)), batch_with(id=ids))
        except jt.UserError:
            refused += 1
            assert ids.max() > np.iinfo(np.int32 if dtype == np.int64 else np.uint32).max
        else:
            assert float(metrics["even"]) == (ids % 2 == 0).mean()
    assert 5 < refused < 35


ROWS = r"the arrays of the batch have different numbers of rows, 10 at class_weight and 8 at x: give each a leading"


def ragged():
    return {"x": np.ones((8, 4), np.float32), "class_weight": np.arange(10, dtype=np.float32)}


def test_rows_that_differ_are_not_divided():
    def weighted(params, batch, rng):
        return jt.Loss.of((batch["x"] @ params["w"]) ** 2 * batch["class_weight"][3]), {}

    params = {"w": jnp.ones(4)}
    whole = jt.train_step(weighted, optax.sgd(0.1))
    _, metrics = whole(whole.init(params), ragged())
    assert float(metrics["loss"]) == 48  # nothing is divided
    divided = jt.train_step(weighted, optax.sgd(0.1), accumulate=2)
    meshed = shard(whole, make_mesh("data=1", jax.devices()[:1]))
    for step in (divided, meshed, shard(divided, make_mesh("data=1", jax.devices()[:1]))):
        with pytest.raises(jt.UserError, match=ROWS):
            step(step.init(params), ragged())


def test_rows_that_differ_are_named_where_the_loss_fails():
    def mismatched(params, batch, rng):
        return jt.Loss.of(batch["x"] @ params["w"] - batch["class_weight"]), {}

    step = jt.train_step(mismatched, optax.sgd(0.1))
    with pytest.raises(jt.UserError, match=r"different numbers of rows, 10 at class_weight and 8 at x") as raised:
        step(step.init({"w": jnp.ones(4)}), ragged())
    assert "\n" not in str(raised.value)


def test_a_loss_for_every_pair_of_rows_is_warned_of():
    batch = {"x": np.ones((2, 4), np.float32), "y": np.arange(2, dtype=np.float32)}

    def build(difference, reduce=jt.Loss.of):
        step = jt.train_step(
            lambda params, batch, rng: (reduce(difference(batch["x"] @ params["w"] + params["b"], batch["y"])), {}),
            optax.sgd(0.1),
        )
        with jax.numpy_rank_promotion("allow"):  # as users have it
            step(step.init({"w": jnp.ones((4, 1)), "b": jnp.zeros(1)}), batch)

    pairs = r"subtract of shapes \(2, 1\) \(2,\) in loss_fn at test_batch\.py:\d+ gives a loss for every pair of rows"
    with pytest.warns(UserWarning, match=pairs):
        build(lambda prediction, y: (prediction - y) ** 2)
    with pytest.warns(UserWarning, match=pairs):
        build(lambda prediction, y: jnp.abs(prediction - y), lambda losses: jt.Loss(losses.sum(), losses.shape[0]))
    with pytest.warns(UserWarning, match=r"multiply of shapes \(2,\) \(2, 1\) in loss_fn"):
        build(lambda prediction, y: optax.sigmoid_binary_cross_entropy(prediction, y))
    # These do not warn, as pytest's settings make warnings errors.
    build(lambda prediction, y: (prediction[:, 0] - y) ** 2)
    build(lambda prediction, y: (prediction - y[:, None]) ** 2)
    build(lambda prediction, y: (prediction - y[None, :]) ** 2)
    build(lambda prediction, y: optax.sigmoid_binary_cross_entropy(prediction[:, 0], y))
    build(lambda prediction, y: prediction * y[None, :])


def test_an_array_that_is_donated_and_read_is_named():
    def both(params, batch, rng):
        return jt.Loss.of(batch["x"] @ (params["a"] - params["b"]) + batch.get("of", jnp.zeros(4)).sum()), {}

    step, one, x = jt.train_step(both, optax.sgd(0.1)), jnp.ones(4), batch_with()
    with pytest.raises(jt.UserError, match=r"params/a of the state and params/b of the state are one array, .*copy"):
        step(step.init({"a": one, "b": one}, donate=True), x)
    state = step.init({"a": one, "b": one})  # copies
    with pytest.raises(jt.UserError, match=r"params/b of the state and of of the batch are one array, .*copy"):
        step(state, {**x, "of": state.params["b"]})


def test_a_donated_state_is_refused_before_xla_reports_it(capfd):
    step = jt.train_step(loss_fn, optax.sgd(0.1))
    state = step.init({"w": jnp.ones(4)})
    step(state, batch_with())
    with pytest.raises(jt.UserError, match="the state was donated to an earlier call"):
        step(state, batch_with())
    assert "ExecutePrepare" not in capfd.readouterr().err
