"""Shardings of parameters and states, by rules and automatically."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxtrain as jt
from jaxtrain.distributed import make_mesh, param_shardings, state_shardings
from jaxtrain.distributed.sharding import automatic_spec, fit_spec
from jaxtrain.errors import UserError
from jaxtrain.models import bert, cnn, gpt2, llama, lora, mixtral, mlp, resnet, t5, vit
from jaxtrain.optim import adafactor, adamw
from jaxtrain.paths import path_name
from tests.distributed.programs import RUNS, configurations

RULES = {
    "mlp": mlp.SHARDING,
    "cnn": cnn.SHARDING,
    "resnet": resnet.SHARDING,
    "gpt2": gpt2.SHARDING,
    "lora": lora.sharding(gpt2.SHARDING),
    "llama": llama.SHARDING,
    "mixtral": mixtral.SHARDING,
    "bert": bert.SHARDING,
    "vit": vit.SHARDING,
    "t5": t5.SHARDING,
}


@pytest.mark.parametrize("name", RULES)
def test_every_parameter_has_a_rule_of_its_rank_and_every_rule_is_used(name):
    used = set()
    for make in configurations(name):
        params, _ = jax.eval_shape(make)
        for path, x in jax.tree_util.tree_leaves_with_path(params):
            rule = next(p for p in RULES[name] if re.fullmatch(p, path_name(path)))
            # An adapter's A and B have the rank of its kernel's rule.
            assert len(RULES[name][rule]) == x.ndim, (path_name(path), rule)
            used.add(rule)
    if name != "lora":
        assert used == set(RULES[name])


@pytest.mark.parametrize("name", sorted(RULES.keys() - {"cnn", "resnet", "mlp", "lora"}))
def test_the_axis_of_layers_is_sharded_by_a_pipeline_alone(name):
    params, _ = jax.eval_shape(RUNS[name]().make)
    shardings = param_shardings(params, make_mesh("fsdp=2,tensor=2"), RULES[name])
    stacked = [
        s.spec
        for path, s in jax.tree_util.tree_leaves_with_path(shardings)
        if re.search("blocks|layers", path_name(path))
    ]
    assert stacked
    assert {spec[0] for spec in stacked} == {None if name == "t5" else "pipeline"}
    assert all("pipeline" not in spec[1:] for spec in stacked)


def test_a_parameter_without_a_rule_raises_an_error():
    params = {"fc": {"kernel": jax.ShapeDtypeStruct((4, 6), np.float32)}}
    with pytest.raises(UserError, match=r"no sharding rule matches the parameter fc/kernel \[4, 6\]: add one"):
        param_shardings(params, make_mesh(), {"kernel": P("fsdp")})
    with pytest.raises(UserError, match="the sharding rule 'fc/kernel' has 3 axes and fc/kernel only 2: fix the rule"):
        param_shardings(params, make_mesh(), {"fc/kernel": P(None, None, "fsdp")})


@pytest.mark.parametrize(
    ("shape", "spec"),
    [((6, 8), P(None, "fsdp")), ((8, 8), P(None, "fsdp")), ((16, 6), P("fsdp")), ((3, 5), P()), ((), P()), ((0,), P())],
)
def test_without_rules_the_longest_divisible_axis_is_sharded(shape, spec):
    assert automatic_spec(shape, make_mesh("fsdp=4")) == spec


@pytest.mark.parametrize(
    ("spec", "shape", "kept"),
    [
        (P("tensor", "fsdp"), (5, 6), P(None, "fsdp")),
        (P(("tensor", "fsdp")), (8,), P(("tensor", "fsdp"))),
        (P(("tensor", "fsdp")), (6,), P("tensor")),
        (P("unknown", "fsdp"), (4, 4), P(None, "fsdp")),
    ],
)
def test_indivisible_axes_are_replicated(spec, shape, kept):
    assert fit_spec(spec, shape, make_mesh("fsdp=2,tensor=2")) == kept


def test_adapters_are_sharded_along_the_inputs_and_outputs_of_their_kernel():
    rules = lora.sharding({"fc.*": P(None, "tensor", "fsdp")}, lora.LoraConfig("fc.*", out_in="fc.w"))
    halves = {"a": jax.ShapeDtypeStruct((2, 8, 4), np.float32), "b": jax.ShapeDtypeStruct((2, 4, 8), np.float32)}
    found = param_shardings({"lora": {"fc.w": halves, "fc.v": halves}}, make_mesh("fsdp=2,tensor=2"), rules)["lora"]
    assert [found["fc.w"][half].spec for half in "ab"] == [P(None, "fsdp", None), P(None, None, "tensor")]
    assert [found["fc.v"][half].spec for half in "ab"] == [P(None, "tensor", None), P(None, None, "fsdp")]


@pytest.mark.parametrize(("optimizer", "moments"), [(adamw(1e-3), 2), (adafactor(1e-3), 0)])
def test_moments_and_averages_are_sharded_like_their_parameter(optimizer, moments):
    run, mesh = RUNS["gpt2"](), make_mesh("fsdp=2,tensor=2")
    step = jt.train_step(run.loss_fn, optimizer, accumulate=2, ema=0.9)
    state = step.shapes(lambda: run.make()[0], streaming=True)
    shardings = state_shardings(state, mesh, run.rules)
    fc_specs = {
        path_name(path): s.spec
        for path, s in jax.tree_util.tree_leaves_with_path(shardings)
        if path_name(path).endswith("blocks/fc/kernel")
    }
    sharded = [name for name, spec in fc_specs.items() if spec == P("pipeline", "fsdp", "tensor")]
    # The parameter, its average, the sum of its gradients and its moments, unless they are factored.
    assert len(sharded) == 3 + moments
    assert shardings.step.spec == shardings.rng.spec == P()
    jax.tree.map(lambda x, s: s.shard_shape(x.shape), state, shardings)
