"""Sequence parallelism: the numbers equal those of one device, and no device holds a whole activation."""

import re

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.distributed import constrained_loss as loss_program
from jaxtrain.distributed import make_mesh, memory_per_device, shard
from jaxtrain.errors import UserError
from jaxtrain.optim import adamw
from jaxtrain.passes.mesh.merged_rows import UnmergeRows
from jaxtrain.program import equations, rewrite
from tests.distributed.deep import POSITIONS, ROWS, TOKENS, WIDTH, deep
from tests.distributed.programs import RUNS, SEQUENCES, distance, train
from tests.distributed.test_sharding_step import NEAR


@pytest.mark.parametrize("options", [{"remat": "names:attention", "unroll": True, "accumulate": 1}, {"remat": "full"}])
def test_options_do_not_change_the_numbers(options, double):
    run = RUNS["small"]()
    alone, _ = train(run, steps=3, **options)
    state, _ = train(run, make_mesh("sequence=4"), steps=3, **options)
    assert distance(alone.params, state.params) < NEAR


def test_an_overflow_in_one_part_of_a_sequence_skips_the_update_on_all():
    options = {"precision": "fp16", "loss_scale": jt.dynamic_loss_scale(init_scale=2.0**26, growth_interval=2)}
    alone, expected = train(RUNS["small"](), steps=12, **options)
    state, metrics = train(RUNS["small"](), make_mesh("data=2,sequence=2"), steps=12, **options)
    for name in ("loss_scale", "skipped", "applied"):
        assert [m[name] for m in metrics] == [m[name] for m in expected]
    assert {bool(m["skipped"]) for m in expected} == {True, False}
    assert state.loss_scale == alone.loss_scale


def collective_shapes(text):
    """Return the result shapes of the collectives of a compiled program by kind."""
    shapes = {"all-gather": [], "all-to-all": []}
    for line, kind in re.findall(r"= (.+?) (all-gather|all-to-all)(?:-start)?\(", text):
        shapes[kind].extend(tuple(map(int, dims.split(","))) for dims in re.findall(r"\w+\[([\d,]+)\]", line)[:1])
    return shapes


@pytest.fixture(scope="module")
def program():
    """Return the compiled step of a GPT-2 with its sequences sharded over four devices."""
    step, make = deep("sequence=4")
    return step.compile(step.shapes(make), TOKENS)


def test_no_activation_is_replicated(program):
    text = program.as_text()
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", text)}
    assert (ROWS, POSITIONS // 4, WIDTH) in shapes
    assert (ROWS, POSITIONS // 4, 4 * WIDTH) in shapes
    whole = {shape for shape in shapes if POSITIONS in shape and shape[-1] % WIDTH == 0 and ROWS in shape}
    assert whole == set()
    assert {shape for shape in shapes if ROWS * POSITIONS in shape} == set()


def test_only_keys_and_values_are_gathered(program):
    shapes = collective_shapes(program.as_text())["all-gather"]
    keys = (ROWS, POSITIONS, 4, WIDTH // 4)
    assert set(shapes) <= {keys, (POSITIONS, WIDTH)}  # and the position embeddings
    assert 2 <= shapes.count(keys) <= 4  # in the forward and in the backward pass


@pytest.mark.parametrize("spec", ["sequence=4", "sequence=2,tensor=2"])
def test_a_fused_kernel_gets_whole_sequences_and_sharded_heads(spec, monkeypatch):
    """cuDNN's kernel needs whole sequences; here its formula, constrained like the kernel, stands in for it."""
    monkeypatch.setattr(loss_program, "_is_on_gpu", lambda mesh: True)
    step, make = deep(spec, precision="bf16")
    lines = collective_shapes(step.compile(step.shapes(make), TOKENS).as_text())
    assert len(lines["all-to-all"]) >= 8  # of queries, keys, values and outputs, and of their gradients
    assert {shape for shape in lines["all-gather"] if ROWS in shape} == set()


def test_temporaries_decrease_with_the_number_of_devices():
    tokens = {"tokens": np.zeros((2 * ROWS, 256), np.int32)}
    steps = [deep(f"sequence={n}", positions=256) for n in (1, 4)]
    one, four = (memory_per_device(step, make, tokens).temporaries for step, make in steps)
    assert 4 * four < 1.2 * one, (one, four)


@pytest.mark.parametrize("name", [*SEQUENCES])
def test_no_product_merges_rows_and_tokens(name):
    run = RUNS[name]()
    batch = run.batch(np.random.default_rng(0))
    params, _ = jax.eval_shape(run.make)
    compute = lambda params: run.loss_fn(params, batch, jax.random.key(0))[0].total  # noqa: E731
    merged = {len(batch["tokens"]) * batch["tokens"].shape[1]}
    assert merged & first_axes(jax.make_jaxpr(compute)(params).jaxpr)
    assert merged & first_axes(jax.make_jaxpr(rewrite.transform(compute, UnmergeRows()))(params).jaxpr) == set()


def first_axes(traced):
    """Return the sizes of the first axes of the first operands of all products."""
    own = {eqn.invars[0].aval.shape[0] for eqn in traced.eqns if eqn.primitive.name == "dot_general"}
    return own.union(*(first_axes(inner) for eqn in traced.eqns for inner in equations.inner_jaxprs(eqn)))


def test_unmerged_products_have_the_same_results():
    def layer(x, w, b):
        y = x.reshape(6, 4) @ w + b[None]
        return (3 * y.astype(np.float32)).reshape(2, 3, 5, 1), x.reshape(6, 4).sum(0)

    x, w, b = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(2, 3, 4), (4, 5), (5,)]))
    for one, other in zip(layer(x, w, b), rewrite.transform(layer, UnmergeRows())(x, w, b), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet"])
def test_models_without_sequences_raise_an_error(name):
    message = (
        "the mesh axis sequence shards tokens, and no marked block of this model returns any, [rows, tokens, width]: "
        "put its devices on data or fsdp"
    )
    with pytest.raises(UserError, match=re.escape(message)):
        trace_run(name, "data=2,sequence=2")


@pytest.mark.parametrize(("name", "spec", "tokens", "n"), [("gpt2", "sequence=3", 8, 3), ("vit", "sequence=4", 5, 4)])
def test_indivisible_lengths_raise_an_error(name, spec, tokens, n):
    message = f"a sequence of {tokens} tokens is not divisible by the {n} devices of sequence: use a multiple of {n}"
    with pytest.raises(UserError, match=message):
        trace_run(name, spec)


def trace_run(name, spec):
    """Trace the run's step on a mesh."""
    run, n = RUNS[name](), np.prod([int(size) for size in re.findall(r"\d+", spec)])
    step = shard(jt.train_step(run.loss_fn, adamw(1e-2)), make_mesh(spec, jax.devices()[:n]), run.rules)
    shapes = step.shapes(lambda: run.make()[0], model_state=lambda: run.make()[1])
    step.jitted.lower(shapes, step.place(run.batch(np.random.default_rng(0))))
