"""Parameter groups of a PyTorch run, and its invalid or unsupported states."""

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as S

import jaxtrain as jt
from jaxtrain.interop.torch_file import read_torch
from jaxtrain.interop.torch_run import torch_run
from tests.interop.saved_runs import NET, NET_LIKE, Net, assert_same, edit_saved, exported, saved_net, step_of, without


def decay_rule(net):
    matrices, vectors = ([p for p in net.parameters() if (p.ndim > 1) == wanted] for wanted in (True, False))
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def by_layer(net):
    named = [(n, p) for n, p in net.named_parameters() if "norm" not in n]
    return [{"params": named, "lr": 0.1}, {"params": list(net.norm.named_parameters(prefix="norm"))}]


def test_groups_of_the_decay_rule_are_matched_by_shape(tmp_path):
    net, optimizer = saved_net(tmp_path / "in.pt", decay_rule)
    run = torch_run(read_torch(tmp_path / "in.pt"), NET, NET_LIKE)
    assert list(run.expression) == ["a/kernel b/kernel", "a/bias norm/scale norm/bias b/bias"]
    assert [call.arguments["weight_decay"] for call in run.expression.values()] == [0.1, 0.0]
    state = run.state(step_of(run))
    kernel = state.opt_state.inner_states["0"].inner_state[0].mu["b"]["kernel"]
    np.testing.assert_array_equal(kernel.T, optimizer.state[net.b.weight]["exp_avg"])
    back = exported(run, state, tmp_path / "out.pt")
    assert_same({k: back[k] for k in ("model", "optimizer")}, torch.load(tmp_path / "in.pt", weights_only=True))


def test_named_groups_are_matched_by_name_and_may_omit_parameters(tmp_path):
    net, optimizer = saved_net(tmp_path / "in.pt", lambda net: by_layer(net)[1:])
    run = torch_run(read_torch(tmp_path / "in.pt"), NET, NET_LIKE)
    assert list(run.expression) == ["norm/scale norm/bias"]
    state = run.state(step_of(run))
    scale = state.opt_state.inner_states["0"].inner_state[0].nu["norm"]["scale"]
    np.testing.assert_array_equal(scale, optimizer.state[net.norm.weight]["exp_avg_sq"])
    saved_net(tmp_path / "two.pt", by_layer)
    run = torch_run(read_torch(tmp_path / "two.pt"), NET, NET_LIKE)
    assert [call.arguments["learning_rate"] for call in run.expression.values()] == [0.1, 0.01]


def test_prefixes_in_the_names_of_groups_are_removed(tmp_path):
    def wrap(net):
        return torch.nn.ModuleDict({"module": net})

    def groups(outer):
        return [{"params": [(n, p) for n, p in outer.named_parameters()]}]

    outer = wrap(Net())
    outer.forward = outer["module"].forward
    saved_net(tmp_path / "in.pt", groups, wrap=lambda net: outer)
    assert torch_run(read_torch(tmp_path / "in.pt"), NET, NET_LIKE).metadata.group_names == [
        [*NET.torch_order(NET_LIKE)]
    ]


def ambiguous_groups(net):
    return [[net.a.weight, net.a.bias, net.b.weight], [net.norm.weight, net.norm.bias, net.b.bias]]


def changed(key, value, number=0):
    def change(saved):
        saved["optimizer"]["state"][number][key] = value

    return change


def grouped(key, value):
    return lambda saved: saved["optimizer"]["param_groups"][0].__setitem__(key, value)


INVALID = {
    "another step": (changed("step", torch.tensor(7.0)), "was updated 2 times and a.weight 7 times"),
    "half a step": (
        lambda saved: [of.update(step=torch.tensor(1.5)) for of in saved["optimizer"]["state"].values()],
        "number of updates must be a count, got 1.5",
    ),
    "a string as step": (changed("step", "two"), "'two' where a number must be"),
    "NaN": (changed("exp_avg", torch.full((2, 2), float("nan"))), "exp_avg of parameter 0 contains inf or NaN"),
    "too large a moment": (changed("exp_avg_sq", torch.zeros(1).expand(10**15)), "exp_avg_sq of the optimizer: .*mis-"),
    "a missing moment": (
        lambda saved: saved["optimizer"]["state"][3].pop("exp_avg"),
        "exp_avg of the .* missing norm.bias",
    ),
    "an unknown moment": (changed("trust", torch.ones(1)), "trust of a.weight is not a state of adamw"),
    "an additional parameter": (
        lambda saved: saved["optimizer"]["param_groups"][0]["params"].append(6),
        "7 parameters and the",
    ),
    "a parameter in two groups": (
        lambda saved: saved["optimizer"]["param_groups"][0]["params"].append(0),
        "is in two groups",
    ),
    "no lr": (without("lr"), "has no params and lr"),
    "an unknown option": (grouped("lr_scale", 2.0), "AdamW's lr_scale=2.0 in group 0 is not supported"),
    "a scheduler not saved": (
        grouped("initial_lr", 0.1),
        "AdamW had a scheduler, whose state is not in the checkpoint: set --schedule",
    ),
    "an older AdamW": (without("decoupled_weight_decay"), "equal states for Adam and AdamW: set --optimizer"),
    "an unknown optimizer": (
        lambda saved: saved["optimizer"].update(param_groups=[{"lr": 1.0, "params": [*range(6)], "speed": 3}]),
        "with the settings lr, params, speed is not supported",
    ),
    "a scheduler by epochs": (
        lambda saved: saved.update(scheduler=S.StepLR(torch.optim.SGD(Net().parameters()), 3).state_dict()),
        "stepped 0 times in 2 updates, probably per epoch",
    ),
    "a lambda": (
        lambda saved: saved.update(
            scheduler={**S.LambdaLR(torch.optim.SGD(Net().parameters()), lambda t: 1.0).state_dict(), "last_epoch": 2}
        ),
        "does not contain its lr_lambda: set --schedule",
    ),
    "an unknown scheduler": (
        lambda saved: saved.update(scheduler={"tempo": 3}),
        "a scheduler with the state tempo is not supported",
    ),
    "an incomplete scaler": (lambda saved: saved.update(scaler={"scale": 8.0}), "loss scale lacks growth_factor"),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_or_unsupported_state_is_named_in_one_line(case, tmp_path):
    path = tmp_path / "in.pt"
    saved_net(path, lambda net: net.parameters())
    change, message = INVALID[case]
    edit_saved(path, change)

    def import_run():
        run = torch_run(read_torch(path), NET, NET_LIKE)
        run.state(step_of(run))

    with pytest.raises(jt.UserError, match=message) as error:
        import_run()
    assert "\n" not in str(error.value)


def test_groups_that_match_the_parameters_in_several_ways_are_refused(tmp_path):
    saved_net(tmp_path / "in.pt", lambda net: [{"params": group} for group in ambiguous_groups(net)])
    with pytest.raises(jt.UserError, match="the model's in 3 ways: create the optimizer from model"):
        torch_run(read_torch(tmp_path / "in.pt"), NET, NET_LIKE)
