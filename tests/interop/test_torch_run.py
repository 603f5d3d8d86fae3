"""Runs imported from PyTorch and exported again: to the bit, and after further updates equal to PyTorch's."""

import copy
import functools
import sys

import jax
import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as S

import jaxtrain as jt
from jaxtrain import optim
from jaxtrain.interop import NameTable, TorchParam
from jaxtrain.interop.torch_file import read_torch
from jaxtrain.interop.torch_run import to_torch, torch_run
from jaxtrain.optim import expression, muon
from jaxtrain.optim.expression import Call
from tests.interop.saved_runs import (
    LIKE,
    NET,
    NET_LIKE,
    SCHEDULERS,
    Run,
    X,
    Y,
    assert_same,
    edit_saved,
    exported,
    imported,
    saved_net,
    step_of,
    without,
)

OPTIMIZERS = {
    "Adadelta": [{}],
    "Adafactor": [{}],
    "Adagrad": [{"initial_accumulator_value": 0.1, "lr_decay": 0.1}],
    "Adam": [{"weight_decay": 0.1}, {"amsgrad": True}],
    "Adamax": [{}],
    "AdamW": [{}, {"amsgrad": True, "maximize": True}],
    "ASGD": [{"t0": 1.0}],
    "Muon": [{}],
    "NAdam": [{"decoupled_weight_decay": True}],
    "RAdam": [{"betas": (0.9, 0.9)}],
    "RMSprop": [{}, {"centered": True, "momentum": 0.9}],
    "Rprop": [{}],
    "SGD": [{}, {"momentum": 0.9, "dampening": 0.1}],
}
OPTIMIZER_CASES = [(name, options) for name, all_options in OPTIMIZERS.items() for options in all_options]
READ_THEIR_RATE = {"Adafactor", "ASGD", "Rprop"}


@pytest.mark.parametrize("schedule", SCHEDULERS)
def test_round_trip_is_bit_equal_for_every_optimizer_and_scaler(schedule, tmp_path):
    for name, options in OPTIMIZER_CASES:
        for scaler in (False, True):
            theirs = Run(name, options, schedule, scaler).step(3)
            run = imported(theirs.save(tmp_path / "in.pt"), name == "Muon")
            if schedule == "plateau" and name in READ_THEIR_RATE:
                with pytest.raises(jt.UserError, match="reduce_lr_on_plateau and rate_of_metric"):
                    run.state(step_of(run))
                continue
            back = exported(run, run.state(step_of(run)), tmp_path / "out.pt")
            assert_same(back, torch.load(tmp_path / "in.pt", weights_only=True), where=f"{name} {options}")


DOUBLE = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.float64), LIKE)
MATRIX_DOUBLE = {"fc": {"kernel": DOUBLE["fc"]["kernel"]}}
BATCH = {"x": X.astype(np.float64), "y": Y.astype(np.float64)}


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)  # the dtype of an optimizer's scalars
    with jax.enable_x64(True):
        yield
    torch.set_default_dtype(torch.float32)


def continue_run(name, options, schedule, scaler, tmp_path, **options_of_import):
    """Return states after 3 updates in PyTorch and 4 in JAX, PyTorch's after 7, and both after 3 more in PyTorch."""
    theirs = Run(name, options, schedule, scaler, torch.float64).step(3)
    matrix = name == "Muon"
    like = MATRIX_DOUBLE if matrix else DOUBLE
    run = imported(theirs.save(tmp_path / "in.pt"), matrix, like, **options_of_import)
    step = step_of(run, "fp64")
    state = run.state(step)
    for _ in range(4):
        state, _ = step(state, BATCH)
    back = exported(run, state, tmp_path / "out.pt")
    again = copy.deepcopy(back)
    resumed = Run(name, options, schedule, scaler, torch.float64).load(back).step(3)
    return again, copy.deepcopy(theirs.step(4).parts()), resumed.parts(), theirs.step(3).parts()


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(("name", "options"), OPTIMIZER_CASES)
def test_every_optimizer_continues_in_both_directions(name, options, tmp_path, monkeypatch):
    if name == "Muon":  # PyTorch's iterates in bfloat16
        monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.double().clone())
        monkeypatch.setitem(expression.OPTIMIZERS, "muon", functools.partial(muon, dtype=np.float64))
    ours, theirs, ours_resumed, theirs_resumed = continue_run(name, options, "one cycle", True, tmp_path)
    for mine, other in ((ours, theirs), (ours_resumed, theirs_resumed)):
        assert_same(mine, {**other, "step": mine["step"]}, close=1e-10, where=name)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("schedule", [s for s in SCHEDULERS if s != "plateau"])
def test_every_schedule_continues_in_both_directions(schedule, tmp_path):
    ours, theirs, ours_resumed, theirs_resumed = continue_run("SGD", {"momentum": 0.9}, schedule, False, tmp_path)
    for mine, other in ((ours, theirs), (ours_resumed, theirs_resumed)):
        assert_same(mine, {**other, "step": mine["step"]}, close=1e-10)


def test_the_kind_of_an_older_adam_can_be_specified(tmp_path):
    saved_net(tmp_path / "in.pt", lambda net: net.parameters())
    edit_saved(tmp_path / "in.pt", without("decoupled_weight_decay"))
    for kind, function in (("AdamW", "adamw"), ("Adam", "adam")):
        assert torch_run(read_torch(tmp_path / "in.pt"), NET, NET_LIKE, kind=kind).expression.function == function


def test_a_schedule_that_is_not_in_the_file_can_be_specified(tmp_path):
    theirs = Run("AdamW", {}, "none")
    theirs.scheduler = S.LambdaLR(theirs.optimizer, lambda t: 0.5**t)
    run = imported(theirs.step(3).save(tmp_path / "in.pt"), schedule=Call("exponential_lr", {"lr": 1e-2, "gamma": 0.5}))
    step = step_of(run)
    state, metrics = step(run.state(step), {"x": X, "y": Y})
    assert float(metrics["lr"]) == pytest.approx(1e-2 * 0.5**3)
    back = exported(run, state, tmp_path / "out.pt")
    assert back["scheduler"] == {**theirs.step(1).scheduler.state_dict(), "_last_lr": [pytest.approx(1e-2 * 0.5**4)]}


def test_a_scheduler_that_is_ahead_by_skipped_updates_stays_ahead(tmp_path):
    theirs = Run("SGD", {"momentum": 0.9}, "one cycle").step(3)
    theirs.scheduler.step()
    run = imported(theirs.save(tmp_path / "in.pt"), updates=3)
    assert run.expression.arguments["learning_rate"].function == "shifted"
    step = step_of(run)
    state, metrics = step(run.state(step), {"x": X, "y": Y})
    assert float(metrics["lr"]) == pytest.approx(theirs.scheduler.get_last_lr()[0])
    assert exported(run, state, tmp_path / "out.pt")["scheduler"]["last_epoch"] == 5


def test_reduce_on_plateau_continues(tmp_path):
    theirs = Run("SGD", {}, "plateau").step(3)
    run = imported(theirs.save(tmp_path / "in.pt"))
    state = run.state(step_of(run))
    plateau = state.opt_state[-1]
    scheduler = theirs.scheduler
    assert (float(plateau.best), int(plateau.bad)) == (scheduler.best, scheduler.num_bad_epochs)
    assert float(plateau.next_rate) == pytest.approx(theirs.optimizer.param_groups[0]["lr"])
    updates, opt_state = run.optimizer().update(state.params, state.opt_state, state.params, value=1.0)
    del updates
    back = exported(run, state._replace(opt_state=opt_state, step=state.step + 1), tmp_path / "out.pt")
    expected = theirs.step(1).parts()
    assert back["scheduler"] == {**expected["scheduler"], "_last_lr": pytest.approx(expected["scheduler"]["_last_lr"])}


def test_arrays_of_the_state_are_allocated_once(tmp_path, monkeypatch):
    leaf = 2**18
    table = NameTable({f"p{i}": TorchParam(f"p{i}") for i in range(4)})
    like = {f"p{i}": jax.ShapeDtypeStruct((leaf // 4,), np.float32) for i in range(4)}
    holder = torch.nn.ParameterDict({name: torch.zeros(leaf // 4) for name in like})
    optimizer = torch.optim.Adam(holder.parameters())
    for p in holder.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    torch.save({"model": holder.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "in.pt")
    run = torch_run(read_torch(tmp_path / "in.pt"), table, like)
    step = jt.train_step(lambda params, batch, rng: (jt.Loss(batch, 1.0), {}), run.optimizer())
    put, most, before = sys.modules[torch_run.__module__]._put, [], sum(x.nbytes for x in jax.live_arrays())

    def counted(array, wanted):
        most.append(sum(x.nbytes for x in jax.live_arrays()) - before)
        return put(array, wanted)

    monkeypatch.setattr(sys.modules[torch_run.__module__], "_put", counted)
    state = run.state(step)
    assert len(jax.tree.leaves(state.opt_state[0].mu)) == 4
    # Parameters and two moments, of four leaves each.
    assert 12 * leaf <= max(most) < 12.5 * leaf


def test_buffers_are_imported_and_exported(tmp_path):
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(3))
    net(torch.from_numpy(X))
    torch.save(net.state_dict(), tmp_path / "in.pt")
    like = {"scale": jax.ShapeDtypeStruct((3,), np.float32), "bias": jax.ShapeDtypeStruct((3,), np.float32)}
    state_like = {**dict.fromkeys(("mean", "var"), like["bias"]), "count": jax.ShapeDtypeStruct((), np.int32)}
    names = NameTable({"scale": TorchParam("0.weight"), "bias": TorchParam("0.bias")})
    theirs = {"mean": "running_mean", "var": "running_var", "count": "num_batches_tracked"}
    buffers = NameTable({ours: TorchParam(f"0.{name}") for ours, name in theirs.items()})
    run = torch_run(read_torch(tmp_path / "in.pt"), names, like, buffers=buffers, state_like=state_like)
    step = jt.train_step(lambda params, batch, rng, state: (jt.Loss(batch, 1.0), {}, state), optim.sgd())
    state = run.state(step)
    assert int(state.model_state["count"]) == 1
    np.testing.assert_array_equal(state.model_state["var"], net[0].running_var)
    back = to_torch(state, run.metadata, Call("sgd"), names, buffers)
    assert list(back.model) == list(net.state_dict())


def test_values_that_would_be_rounded_are_refused(tmp_path):
    theirs = Run("AdamW", dtype=torch.float64).step(1)
    run = imported(theirs.save(tmp_path / "in.pt"))
    step = step_of(run)
    with pytest.raises(jt.UserError, match="float64 values would be rounded to float32"):
        run.state(step)
    for part in (theirs.model.state_dict(), *theirs.optimizer.state_dict()["state"].values()):
        for tensor in part.values():
            tensor.copy_(tensor.detach().float())
    restored = imported(theirs.save(tmp_path / "in.pt")).state(step)
    np.testing.assert_array_equal(restored.params["fc"]["bias"], theirs.model.fc.bias.detach())
