"""JAX on a mesh against PyTorch's DistributedDataParallel and fully_shard over gloo, in float64 and in fp16."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from jaxtrain.errors import UserError
from jaxtrain.models import cnn, gpt2, llama, mlp, t5
from parity.cases.built_in import cnn_bn_case, gpt2_case, llama_case, t5_case
from parity.compare.reference import REORDERINGS
from parity.compare.verdict import same_meaning, same_precision
from parity.distributed import Scaling, Training, jax_mesh, torch_ranks
from parity.distributed.overflow_case import overflowing_mlp
from parity.distributed.process_calls import in_processes
from parity.sides import torch_side

SCALING = Scaling(2.0**10, growth_interval=3)
OVERFLOW = partial(overflowing_mlp, np.inf)
FP16_OVERFLOW = partial(overflowing_mlp, 1e6)  # a number beyond the range of float16


def training_of(name, mesh, devices, k=2):
    return {
        "gpt2": Training(gpt2_case.case, mesh, gpt2.SHARDING, accumulate=k),
        # Its rotations and norms request float32, which both sides widen to float64.
        "llama": Training(llama_case.case, mesh, llama.SHARDING, accumulate=k),
        # Nested layers.
        "t5": Training(t5_case.case, mesh, t5.SHARDING, accumulate=k),
        "batch norm by device": Training(partial(cnn_bn_case.case, groups=devices), mesh, cnn.SHARDING, accumulate=k),
        "overflow": Training(OVERFLOW, mesh, mlp.SHARDING, accumulate=k, scaling=SCALING),
        "fp16": Training(FP16_OVERFLOW, mesh, mlp.SHARDING, "fp16", accumulate=k),
    }[name]


SMALL_ON_TWO = {
    (mesh, name): training_of(name, mesh, 2)
    for mesh, name in [("data=2", "overflow"), ("fsdp=2", "overflow"), ("data=2", "batch norm by device")]
}
ON_TWO = {
    (mesh, name, f"accumulate={k}"): training_of(name, mesh, 2, k)
    for mesh, name, k in [("data=2", "fp16", 2), ("fsdp=2", "gpt2", 4)]
}
MORE_ON_TWO = {
    (mesh, name, f"accumulate={k}"): training_of(name, mesh, 2, k)
    for mesh, others in (("data=2", (("gpt2", 4), ("t5", 2))), ("fsdp=2", (("fp16", 2), ("llama", 2))))
    for name, k in [*others, ("batch norm by device", 4)]
}
ON_FOUR = {
    (mesh, name): training_of(name, mesh, 4)
    for mesh in ("data=4", "fsdp=4", "dcn=2,fsdp=2")
    for name in ("gpt2", "batch norm by device", "overflow")
}


def run_pytorch(trainings):
    return dict(zip(trainings, torch_ranks.run(list(trainings.values())), strict=True))


@pytest.fixture(scope="module")
def small_on_two():
    return run_pytorch(SMALL_ON_TWO)


@pytest.fixture(scope="module")
def on_two():
    return run_pytorch(ON_TWO)


@pytest.fixture(scope="module")
def more_on_two():
    return run_pytorch(MORE_ON_TWO)


@pytest.fixture(scope="module")
def on_four():
    return run_pytorch(ON_FOUR)


def run_jax(training, n):
    return jax_mesh.run(training, jax.devices()[:n])


def applied(record):
    return without(record, record.skipped)


def without(record, skipped):
    """Return the record without the losses and norms of skipped steps, which may not be finite."""
    steps = sorted(skipped)
    return replace(record, losses=np.delete(record.losses, steps), grad_norms=np.delete(record.grad_norms, steps))


def assert_same(ours, theirs):
    np.testing.assert_array_equal(ours.scales, theirs.scales)
    assert np.isfinite(applied(theirs).losses).all()
    verdict = same_meaning(applied(ours), applied(theirs))
    assert verdict.passed, verdict.faults
    np.testing.assert_allclose(applied(ours).grad_norms, applied(theirs).grad_norms, rtol=1e-8)


@pytest.mark.parametrize("key", SMALL_ON_TWO, ids=" ".join)
def test_two_devices_equal_two_ranks_of_pytorch(small_on_two, key):
    assert_same(run_jax(SMALL_ON_TWO[key], 2), small_on_two[key])


@pytest.mark.parametrize("mesh", ["data=2", "fsdp=2"])
def test_some_windows_are_clipped_and_some_skipped_because_of_one_rank(small_on_two, mesh):
    theirs = small_on_two[mesh, "overflow"]
    norms = applied(theirs).grad_norms
    assert norms.min() < OVERFLOW().clip_norm < norms.max()
    assert (np.diff(theirs.scales) < 0).any()
    assert (np.diff(theirs.scales) > 0).any()
    windows = [batch["image"].reshape(2, 2, -1) for batch in OVERFLOW().batches(0, 20)]
    ranks = [tuple(np.isinf(window).any(axis=(0, 2))) for window in windows]
    assert {*ranks} == {(False, False), (False, True), (True, False)}
    assert theirs.skipped == {step for step, has in enumerate(ranks) if any(has)}


def test_batch_norm_statistics_of_all_devices_differ_from_ddp(small_on_two):
    """The comparison detects a BatchNorm with statistics of the whole micro-batch, the only difference here."""
    key = ("data=2", "batch norm by device")
    ours = run_jax(replace(SMALL_ON_TWO[key], case=cnn_bn_case.case), 2)
    faults = same_meaning(ours, small_on_two[key]).faults
    assert [fault for fault in faults if fault.startswith("gradient")]
    assert [fault for fault in faults if fault.startswith("buffers after the first update")]


def test_a_process_that_fails_stops_the_others(tmp_path):
    other = f"(time.sleep(60), open({str(tmp_path / 'slept')!r}, 'w'))"
    work = partial(exec, f"import os, sys, time; sys.exit(3) if os.environ['RANK'] == '1' else {other}")
    with pytest.raises(RuntimeError, match="process 1 of 2 exited with status 3: the others were stopped"):
        in_processes(work, [{"RANK": "0"}, {"RANK": "1"}])
    assert not (tmp_path / "slept").exists()


def test_a_mesh_without_counterpart_in_ddp_raises():
    with pytest.raises(UserError, match=r"mesh 'data=2,tensor=2' shards layers, .* leave tensor out"):
        Training(OVERFLOW, "data=2,tensor=2")


@pytest.mark.parametrize("precision", ["fp8", "fp64_fp8_delayed"])
def test_precisions_whose_scales_are_those_of_a_rank_in_pytorch_raise(precision):
    with pytest.raises(UserError, match=rf"precision '{precision}' has the scales of all devices, .* use fp64, fp32"):
        Training(OVERFLOW, "data=2", precision=precision)


def test_a_larger_model_on_two_devices_equals_two_ranks_of_pytorch(on_two):
    (key,) = [key for key in ON_TWO if "fp16" not in key]
    assert_same(run_jax(ON_TWO[key], 2), on_two[key])


def test_in_fp16_loss_scales_equal_pytorchs_and_results_are_as_accurate(on_two):
    (key,) = [key for key in ON_TWO if "fp16" in key]
    assert_as_accurate(ON_TWO[key], on_two[key])


def assert_as_accurate(training, theirs):
    ours = run_jax(training, 2)
    np.testing.assert_array_equal(ours.scales, theirs.scales)
    single_rank = partial(torch_side.run, training.case(), accumulate=training.accumulate, steps=training.steps)
    noise = [single_rank("fp16", variant=torch_side.Variant(reorder=i)) for i in range(REORDERINGS)]
    assert [run.skipped for run in noise] == [theirs.skipped] * REORDERINGS
    assert 2 < len(theirs.skipped) < 18
    truth = without(single_rank("fp64", variant=torch_side.Variant(skip=theirs.skipped)), theirs.skipped)
    verdict = same_precision(applied(ours), [applied(run) for run in (theirs, *noise)], truth)
    assert verdict.passed, verdict.faults


@pytest.mark.nightly
@pytest.mark.parametrize("key", MORE_ON_TWO, ids=" ".join)
def test_more_models_on_two_devices_equal_two_ranks_of_pytorch(more_on_two, key):
    training, theirs = MORE_ON_TWO[key], more_on_two[key]
    if training.precision == "fp16":
        assert_as_accurate(training, theirs)
    else:
        assert_same(run_jax(training, 2), theirs)


@pytest.mark.parametrize(("mesh", "devices"), [("data=2", 2), ("data=2,fsdp=2", 4), ("fsdp=2", 2), ("data=4", 4)])
def test_batch_norm_statistics_of_all_devices_equal_those_of_one_big_batch(mesh, devices):
    """They correspond to `SyncBatchNorm`, which PyTorch has for GPUs only."""
    theirs = torch_side.run(cnn_bn_case.case(), "fp64", accumulate=2)
    assert_same(run_jax(Training(cnn_bn_case.case, mesh, cnn.SHARDING, accumulate=2), devices), theirs)


@pytest.mark.nightly
@pytest.mark.parametrize("key", ON_FOUR, ids=" ".join)
def test_four_devices_equal_four_ranks_of_pytorch(on_four, key):
    assert_same(run_jax(ON_FOUR[key], 4), on_four[key])


@pytest.mark.nightly
def test_two_processes_of_two_devices_equal_four_ranks_of_pytorch(on_four):
    """Each mesh and each training occurs once."""
    keys = [("data=4", "batch norm by device"), ("fsdp=4", "gpt2"), ("dcn=2,fsdp=2", "overflow")]
    ours = jax_mesh.run_in_processes([ON_FOUR[key] for key in keys], processes=2, devices_per_process=2)
    for record, key in zip(ours, keys, strict=True):
        assert_same(record, on_four[key])
