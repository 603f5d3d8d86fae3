"""Checkpoints with the parts and names of Lightning, timm, DeepSpeed and FSDP: read as the script's own, or refused."""

import argparse

import jax
import numpy as np
import pytest
import torch

import jaxtrain as jt
from jaxtrain.interop.torch_file import read_torch
from jaxtrain.interop.torch_run import torch_run
from tests.interop.saved_runs import LIKE, TABLE, Run, imported, loss_fn, step_of


@pytest.fixture(scope="module")
def run():
    return Run("AdamW", schedule="step", scaler=True).step(3)


def renamed(parts, **names):
    return {names.get(name, name): part for name, part in parts.items() if names.get(name, name)}


def as_lightning(parts):
    weights = {f"net._orig_mod.{name}": x for name, x in parts["model"].items()}
    saved = {"state_dict": weights, "optimizer_states": [parts["optimizer"]], "lr_schedulers": [parts["scheduler"]]}
    return {**saved, "MixedPrecision": parts["scaler"], "epoch": 1, "global_step": 3}


def as_timm(parts):
    return renamed(parts, model="state_dict", scaler="amp_scaler", step=None)


def as_fsdp(parts):
    """The optimizer's state as `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` names it."""
    names, optimizer = [*parts["model"]], parts["optimizer"]
    state = {names[number]: entries for number, entries in optimizer["state"].items()}
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in optimizer["param_groups"]]
    return {**parts, "optimizer": {"state": state, "param_groups": groups}}


@pytest.mark.parametrize("saved_by", [as_lightning, as_timm, as_fsdp])
def test_the_state_is_that_of_the_scripts_own_file(saved_by, run, tmp_path):
    torch.save(saved_by(run.parts()), tmp_path / "other.pt")
    states = []
    for path in (run.save(tmp_path / "own.pt"), tmp_path / "other.pt"):
        found = torch_run(read_torch(path, TABLE.torch_order(LIKE)), TABLE, LIKE)
        states.append(found.state(step_of(found, "fp16")))
    assert int(states[0].step) == 3
    ours, theirs = ((state.params, state.opt_state, state.loss_scale, state.step) for state in states)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_other_parts_are_listed_in_one_line(run, tmp_path):
    more = {
        "state_dict_ema": run.model.state_dict(),
        "arch": "mlp",
        "callbacks": {"EarlyStopping": {"wait": 1}},
        "args": argparse.Namespace(lr=0.1),
        "hyper_parameters": {"lr": 0.1},
    }
    torch.save({**run.parts(), **more}, tmp_path / "a.pt")
    listed = "arch, args, callbacks, hyper_parameters, state_dict_ema"
    with pytest.warns(UserWarning, match=rf"a\.pt has fields that are not read: {listed}$"):
        imported(tmp_path / "a.pt")
    parts = run.parts()
    parts["scheduler"] = {**parts["scheduler"], "warmup_t": 3}
    torch.save(parts, tmp_path / "a.pt")
    with pytest.warns(UserWarning, match=r"the scheduler of the checkpoint has fields that are not read: warmup_t$"):
        imported(tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"optimizer_states": [{}, {}], "optimizer": None}, "optimizer_states in .* are 2: only one optimizer"),
        ({"optimizer": None, "ds_version": "0.15", "ds_config": {}}, r"is a shard of a DeepSpeed .* zero_to_fp32\.py"),
    ],
)
def test_parts_that_are_not_whole_are_refused(changed, message, run, tmp_path):
    torch.save({**run.parts(), **changed}, tmp_path / "a.pt")
    with pytest.raises(jt.UserError, match=message):
        read_torch(tmp_path / "a.pt")


def test_folders_of_shards_are_refused(tmp_path):
    with pytest.raises(jt.UserError, match=r"is a folder, as of a sharded checkpoint: join it first, .* dcp_to_torch"):
        read_torch(tmp_path)


def test_groups_with_their_own_settings_are_kept_and_unknown_ones_refused(run, tmp_path):
    weight, bias = run.model.parameters()
    options = {"betas": (0.8, 0.9), "maximize": True, "amsgrad": True, "weight_decay": 0.0, "lr": 0.5}
    optimizer = torch.optim.AdamW([{"params": [weight]}, {"params": [bias], **options}])
    run.model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    parts = {"model": run.model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(parts, tmp_path / "a.pt")
    call = imported(tmp_path / "a.pt").expression["fc/bias"]
    expected = {"b1": 0.8, "b2": 0.9, "maximize": True, "amsgrad": True, "weight_decay": 0.0, "learning_rate": 0.5}
    assert {name: call.arguments[name] for name in expected} == expected
    parts["optimizer"]["param_groups"][1]["lr_scale"] = 0.1
    torch.save(parts, tmp_path / "a.pt")
    with pytest.raises(jt.UserError, match=r"AdamW's lr_scale=0\.1 in group 1 is not supported: leave it out"):
        imported(tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("entries", "settings", "message"),
    [
        (("exp_avg",), ("betas",), "an optimizer with the settings lr, betas, weight_decay, params is not supported"),
        (
            ("step", "exp_avg", "exp_avg_sq"),
            ("betas", "eps"),
            "an optimizer with the settings lr, betas, eps, weight_de",
        ),
        (
            ("step", "exp_avg", "exp_avg_sq"),
            ("betas", "eps", "amsgrad"),
            "older versions of PyTorch write equal states",
        ),
    ],
    ids=["Lion", "LAMB", "Adam of an older PyTorch"],
)
def test_optimizers_of_others_are_named_by_their_settings(entries, settings, message, run, tmp_path):
    parts = run.parts()
    group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
    own = {name: group[name] for name in ("lr", *settings, "weight_decay")}
    state = {number: {name: of[name] for name in entries} for number, of in parts["optimizer"]["state"].items()}
    (old,) = parts["optimizer"]["param_groups"]
    optimizer = {"state": state, "param_groups": [{**own, "params": old["params"]}]}
    torch.save({"model": parts["model"], "optimizer": optimizer}, tmp_path / "a.pt")
    with pytest.raises(jt.UserError, match=f"^{message}"):
        imported(tmp_path / "a.pt")


def test_parameters_that_were_never_updated_are_named(tmp_path):
    run = Run("AdamW")
    run.model.fc.bias.requires_grad_(False)
    found = imported(run.step(2).save(tmp_path / "a.pt"))
    message = r"no state of fc\.bias, which were never updated: freeze them by --frozen 'fc/bias', or"
    with pytest.raises(jt.UserError, match=message):
        found.state(step_of(found))
    step = jt.train_step(loss_fn, found.optimizer(), frozen=lambda path: path == "fc/bias")
    assert int(found.state(step).step) == 2
