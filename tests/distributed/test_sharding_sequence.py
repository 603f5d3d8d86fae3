"""Sequences divided over devices: the numbers of one device, and what each of them then holds."""

import re

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.distributed import make_mesh, memory_per_device, shard
from jaxtrain.errors import UserError
from jaxtrain.models import attention
from jaxtrain.optim import adamw
from jaxtrain.transforms import jaxpr
from jaxtrain.transforms.merged_rows import UnmergeRows
from tests.distributed.deep import POSITIONS, ROWS, TOKENS, WIDTH, deep
from tests.distributed.programs import RUNS, SEQUENCES, distance, train
from tests.distributed.test_sharding_step import NEAR, trained_alike


def some(*names, soon):
    """As parameters, those not so soon to be known of marked slow."""
    return [pytest.param(name, marks=() if name in soon else pytest.mark.slow) for name in names]


def test_twenty_steps_are_those_of_one_device(double):
    trained_alike("packed", "data=2,sequence=2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"remat": "full"}, {"remat": "names:attention", "unroll": True}, {"accumulate": 1}]
)
def test_options_change_no_number(options, double):
    run = RUNS["gpt2"]()
    alone, _ = train(run, steps=3, **options)
    state, _ = train(run, make_mesh("sequence=4"), steps=3, **options)
    assert distance(alone.params, state.params) < NEAR


@pytest.mark.slow
def test_an_overflow_in_one_part_of_a_sequence_skips_the_update_on_all():
    options = {"precision": "fp16", "loss_scale": jt.dynamic_loss_scale(init_scale=2.0**26, growth_interval=2)}
    alone, told = train(RUNS["gpt2"](), steps=12, **options)
    state, metrics = train(RUNS["gpt2"](), make_mesh("data=2,sequence=2"), steps=12, **options)
    for name in ("loss_scale", "skipped", "applied"):
        assert [m[name] for m in metrics] == [m[name] for m in told]
    assert {bool(m["skipped"]) for m in told} == {True, False}
    assert state.loss_scale == alone.loss_scale


def moved(text):
    """By collective, the shapes that a compiled program makes with it."""
    shapes = {"all-gather": [], "all-to-all": []}
    for line, kind in re.findall(r"= (.+?) (all-gather|all-to-all)(?:-start)?\(", text):
        shapes[kind].extend(tuple(map(int, dims.split(","))) for dims in re.findall(r"\w+\[([\d,]+)\]", line)[:1])
    return shapes


@pytest.fixture(scope="module")
def program():
    """Of a GPT-2 whose sequences are divided over four devices."""
    step, make = deep("sequence=4")
    return step.compile(step.shapes(make), TOKENS)


def test_no_activation_is_held_whole(program):
    text = program.as_text()
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", text)}
    assert (ROWS, POSITIONS // 4, WIDTH) in shapes
    assert (ROWS, POSITIONS // 4, 4 * WIDTH) in shapes
    whole = {shape for shape in shapes if POSITIONS in shape and shape[-1] % WIDTH == 0 and ROWS in shape}
    assert whole == set()
    assert {shape for shape in shapes if ROWS * POSITIONS in shape} == set()


def test_what_is_gathered_are_keys_and_values(program):
    shapes = moved(program.as_text())["all-gather"]
    keys = (ROWS, POSITIONS, 4, WIDTH // 4)
    assert set(shapes) <= {keys, (POSITIONS, WIDTH)}  # and the table of positions
    assert 2 <= shapes.count(keys) <= 4  # forwards, and backwards again


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["sequence=4", "sequence=2,tensor=2"])
def test_a_fused_kernel_has_sequences_whole_and_its_heads_divided(spec, monkeypatch):
    """As cuDNN's needs them; the kernel is played by plain attention, in float32."""
    shapes = []

    def kernel(q, k, v, *, scale, is_causal, implementation):
        shapes.append((q.dtype.name, q.shape))
        wide = (x.astype(np.float32) for x in (q, k, v))
        return attention._explicit(*wide, mask=None, causal=is_causal, scale=scale, dropout=0.0, rng=None).astype(
            q.dtype
        )

    monkeypatch.setattr(attention, "_has_fused_kernel", lambda *qkv: True)
    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
    step, make = deep(spec, precision="bf16")
    lines = moved(step.compile(step.shapes(make), TOKENS).as_text())
    assert set(shapes) == {("bfloat16", (ROWS, POSITIONS, 4, WIDTH // 4))}
    assert len(lines["all-to-all"]) >= 8  # of queries, keys, values and what they make, and of their gradients
    assert {shape for shape in lines["all-gather"] if ROWS in shape} == set()


@pytest.mark.slow
def test_temporaries_fall_as_the_devices_grow():
    tokens = {"tokens": np.zeros((2 * ROWS, 256), np.int32)}
    steps = [deep(f"sequence={n}", positions=256) for n in (1, 4)]
    one, four = (memory_per_device(step, make, tokens).temporaries for step, make in steps)
    assert 4 * four < 1.2 * one, (one, four)


@pytest.mark.parametrize("name", some(*SEQUENCES, soon={"lora"}))
def test_rows_and_tokens_stay_apart_in_every_product(name):
    run = RUNS[name]()
    batch = run.batch(np.random.default_rng(0))
    params, _ = jax.eval_shape(run.make)
    compute = lambda params: run.loss_fn(params, batch, jax.random.key(0))[0].total  # noqa: E731
    merged = {len(batch["tokens"]) * batch["tokens"].shape[1]}
    assert merged & first_axes(jax.make_jaxpr(compute)(params).jaxpr)
    assert merged & first_axes(jax.make_jaxpr(jaxpr.transform(compute, UnmergeRows()))(params).jaxpr) == set()


def first_axes(traced):
    """Of what products are given first."""
    own = {eqn.invars[0].aval.shape[0] for eqn in traced.eqns if eqn.primitive.name == "dot_general"}
    return own.union(*(first_axes(inner) for eqn in traced.eqns for inner in jaxpr.inner_jaxprs(eqn)))


def test_products_apart_are_the_same_products():
    def layer(x, w, b):
        y = x.reshape(6, 4) @ w + b[None]
        return (3 * y.astype(np.float32)).reshape(2, 3, 5, 1), x.reshape(6, 4).sum(0)

    x, w, b = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(2, 3, 4), (4, 5), (5,)]))
    for one, other in zip(layer(x, w, b), jaxpr.transform(layer, UnmergeRows())(x, w, b), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize("name", some("mlp", "cnn", "resnet", soon={"mlp"}))
def test_models_without_sequences_are_refused(name):
    said = (
        "the mesh axis sequence shards tokens, and no marked block of this model returns any, [rows, tokens, width]: "
        "put its devices on data or fsdp"
    )
    with pytest.raises(UserError, match=re.escape(said)):
        traced(name, "data=2,sequence=2")


def test_experts_whose_tokens_are_from_all_rows_are_refused():
    with pytest.raises(
        UserError, match="the mesh axis sequence shards tokens, and experts select theirs from all rows"
    ):
        traced("mixtral", "sequence=4")


@pytest.mark.parametrize(("name", "spec", "tokens", "n"), [("gpt2", "sequence=3", 8, 3), ("vit", "sequence=4", 5, 4)])
def test_lengths_that_do_not_divide_are_refused(name, spec, tokens, n):
    said = f"a sequence of {tokens} tokens is not divisible by the {n} devices of sequence: use a multiple of {n}"
    with pytest.raises(UserError, match=said):
        traced(name, spec)


def traced(name, spec):
    """The run's step on a mesh, as far as it is traced."""
    run, n = RUNS[name](), np.prod([int(size) for size in re.findall(r"\d+", spec)])
    step = shard(jt.train_step(run.loss_fn, adamw(1e-2)), make_mesh(spec, jax.devices()[:n]), run.rules)
    shapes = step.shapes(lambda: run.make()[0], model_state=lambda: run.make()[1])
    step.jitted.lower(shapes, step.place(run.batch(np.random.default_rng(0))))
