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
from jaxtrain.interop import AS_IS, LINEAR, NameTable, TorchParam
from jaxtrain.interop.torch_file import read_torch, write_torch
from jaxtrain.interop.torch_run import to_torch, torch_run
from jaxtrain.optim import expression, muon
from jaxtrain.optim.expression import Call

TABLE = NameTable({"fc/kernel": TorchParam("fc.weight", LINEAR), "fc/bias": TorchParam("fc.bias", AS_IS)})
LIKE = {"fc": {"kernel": jax.ShapeDtypeStruct((3, 2), np.float32), "bias": jax.ShapeDtypeStruct((2,), np.float32)}}
MATRIX = NameTable({"fc/kernel": TABLE.params["fc/kernel"]})
MATRIX_LIKE = {"fc": {"kernel": LIKE["fc"]["kernel"]}}

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
HAVE_MOMENTUM = {"Adam", "Adamax", "AdamW", "NAdam", "RAdam", "RMSprop", "SGD", "Muon"}
READ_THEIR_RATE = {"Adafactor", "ASGD", "Rprop"}

SCHEDULERS = {
    "none": lambda o, momentum: None,
    "step": lambda o, momentum: S.StepLR(o, 2, 0.5),
    "multi step": lambda o, momentum: S.MultiStepLR(o, [1, 1, 4], 0.5),
    "constant": lambda o, momentum: S.ConstantLR(o, 0.4, 3),
    "linear": lambda o, momentum: S.LinearLR(o, 0.2, 0.9, 5),
    "exponential": lambda o, momentum: S.ExponentialLR(o, 0.9),
    "polynomial": lambda o, momentum: S.PolynomialLR(o, 20, 2.0),
    "cosine": lambda o, momentum: S.CosineAnnealingLR(o, 5, 1e-3),
    "restarts": lambda o, momentum: S.CosineAnnealingWarmRestarts(o, 2, 2, 1e-3),
    "cyclic": lambda o, momentum: S.CyclicLR(o, 1e-3, 1e-2, 2, 3, "triangular2", cycle_momentum=momentum),
    "one cycle": lambda o, momentum: S.OneCycleLR(o, 1e-2, 10, cycle_momentum=momentum),
    "plateau": lambda o, momentum: S.ReduceLROnPlateau(o, patience=2),
    "sequential": lambda o, momentum: S.SequentialLR(
        o, [S.LinearLR(o, 0.1, total_iters=2), S.CosineAnnealingLR(o, 20)], [4]
    ),
    "chained": lambda o, momentum: S.ChainedScheduler([S.LinearLR(o, 0.1, total_iters=5), S.CosineAnnealingLR(o, 20)]),
}


class Model(torch.nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.fc = torch.nn.Linear(3, 2, bias=bias)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.linspace(-1, 1, p.numel()).reshape(p.shape))

    def forward(self, x):
        return self.fc(x)


X = np.array([[0.5, -1.0, 2.0], [1.5, 0.3, -0.7]], np.float32)
Y = np.array([[1.0, -1.0], [0.2, 0.4]], np.float32)


class Run:
    """A PyTorch loop, with everything a script saves."""

    def __init__(self, name, options=None, schedule="none", scaler=False, dtype=torch.float32):
        self.model = Model(bias=name != "Muon").to(dtype)
        self.optimizer = getattr(torch.optim, name)(self.model.parameters(), lr=1e-2, **(options or {}))
        self.scheduler = SCHEDULERS[schedule](self.optimizer, name in HAVE_MOMENTUM)
        self.scaler = torch.amp.GradScaler("cpu", enabled=scaler, init_scale=2.0**10, growth_interval=4)

    def step(self, times):
        x, y = (torch.from_numpy(a).to(next(self.model.parameters()).dtype) for a in (X, Y))
        for _ in range(times):
            self.optimizer.zero_grad()
            loss = ((self.model(x) - y) ** 2).sum() / 2
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if isinstance(self.scheduler, S.ReduceLROnPlateau):
                self.scheduler.step(1.0)
            elif self.scheduler is not None:
                self.scheduler.step()
        return self

    def parts(self):
        scheduler = {} if self.scheduler is None else {"scheduler": self.scheduler.state_dict()}
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            **scheduler,
            "scaler": self.scaler.state_dict(),
            "epoch": 3,
            "step": int(self.count()),
        }

    def count(self):
        steps = [of["step"] for of in self.optimizer.state.values() if "step" in of]
        return steps[0] if steps else 3

    def save(self, path):
        torch.save(self.parts(), path)
        return path

    def load(self, parts):
        self.model.load_state_dict(parts["model"])
        self.optimizer.load_state_dict(parts["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(parts["scheduler"])
        self.scaler.load_state_dict(parts["scaler"])
        return self


def imported(path, matrix=False, like=None, **options):
    table, own = (MATRIX, MATRIX_LIKE) if matrix else (TABLE, LIKE)
    return torch_run(read_torch(path), table, like or own, **options)


def loss_fn(params, batch, rng):
    del rng
    logits = batch["x"] @ params["fc"]["kernel"]
    if "bias" in params["fc"]:
        logits = logits + params["fc"]["bias"][None]
    return jt.Loss(((logits - batch["y"]) ** 2).sum(), weight=len(batch["x"])), {}


def step_of(run, precision="fp32"):
    return jt.train_step(loss_fn, run.optimizer(), precision=precision, loss_scale=run.loss_scale())


def exported(run, state, path):
    write_torch(path, to_torch(state, run.metadata, run.expression, run.names))
    return torch.load(path, weights_only=True)


def assert_same(a, b, close=None, where=""):
    """Assert equality to the bit and of types; with `close`, tensors and floats within this relative tolerance."""
    assert (isinstance(a, dict) and isinstance(b, dict)) or type(a) is type(b), (where, a, b)
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], close, f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, close, f"{where}[{i}]")
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, where
        assert a.shape == b.shape, where
        torch.testing.assert_close(a, b, rtol=close or 0, atol=(close or 0) * 1e-3, msg=lambda m: f"{where}: {m}")
    elif isinstance(a, float) and close:
        assert a == pytest.approx(b, rel=close), where
    else:
        assert a == b, where


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", SCHEDULERS)
def test_round_trip_is_bit_equal_for_every_optimizer_and_scaler(schedule, tmp_path):
    for name, options in OPTIMIZER_CASES:
        for scaler in (False, True):
            theirs = Run(name, options, schedule, scaler).step(3)
            run = imported(theirs.save(tmp_path / "in.pt"), name == "Muon")
            if schedule == "plateau" and name in READ_THEIR_RATE:
                with pytest.raises(jt.UserError, match="reduce_lr_on_plateau is not supported by an optimizer"):
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


@pytest.mark.sampled(6)
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(("name", "options"), OPTIMIZER_CASES)
def test_every_optimizer_continues_in_both_directions(name, options, tmp_path, monkeypatch):
    if name == "Muon":  # PyTorch's iterates in bfloat16
        monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.double().clone())
        monkeypatch.setitem(expression.OPTIMIZERS, "muon", functools.partial(muon, dtype=np.float64))
    ours, theirs, ours_resumed, theirs_resumed = continue_run(name, options, "one cycle", True, tmp_path)
    for mine, other in ((ours, theirs), (ours_resumed, theirs_resumed)):
        assert_same(mine, {**other, "step": mine["step"]}, close=1e-10, where=name)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("schedule", [s for s in SCHEDULERS if s != "plateau"])
def test_every_schedule_continues_in_both_directions(schedule, tmp_path):
    ours, theirs, ours_resumed, theirs_resumed = continue_run("SGD", {"momentum": 0.9}, schedule, False, tmp_path)
    for mine, other in ((ours, theirs), (ours_resumed, theirs_resumed)):
        assert_same(mine, {**other, "step": mine["step"]}, close=1e-10)


class Net(torch.nn.Module):
    """A model with repeated shapes: two equal matrices, and biases and scales of one size."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = torch.nn.Linear(2, 2), torch.nn.LayerNorm(2), torch.nn.Linear(2, 2)

    def forward(self, x):
        return self.b(self.norm(self.a(x)))


NET = NameTable(
    {
        "a/kernel": TorchParam("a.weight", LINEAR),
        "a/bias": TorchParam("a.bias"),
        "norm/scale": TorchParam("norm.weight"),
        "norm/bias": TorchParam("norm.bias"),
        "b/kernel": TorchParam("b.weight", LINEAR),
        "b/bias": TorchParam("b.bias"),
    }
)
NET_LIKE = {
    layer: {name: jax.ShapeDtypeStruct((2, 2) if name == "kernel" else (2,), np.float32) for name in names}
    for layer, names in {"a": ("kernel", "bias"), "norm": ("scale", "bias"), "b": ("kernel", "bias")}.items()
}


def saved_net(path, groups, *, kind=torch.optim.AdamW, steps=2, wrap=lambda model: model, **options):
    """Save a Net after some updates of an optimizer over the groups `groups(net)`; return both."""
    net = wrap(Net())
    optimizer = kind(groups(net), lr=0.01, **options)
    for i in range(steps):
        optimizer.zero_grad()
        (net(torch.tensor([[1.0, 2.0], [0.5, -float(i)]])) ** 2).sum().backward()
        optimizer.step()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return net, optimizer


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


def edit_saved(path, change):
    saved = torch.load(path, weights_only=True)
    change(saved)
    torch.save(saved, path)


def changed(key, value, number=0):
    def change(saved):
        saved["optimizer"]["state"][number][key] = value

    return change


def grouped(key, value):
    return lambda saved: saved["optimizer"]["param_groups"][0].__setitem__(key, value)


def without(key):
    def change(saved):
        for group in saved["optimizer"]["param_groups"]:
            del group[key]

    return change


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
    "a scheduler not saved": (grouped("initial_lr", 0.1), "AdamW has a scheduler: pass it too"),
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
