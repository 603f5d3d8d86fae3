"""Plausible mistakes with the Python interface: one line with the value and the remedy, and a short traceback."""

import functools
import re
import traceback
import warnings
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx

import jaxtrain as jt
from jaxtrain import losses, optim
from jaxtrain.distributed import make_mesh, shard
from jaxtrain.step.checks import rebuilding
from jaxtrain.step.checks.first_loss import _counted_labels

BATCH = {"x": np.ones((12, 4), np.float32), "y": np.ones(12, np.float32)}
PARAMS = {"w": np.ones(4, np.float32)}


def squares(params, batch):
    return (batch["x"] @ params["w"] - batch["y"]) ** 2


def loss_fn(params, batch, rng):
    return jt.Loss.of(squares(params, batch)), {}


def with_state(params, batch, rng, model_state):
    return jt.Loss.of(squares(params, batch)), {}, model_state


def with_dropout(params, batch, rng):
    keep = jax.random.bernoulli(rng, 0.5, batch["x"].shape)
    return jt.Loss.of((batch["x"] * keep) @ params["w"]), {}


def branching(params, batch, rng):
    loss = jt.Loss.of(squares(params, batch))
    return (loss if loss.total > 0 else None), {}


LEAKED = []


def leaking(params, batch, rng):
    LEAKED.append(squares(params, batch).sum())
    return jt.Loss(LEAKED[0] + LEAKED[-1], 1), {}


def build(loss=loss_fn, optimizer=None, **options):
    return jt.train_step(loss, optimizer or optax.sgd(0.1), **options)


@functools.cache
def shared(name="sgd", **options):
    return build(optimizer=optax.adam(0.1) if name == "adam" else optax.sgd(0.1), **options)


def run(loss, **init):
    """Call a step of this loss, which fails while it is traced."""
    step = build(loss)
    return step(step.init(PARAMS, **init), BATCH)


def returning(make):
    """Run a loss_fn that returns `make(losses)`."""
    return run(lambda params, batch, rng: make(squares(params, batch)))


def with_metric(make):
    return run(lambda params, batch, rng: (jt.Loss.of(squares(params, batch)), make(squares(params, batch))))


def call(batch, state=None, step=None):
    step = step or shared()
    return step(step.init(PARAMS) if state is None else state, batch)


def used_state(step):
    state = step.init(PARAMS)
    step(state, BATCH)
    return state


def leak_twice():
    step = build(leaking)
    state, _ = step(step.init(PARAMS), BATCH)
    step(state, {name: np.concatenate([x, x]) for name, x in BATCH.items()})


def on_device(tree, i):
    return jax.device_put(tree, jax.devices()[i])


def no_wider_batch():
    step = build(allow_recompile=0)
    state, _ = step(step.init(PARAMS), BATCH)
    step(state, {name: x[:5] for name, x in BATCH.items()})


EXPECTED = r"loss_fn must return \(jaxtrain\.Loss\(total, weight\), metrics\), got "


def moments():
    return build(optimizer=optim.adam(0.1))


OPTIMIZER = r"optimizer must be an optax\.GradientTransformation, got "
ARRAYS = r"params must be a pytree of arrays, got "

MISTAKES = {
    # What a loss_fn returns.
    "a mean": (lambda: returning(lambda x: x.mean()), EXPECTED + r"float32\[\]: return Loss\.of\(losses\), \{\}"),
    "a mean and metrics": (
        lambda: returning(lambda x: (x.mean(), {})),
        EXPECTED + r"\(float32\[\], \{\}\): return Loss",
    ),
    "an array": (lambda: returning(lambda x: x), EXPECTED + r"float32\[12\]: return Loss\.of"),
    "no metrics": (
        lambda: returning(jt.Loss.of),
        EXPECTED + r"Loss\(.*\): return a dict of metrics too, .* loss, \{\}",
    ),
    "four values": (
        lambda: returning(lambda x: (jt.Loss.of(x), {}, 1, 2)),
        EXPECTED + r".*: return metrics in one dict",
    ),
    "metrics in a list": (
        lambda: returning(lambda x: (jt.Loss.of(x), [1])),
        EXPECTED + r".*\[int32\[\]\]\): .* as a dict",
    ),
    "nothing": (lambda: returning(lambda x: None), EXPECTED + r"None: return Loss\.of"),
    "losses as total": (lambda: returning(lambda x: (jt.Loss(x, 12), {})), r".*total=float32\[12\].*: use Loss\.of"),
    "no weight": (
        lambda: returning(lambda x: (jt.Loss(x.sum(), None), {})),
        r".*weight=None\): use Loss\.of\(losses\)",
    ),
    "a Loss without a weight": (
        lambda: returning(lambda x: (jt.Loss(x.sum()), {})),
        r"test_mistakes\.py:\d+: Loss\(total\) needs its weight too: use Loss\.of\(losses\) .*, or Loss\(total, w",
    ),
    "a torch total": (
        lambda: returning(lambda x: (jt.Loss(torch.ones(()), 1), {})),
        r".*total=torch\.Tensor.*: use Loss",
    ),
    "a negative weight": (
        lambda: returning(lambda x: (jt.Loss(x.sum(), -1), {})),
        r".* not be negative or NaN, got -1: use",
    ),
    "a count as loss": (
        lambda: returning(lambda x: (jt.Loss((x > 0).sum(), 1), {})),
        r".*-point total, got int32\[\].*: sum",
    ),
    "Loss.of a mean": (
        lambda: returning(lambda x: (jt.Loss.of(x.mean()), {})),
        r"Loss\.of takes .*, got a scalar: pass them",
    ),
    "Loss.of a list": (
        lambda: returning(lambda x: (jt.Loss.of([1.0]), {})),
        r"Loss\.of .*, got \[float32\[\]\]: pass jnp",
    ),
    "a metric of rows": (
        lambda: with_metric(lambda x: {"out": x}),
        r"metric 'out' must .*, got float32\[12\]: return its mean",
    ),
    "a metric of text": (
        lambda: with_metric(lambda x: {"out": "a"}),
        r"metric 'out' must be a scalar.*, got str \"a\": ",
    ),
    "nested metrics": (
        lambda: with_metric(lambda x: {"out": {"a": 1.0}}),
        r"metric 'out' .*, got \{a: float32\[\]\}: ",
    ),
    "a metric's number": (
        lambda: with_metric(lambda x: {1: 1.0}),
        r"the names of metrics must be strings, got 1: use '1'",
    ),
    # What a loss_fn takes.
    "no rng": (
        lambda: build(lambda params, batch: None),
        r"loss_fn must take .*, got <lambda>\(params, batch\): change",
    ),
    "no function": (lambda: build(3), r"loss_fn must be a function .*, got int 3: define one"),
    "an unexpected state": (
        lambda: run(with_state),
        r"loss_fn must take \(params, batch, rng\), got with_state\(.*init\(",
    ),
    "a state not taken": (
        lambda: run(loss_fn, model_state=np.ones(1)),
        r"loss_fn must take .*model_state\), got loss_fn\(.*: ",
    ),
    # Values of traced arrays.
    "float()": (
        lambda: returning(lambda x: float(x.sum())),
        r"test_mistakes\.py:\d+: float\(\) of .*, float32\[\]: .* metric",
    ),
    "item()": (
        lambda: returning(lambda x: x.sum().item()),
        r"test_mistakes\.py:\d+: item\(\) of .*, float32\[\]: .* metric",
    ),
    "if": (
        lambda: run(branching),
        r"test_mistakes\.py:\d+: if, .* a traced value, bool\[\]: use jnp\.where, jax\.lax\.cond",
    ),
    "a NumPy function": (
        lambda: returning(np.sin),
        r"test_mistakes\.py:\d+: a NumPy function .*, float32\[12\]: replace np",
    ),
    "a mask as index": (
        lambda: returning(lambda x: x[x > 0]),
        r"test_mistakes\.py:\d+: x\[mask\] .*, bool\[12\] .*: multiply",
    ),
    "range()": (
        lambda: returning(lambda x: [*range(x.argmax())]),
        r"test_mistakes\.py:\d+: .*, int32\[\], .*fori_loop",
    ),
    "an f-string": (
        lambda: returning(lambda x: f"{x.sum():.2f}"),
        r"test_mistakes\.py:\d+: an f-string .*: use jax\.debug",
    ),
    "a stored value": (
        leak_twice,
        r"test_mistakes\.py:\d+: a traced value, float32\[\], was stored .*: return it",
    ),
    # The optimizer.
    "PyTorch's optimizer": (
        lambda: build(optimizer=torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)),
        OPTIMIZER + r"SGD: convert it with jaxtrain\.interop\.from_torch",
    ),
    "PyTorch's class": (
        lambda: build(optimizer=torch.optim.AdamW),
        OPTIMIZER + r"the class torch\.optim\.AdamW: use one",
    ),
    "an uncalled optimizer": (
        lambda: build(optimizer=optim.adamw),
        OPTIMIZER + r"function: call it, as in adamw\(1e-3\)",
    ),
    "a name": (lambda: build(optimizer="adamw"), OPTIMIZER + r"str 'adamw': use one of jaxtrain\.optim"),
    "a learning rate": (lambda: build(optimizer=1e-3), OPTIMIZER + r"float 0\.001: .*jaxtrain\.optim\.adamw\(0\.001\)"),
    "lr": (lambda: optim.adamw(lr=1e-3), r"adamw has no argument lr=0\.001: use learning_rate"),
    "betas": (
        lambda: optim.adam(1e-3, betas=(0.9, 0.95)),
        r"adam has no argument betas=\(0\.9, 0\.95\): use b1 and b2",
    ),
    "momentun": (lambda: optim.sgd(1e-3, momentun=0.9), r"sgd has no argument momentun=0\.9: use one of .*momentum"),
    "an optimizer of params": (
        lambda: optim.adamw(PARAMS),
        r"the learning_rate of adamw must .*, got a dict: .* step\.init",
    ),
    "a rate in quotes": (
        lambda: optim.adamw("1e-3"),
        r"the learning_rate of adamw must be a number .*, got '1e-3': use float",
    ),
    # Options.
    "an empty frozen": (
        lambda: build(frozen=lambda path: path == "v").init(PARAMS),
        r"frozen matches no parameter: .* w",
    ),
    "all frozen": (
        lambda: build(frozen=lambda path: True).init(PARAMS),
        r"no parameter is trained, frozen .*: leave at",
    ),
    "frozen as a name": (lambda: build(frozen="w"), r"frozen must be a function .*, got 'w': use lambda path: .*'w'"),
    "frozen of a leaf": (
        lambda: build(frozen=lambda path, x: True),
        r"frozen must take one argument, .*\(path, x\): remove",
    ),
    "clip_norm in quotes": (lambda: build(clip_norm="1"), r"clip_norm must be positive, got '1': use None"),
    "ema of 1": (lambda: build(ema=1), r"ema must be in \[0, 1\), got 1: use None for no average"),
    "remat as a flag": (lambda: build(remat=True), r"remat must be a string, got True: use 'full'"),
    "a number as scaler": (
        lambda: build(loss_scale=8.0),
        r"loss_scale must .*, got 8\.0: use jaxtrain\.static_loss_scale\(8\.0\)",
    ),
    "a list of hooks": (lambda: build(hooks=[1]), r"hooks must map .*, got \[1\]: use \{"),
    "allow_recompile of -1": (lambda: build(allow_recompile=-1), r"allow_recompile must .* at least 0, got -1: use 0"),
    "a dtype as precision": (
        lambda: build(precision="bfloat16"),
        r"precision 'bfloat16' is unknown: choose one of .*bf16",
    ),
    "tensor without rules": (
        lambda: shard(shared(), make_mesh("tensor=2", jax.devices()[:2])),
        r"mesh axis tensor=2 divides nothing without sharding rules, .*: give rules",
    ),
    "an unknown option": (
        lambda: build(grad_clip=1.0),
        r"train_step\(\) got .* 'grad_clip': the arguments are .*clip_norm",
    ),
    "no params": (
        lambda: shared().init(),
        r"TrainStep\.init\(\) missing .* 'params': the arguments are params, model_state",
    ),
    "an optimizer to evaluate": (
        lambda: jt.eval_step(loss_fn, optax.sgd(0.1)),
        r"eval_step\(\) takes .*: .* precision",
    ),
    # What init takes.
    "an nnx model": (
        lambda: shared().init(nnx.Linear(4, 1, rngs=nnx.Rngs(0))),
        ARRAYS + r"the module Linear: .*functional",
    ),
    "a Linen model": (lambda: shared().init(nn.Dense(1)), ARRAYS + r"the module Dense: .* model\.init\(key, x\)"),
    "a torch model": (
        lambda: shared().init(torch.nn.Linear(4, 1)),
        ARRAYS + r"the module Linear: import it, as model = jaxtrain\.from_torch\(module, batch\)",
    ),
    "a state_dict": (
        lambda: shared().init(torch.nn.Linear(4, 1).state_dict()),
        r"parameter weight is a torch\.Tensor: convert",
    ),
    "a state as params": (lambda: shared().init(shared().init(PARAMS)), ARRAYS + r"a TrainState: pass state\.params"),
    "a Python 0": (
        lambda: shared().init({**PARAMS, "n": 0}),
        r"parameter n is the Python int 0, .*: use 0\.0 to train it",
    ),
    "a setting in params": (
        lambda: shared().init({**PARAMS, "act": "relu"}),
        r"parameter act is str \"relu\", .*: leave it",
    ),
    "a function of a key": (
        lambda: shared().init(lambda key: PARAMS),
        r".*without arguments, got <lambda>\(key\): give it its",
    ),
    "donated params": (
        lambda: shared().init(used_state(shared()).params),
        r"parameter w was donated .*: use the state which",
    ),
    "a seed of 0.5": (lambda: shared().init(PARAMS, seed=0.5), r"seed must be an integer, got float32\[\]: use 0"),
    # The state of a call.
    "params as state": (lambda: call(BATCH, PARAMS), r"state must be .*, got dict: use step\.init\(params\)"),
    "swapped arguments": (
        lambda: call(shared().init(PARAMS), BATCH),
        r"the state was given as the batch: call step\(state, ",
    ),
    "state and metrics": (
        lambda: call(BATCH, call(BATCH)),
        r"state must be .*, got the tuple \(state, metrics\): unpack it",
    ),
    "a donated state": (
        lambda: call(BATCH, used_state(shared())),
        r"the state was donated .*: use the state which that call",
    ),
    "a donated state in evaluation": (
        lambda: jt.eval_step(loss_fn)(used_state(shared()), BATCH),
        r"the state was donated to an earlier call .*: use the state which",
    ),
    "another optimizer's state": (
        lambda: call(BATCH, shared().init(PARAMS), shared("adam")),
        r"the state does not fit .* opt_state lacks 0/count; create it with this step's init\(params\)",
    ),
    "other params": (
        lambda: call(BATCH, shared("adam").init(PARAMS)._replace(params={"w": jnp.ones(5)}), shared("adam")),
        r"the state does not fit .* opt_state has float32\[4\] at 0/mu/w, expected float32\[5\]; create",
    ),
    "a state without loss scale": (
        lambda: call(BATCH, shared().init(PARAMS), shared(precision="fp16")),
        r"the state has no loss scale, but this step expects a loss scale \(.*\): create it",
    ),
    "a state with loss scale": (
        lambda: call(BATCH, shared(precision="fp16").init(PARAMS)),
        r"the state has a loss scale \(.*\), but this step expects no loss scale: create it",
    ),
    "a state without average": (
        lambda: call(BATCH, shared().init(PARAMS), shared(ema=0.5)),
        r"the state has no moving average .* ema=0\.5: create it",
    ),
    "a state of a similar optimizer": (
        lambda: call(BATCH, shared("adam").init(PARAMS), build(optimizer=optax.adamw(0.1, mask={"w": False}))),
        r"the state does not fit .* opt_state ",
    ),
    "moments of another dtype": (
        lambda: call(BATCH, build(optimizer=optim.adam(0.1, moments_dtype=jnp.bfloat16)).init(PARAMS), moments()),
        r"the state does not fit .* opt_state has bfloat16\[4\] at 0/mu/w, expected float32\[4\]; create",
    ),
    "an optimizer without state": (
        lambda: call(BATCH, shared("adam").init(PARAMS)),
        r"the state does not fit .* opt_state has 0/count, which the step does not use; create",
    ),
    "a state of another precision": (
        lambda: call(BATCH, shared().init(PARAMS), shared(precision="bf16_params")),
        r"the state does not fit this step: its parameter w is float32, but this step's precision has bfloat16",
    ),
    "an average of other params": (
        lambda: call(BATCH, shared(ema=0.5).init(PARAMS)._replace(ema={"w": jnp.ones(5)}), shared(ema=0.5)),
        r"the state does not fit this step: its ema has float32\[5\] at w, expected float32\[4\]; create",
    ),
    "a window of other params": (
        lambda: build(accumulate=2).micro(
            build(accumulate=2).init(PARAMS, streaming=True)._replace(params={"w": jnp.ones(5)}), BATCH
        ),
        r"the state does not fit this step: its window has float32\[4\] at w, expected float32\[5\]; flush it",
    ),
    "two params of one name": (
        lambda: build().init({"a/b": jnp.ones(4), "a": {"b": jnp.ones(4)}}),
        r"params has two arrays of one name, \['a'\]\['b'\] and \['a/b'\]: rename a key",
    ),
    # The batch.
    "another byte order": (
        lambda: call({"x": np.ones((8, 4), ">f4")}),
        r"the array x of the batch has another byte order: pass x\.astype\('float32'\)",
    ),
    "torch tensors": (
        lambda: call({**BATCH, "x": torch.ones(12, 4)}),
        r"the batch .*, got a torch\.Tensor at x: pass tensor",
    ),
    "strings": (lambda: call({**BATCH, "text": "abc"}), r"the batch holds strings at text, 'abc': leave them out"),
    "an array of strings": (
        lambda: call({**BATCH, "text": np.array(["ab"])}),
        r"the batch .* strings at text, 'ab': leave",
    ),
    "an array of objects": (
        lambda: call({**BATCH, "o": np.array([None])}),
        r"the batch .*, got an object array at o: leave",
    ),
    "lists of numbers": (
        lambda: call({**BATCH, "x": BATCH["x"].tolist()}),
        r"the batch holds a list of numbers at x: pass num",
    ),
    "no batch": (lambda: call(None), r"the batch is None: pass a pytree of arrays"),
    "devices that differ": (
        lambda: call(on_device(BATCH, 1), on_device(shared().init(PARAMS), 0)),
        r"the state is on \S*0, the batch on \S*1: place both alike, with jax\.device_put",
    ),
    "rows not divisible": (
        lambda: call(BATCH, step=shared(accumulate=5)),
        r"batch_size 12 is not divisible by accumulate 5: use",
    ),
    "a scalar to split": (
        lambda: call({**BATCH, "s": 2.0}, step=shared(accumulate=2)),
        r"s is a scalar, which cannot .*: give",
    ),
    "a list to split": (
        lambda: call({"x": [1.0, 2.0]}, step=shared(accumulate=2)),
        r"x is a list of 2 numbers, .*: pass num",
    ),
    "another shape": (no_wider_batch, r"recompilation: batch/x is float32\[5,4\], was float32\[12,4\]; use one shape"),
    # The arguments of a call.
    "two batches": (
        lambda: shared()(shared().init(PARAMS), BATCH["x"], BATCH["y"]),
        r"a step takes a state and one batch, got 3 positional arguments: pass all arrays .* step\(state, \{'x': x,",
    ),
    "a state alone": (
        lambda: shared().micro(shared().init(PARAMS)),
        r"a step takes a state and one batch, got 1 positional arguments: pass all",
    ),
    "named arrays on a mesh": (
        lambda: shard(build(), make_mesh())(shared().init(PARAMS), x=BATCH["x"], y=BATCH["y"]),
        r"a step takes a state and one batch, got 1 positional arguments and x= and y=: pass all",
    ),
    "two batches in evaluation": (
        lambda: jt.eval_step(loss_fn)(shared().init(PARAMS), BATCH["x"], BATCH["y"]),
        r"a step takes a state and one batch, got 3 positional arguments: pass all",
    ),
    # Evaluation.
    "dropout in evaluation": (
        lambda: jt.eval_step(with_dropout)(shared().init(PARAMS), BATCH),
        r"test_mistakes\.py:\d+: eval_step calls loss_fn with rng=None: apply dropout only if rng is not None",
    ),
    "torch tensors in evaluation": (
        lambda: jt.eval_step(loss_fn)(shared().init(PARAMS), {"x": torch.ones(12, 4)}),
        r"the batch must .*, got a torch\.Tensor at x: pass tensor\.numpy\(\)",
    ),
}


def frames_of_the_package(error):
    folder = str(Path(jt.__file__).parent)
    return [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(folder)]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_in_one_line_with_a_short_traceback(name):
    make, message = MISTAKES[name]
    with pytest.raises(jt.UserError) as raised:
        make()
    assert re.match(message, str(raised.value)), str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(frames_of_the_package(raised.value)) <= 2
    printed = "".join(traceback.format_exception(raised.value))
    assert "The above exception" not in printed
    assert "During handling" not in printed
    assert "site-packages" not in printed


# --- Errors of the user's own code.


def test_an_error_in_a_loss_fn_keeps_its_type_and_its_lines_and_names_the_arguments():
    def missing_key(params, batch, rng):
        return jt.Loss.of(batch["target"]), {}

    with pytest.raises(KeyError, match="target") as raised:
        run(missing_key)
    assert [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)][-1] == "missing_key"
    assert len(frames_of_the_package(raised.value)) <= 2
    note = "loss_fn was called with params {w: float32[4]} and batch {x: float32[12,4], y: float32[12]}"
    assert note in raised.value.__notes__


def test_the_users_line_remains_in_the_traceback_of_a_mistake():
    with pytest.raises(jt.UserError) as raised:
        run(branching)
    assert [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)][-1] == "branching"


def test_a_mistake_inside_a_composed_step_is_refused():
    step = shared("adam")
    wrong = step.init(PARAMS)._replace(params={"w": jnp.ones(5)})
    with pytest.raises(jt.UserError, match="the state does not fit"):
        jax.eval_shape(step, wrong, BATCH)


def test_an_error_inside_the_package_keeps_all_frames(monkeypatch):
    monkeypatch.setattr("jaxtrain.step.step.clip_grad_norm", int)
    with pytest.raises(TypeError) as raised:
        run(loss_fn)
    assert "update" in [frame.name for frame in frames_of_the_package(raised.value)]


@pytest.fixture
def _unfiltered():
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    yield
    jax.config.update("jax_traceback_filtering", before)


@pytest.mark.usefixtures("_unfiltered")
def test_all_frames_are_kept_without_traceback_filtering():
    with pytest.raises(jt.UserError) as raised:
        returning(lambda x: None)
    assert len(frames_of_the_package(raised.value)) > 5


# --- Warnings, for what is valid but not meant.


def warnings_of(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


MEANS = {
    "mean": lambda x: x.mean(),
    "negated": lambda x: -(-x).mean(),
    "over the size": lambda x: x.sum() / x.size,
    "in bfloat16": lambda x: x.astype(jnp.bfloat16).mean(),
    "of two axes": lambda x: x.reshape(3, 4).mean(),
    "two means": lambda x: x.mean() + jnp.abs(x).mean(),
}


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_with_a_weight_is_warned_of_once(name):
    def of_mean(params, batch, rng):
        return jt.Loss(MEANS[name](squares(params, batch)), weight=len(batch["x"])), {}

    step = build(of_mean)
    (message,) = warnings_of(lambda: step(step.init(PARAMS), BATCH))
    assert re.search(r"at test_mistakes\.py:\d+ .*weight=12\), .*mean over 12 elements.*12 times.*Loss\.of", message)
    assert not warnings_of(lambda: step.jitted.lower(step.init(PARAMS), {**BATCH, "z": BATCH["x"]}))


SUMS = {
    "sum": lambda x: jt.Loss(x.sum(), len(x)),
    "of": jt.Loss.of,
    "a mean of weight 1": lambda x: jt.Loss(x.mean(), 1),
    "a mean times the rows": lambda x: jt.Loss(x.mean() * len(x), len(x)),
    "a sum of means": lambda x: jt.Loss(x.reshape(3, 4).mean(1).sum(), 3),
    "a scaled sum": lambda x: jt.Loss(x.sum() / 7, len(x)),
    "a mean of another size": lambda x: jt.Loss(x.mean(), 5),
    "a mean and a sum": lambda x: jt.Loss(x.mean() + x.sum(), len(x)),
    "a mean of a mask": lambda x: jt.Loss(x.mean(where=x > 0), len(x)),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_or_a_mean_that_may_be_meant_is_not_warned_of(name):
    def of_sum(params, batch, rng):
        return SUMS[name](squares(params, batch)), {}

    jax.eval_shape(build(of_sum).pure, shared().shapes(PARAMS), BATCH)


LABELS = np.arange(12) % 4
BUILT_IN = {
    **{
        name: lambda x: (x, jnp.ones_like(x))
        for name in ("binary_cross_entropy_with_logits", "kl_div", "hinge_embedding")
    },
    **{name: lambda x: (x, jnp.ones_like(x)) for name in ("huber", "l1", "mse", "smooth_l1")},
    **{name: lambda x: (x, LABELS) for name in ("cross_entropy", "nll")},
    "chunked_cross_entropy": lambda x: (x, jnp.ones((4, 5)), LABELS),
    "cosine_embedding": lambda x: (x, x, jnp.ones(12)),
    "triplet_margin": lambda x: (x, x, x),
}


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_losses_are_not_warned_of(name):
    def built_in(params, batch, rng):
        return jt.Loss.of(getattr(losses, name)(*BUILT_IN[name](batch["x"] * params["w"][None]))), {}

    jax.eval_shape(build(built_in).pure, shared().shapes(PARAMS), BATCH)


def test_a_shorter_last_batch_is_warned_of_once():
    step = build()
    state, _ = step(step.init(PARAMS), BATCH)

    def shorter(rows):
        step.jitted.lower(state, {name: x[:rows] for name, x in BATCH.items()})

    (message,) = warnings_of(lambda: shorter(5))
    assert re.search(
        r"shorter batch: batch/x is float32\[5,4\], was float32\[12,4\]\. Drop .*allow_recompile=1", message
    )
    assert not warnings_of(lambda: shorter(4))


@pytest.mark.parametrize("options", [{}, {"allow_recompile": 1}])
def test_other_shapes_of_a_batch_are_not_warned_of(options):
    step = build(**options)
    state = step.init(PARAMS)
    lower = step.jitted.lower
    lower(state, BATCH)
    if options:
        lower(state, {name: x[:5] for name, x in BATCH.items()})
    else:
        lower(state, {name: np.concatenate([x, x]) for name, x in BATCH.items()})
        lower(state, {**BATCH, "z": BATCH["x"]})


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"x": np.ones((3, 4), np.float32), "label": np.array([1, 2, 4])},
            r"the first loss is nan, as a label outside 0\.\.classes - 1 .* the batch holds label from 1 to 4; check",
        ),
        (
            {"x": np.full((3, 4), np.nan, np.float32), "label": np.array([0, 1, 2])},
            r"the first loss is nan, and so are values of the batch, in x: leave out their rows",
        ),
        (
            {"x": np.full((3, 4), np.inf, np.float32), "label": np.array([0, 1, 2])},
            r"the first loss is nan, and so are values of the batch, in x: leave out their rows",
        ),
    ],
)
def test_labels_out_of_range_and_nan_in_the_first_batch_are_warned_of_once(batch, message):
    def classify(params, batch, rng):
        return jt.Loss.of(losses.cross_entropy(batch["x"] * params["w"][None], batch["label"])), {}

    step = build(classify)

    def loop():
        state = step.init(PARAMS)
        for _ in range(3):
            state, _ = step(state, batch)

    (text,) = warnings_of(loop)
    assert re.match(message, text)


@pytest.mark.parametrize(
    ("make_loss", "is_warned_of"),
    [
        (lambda found, labels: jt.Loss.of(found), True),
        (lambda found, labels: jt.Loss(found.sum(), 3), True),
        (lambda found, labels: jt.Loss.of(found, labels != -100), False),
        (lambda found, labels: jt.Loss(found.sum(), losses.label_weights(labels).sum()), False),
    ],
)
def test_ignored_labels_that_are_counted_are_warned_of(make_loss, is_warned_of):
    def classify(params, batch, rng):
        found = losses.cross_entropy(batch["x"] * params["w"][None], batch["label"])
        return make_loss(found, batch["label"]), {}

    batch = {"x": np.ones((3, 4), np.float32), "label": np.array([1, -100, 2]), "offset": np.array([-100, -3, 5])}
    step = build(classify)
    found = warnings_of(lambda: step(step.init(PARAMS), batch))
    message = (
        r"the weight of the loss counts labels of -100 at label, which are no part of PyTorch's mean: use Loss\.of"
    )
    assert [bool(re.match(message, text)) for text in found] == [True] * is_warned_of


@pytest.mark.parametrize(
    ("labels", "weight", "is_counted"),
    [
        ([[3, 1, -100], [-100, 2, 0]], 6, True),
        ([[3, 1, -100], [-100, 2, 0]], 4, False),  # also the number of the predicted labels
        ([[3, 1, 1], [-100, -100, 0]], 4, False),
        ([[3, -100, -100], [1, -100, 0]], 4, True),
        ([[3, -100, -100], [1, -100, 0]], 3, False),
        ([[3, 1], [1, 0]], 4, False),
    ],
)
def test_whether_ignored_labels_are_counted(labels, weight, is_counted):
    batch = {"label": np.array(labels), "offset": np.full(4, -100) + np.arange(4)}
    assert _counted_labels(weight, batch) == ("label" if is_counted else None)


@pytest.fixture
def _no_earlier_steps(monkeypatch):
    monkeypatch.setattr(rebuilding, "_recent", {})
    monkeypatch.setattr(rebuilding, "_warned", set())


@pytest.mark.usefixtures("_no_earlier_steps")
def test_a_step_built_in_a_loop_is_warned_of_once():
    def loop():
        state = shared().init(PARAMS)
        for _ in range(8):
            state, _ = build()(state, BATCH)

    (message,) = warnings_of(loop)
    assert re.search(
        r"train_step was called 5 times for the loss_fn at test_mistakes\.py:\d+, .*Build the step once", message
    )


@pytest.mark.usefixtures("_no_earlier_steps")
def test_steps_that_are_called_repeatedly_or_on_new_states_are_not_warned_of():
    for _ in range(6):
        step = build()
        step(step.init(PARAMS), BATCH)
    state = shared().init(PARAMS)
    for _ in range(6):
        step = build()
        for _ in range(2):
            state, _ = step(state, BATCH)
