"""The order of the passes, and which of them the program of a step goes through."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.distributed import make_mesh, shard
from jaxtrain.passes.pipeline import AFTER_GRAD, AT_UPDATE, BEFORE_GRAD, GPU, Pass, applied, ordered
from jaxtrain.step import explained

EVERY = {x.name: x for x in (*BEFORE_GRAD, *AFTER_GRAD, *AT_UPDATE)}
OPTIONS = {
    "plain": {},
    "fp8": {"precision": "fp8", "accumulate": 2},
    "scaled": {"precision": "fp16", "loss_scale": jt.per_layer_loss_scale(2), "hooks": {"w": lambda g: 2 * g}},
    "remat": {"remat": "full", "unroll": True, "accumulate": 2},
}
PARAMS = {"w": jnp.ones((2, 16, 16)), "b": jnp.ones((16,))}


def loss_fn(params, batch, rng):
    layer = jt.block(lambda x, w: (jnp.tanh(x @ w), None))
    x, _ = jax.lax.scan(layer, batch["x"], params["w"])
    q, k, v = jnp.split(x @ params["w"][0], [4, 8], 1)
    losses = jnp.square((q @ k.T @ v).sum(-1) + params["b"].sum())
    return jt.Loss(losses.sum(), jnp.float32(len(losses))), {}


def step_of(name):
    return jt.train_step(loss_fn, optax.adamw(1e-3), **OPTIONS[name])


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("mesh", [None, "data=2", "fsdp=2"])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_the_passes_of_a_step_are_those_of_its_platform_and_mesh(name, mesh, platform):
    step = step_of(name).for_platform(platform)
    if mesh is not None:
        step = shard(step_of(name), make_mesh(mesh, jax.devices()[:2]))
        step = step if platform == "cpu" else step.for_platform(platform)
    found = [x for phase in explained(step.parts) for x in phase.passes]
    assert all(platform in x.platforms for x in found)
    assert {x.on_mesh for x in found} <= {None, mesh is not None}
    names = [x.name for x in found]
    assert names == [x for x in EVERY if x in names]
    active = {"unroll": "unroll" in OPTIONS[name], "remat": "remat" in OPTIONS[name], "hooks": name == "scaled"}
    active |= {"scale_blocks": name == "scaled", "fuse_casts": (name, platform) == ("fp8", "gpu")}
    active |= {"constraints": mesh is not None, "save_costly": platform == "gpu" and name != "remat"}
    assert {x: x in names for x in active} == active


@pytest.mark.parametrize("name", ["plain", "fp8", "remat"])
def test_passes_that_are_not_listed_change_nothing(name, monkeypatch):
    """On a CPU the passes of GPUs leave the program as it is."""
    state = step_of(name).shapes(PARAMS)
    batch = {"x": jax.ShapeDtypeStruct((8, 16), np.float32)}
    before = str(jax.make_jaxpr(step_of(name).pure)(state, batch))
    listed = {x.name for phase in explained(step_of(name).parts) for x in phase.passes}
    applied_names = []

    def only_listed(passes, rewrites, fn):
        applied_names.extend(rewrites)
        return applied(passes, {x: rewrite for x, rewrite in rewrites.items() if x in listed}, fn)

    monkeypatch.setattr("jaxtrain.step.loss_program.applied", only_listed)
    monkeypatch.setattr("jaxtrain.step.step.applied", only_listed)
    assert str(jax.make_jaxpr(step_of(name).pure)(state, batch)) == before
    left_out = {*applied_names} - listed
    assert left_out
    assert all(EVERY[x].platforms == (GPU,) for x in left_out)


def test_passes_are_applied_in_their_order_and_a_pass_without_a_place_is_an_error():
    a, b, c = Pass("a", "", ""), Pass("b", "", "", after=("a",)), Pass("c", "", "")
    every = ordered(a, b, c)
    assert applied(every, {"c": lambda x: f"c({x})", "a": lambda x: f"a({x})"}, "fn") == "c(a(fn))"
    with pytest.raises(ValueError, match="pass 'b' must follow 'a'"):
        ordered(b, a)
    with pytest.raises(ValueError, match="two passes have the name 'c'"):
        ordered(c, a, c)
    with pytest.raises(ValueError, match="sort have no place in the order"):
        applied(AT_UPDATE, {"sort": partial(sorted)}, None)
