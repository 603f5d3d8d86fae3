"""Optimizers converted from live PyTorch optimizers, schedulers and groups make the same updates."""

import functools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as theirs

from jaxtrain.errors import UserError
from jaxtrain.interop import NameTable, TorchParam, from_torch
from jaxtrain.interop.names import CONV, LINEAR
from jaxtrain.optim import expression, muon, used_learning_rate, used_learning_rates
from tests.optim.test_optimizers import CASES, OPTIMIZERS

STEPS = 30
TABLE = NameTable({"head/kernel": TorchParam("1.weight", LINEAR), "head/bias": TorchParam("1.bias")})
STACKED = NameTable({"kernel": TorchParam("{layer}.weight", LINEAR), "bias": TorchParam("{layer}.bias")})


@pytest.fixture(autouse=True)
def double(monkeypatch):
    torch.set_default_dtype(torch.float64)
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.double().clone())
    with jax.enable_x64(True):
        yield
    torch.set_default_dtype(torch.float32)


def gradient(p):
    """Return the gradient at `p`, an array of either framework."""
    return p**3 - 0.5 * p + 0.1


def torch_run(params, optimizer, scheduler=None, metric=False):
    for _ in range(STEPS):
        for p in params:
            p.grad = gradient(p.detach())
        optimizer.step()
        if scheduler is not None:
            scheduler.step(*([1.0] if metric else []))


def jax_run(tx, params, **extra):
    def update(carry, _):
        params, state = carry
        updates, state = tx.update(jax.tree.map(gradient, params), state, params, **extra)
        return (jax.tree.map(jnp.add, params, updates), state), None

    return jax.jit(lambda p: jax.lax.scan(update, (p, tx.init(p)), length=STEPS)[0])(params)


def torch_params(*shape):
    return torch.linspace(-1, 1, math.prod(shape)).reshape(shape).clone().requires_grad_()


def run_both(optimizer, scheduler, p, metric=False, **extra):
    tx = from_torch(optimizer, scheduler)
    start = jnp.asarray(p.detach().numpy().copy())
    torch_run([p], optimizer, scheduler, metric)
    params, state = jax_run(tx, start, **extra)
    np.testing.assert_allclose(params, p.detach().numpy(), rtol=1e-12, atol=1e-15)
    return state


# Muon's matrices are transposed by a name table, below.
@pytest.mark.parametrize(("name", "options"), [case for case in CASES if case[0] != "muon"])
def test_every_optimizer_and_argument_equals_pytorch(name, options):
    p = torch_params(3, 4)
    run_both(OPTIMIZERS[name][0]([p], **options), None, p)


SCHEDULERS = {
    "step": lambda o: theirs.StepLR(o, 7, 0.5),
    "multi step": lambda o: theirs.MultiStepLR(o, [3, 3, 20], 0.5),
    "constant": lambda o: theirs.ConstantLR(o, 0.4, 9),
    "linear": lambda o: theirs.LinearLR(o, 0.2, 0.9, 12),
    "exponential": lambda o: theirs.ExponentialLR(o, 0.9),
    "polynomial": lambda o: theirs.PolynomialLR(o, 20, 2.0),
    "cosine": lambda o: theirs.CosineAnnealingLR(o, 11, 1e-3),
    "restarts": lambda o: theirs.CosineAnnealingWarmRestarts(o, 4, 2, 1e-3),
    "lambda": lambda o: theirs.LambdaLR(o, lambda t: 0.95**t),
    "multiplicative": lambda o: theirs.MultiplicativeLR(o, lambda t: 0.95),
    "cyclic": lambda o: theirs.CyclicLR(o, 1e-3, 1e-2, 5, 9, "triangular2"),
    "cyclic, own scale": lambda o: theirs.CyclicLR(o, 1e-3, 1e-2, 5, scale_fn=lambda x: 0.9**x, cycle_momentum=False),
    "one cycle": lambda o: theirs.OneCycleLR(o, 1e-2, STEPS),
    "one cycle, three phases": lambda o: theirs.OneCycleLR(
        o, 1e-2, STEPS, pct_start=0.4, anneal_strategy="linear", three_phase=True
    ),
    "sequential": lambda o: theirs.SequentialLR(
        o, [theirs.LinearLR(o, 0.1, total_iters=5), theirs.CosineAnnealingLR(o, 20)], [5]
    ),
    "chained": lambda o: theirs.ChainedScheduler(
        [theirs.LinearLR(o, 0.1, total_iters=5), theirs.CosineAnnealingLR(o, 20)]
    ),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_every_scheduler_equals_pytorch(scheduler, kind):
    p = torch_params(3)
    optimizer = kind([p], lr=1e-2, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
    run_both(optimizer, SCHEDULERS[scheduler](optimizer), p)


def test_reduce_on_plateau():
    p = torch_params(3)
    optimizer = torch.optim.SGD([p], lr=1e-2)
    state = run_both(optimizer, theirs.ReduceLROnPlateau(optimizer, patience=5), p, metric=True, value=1.0)
    assert float(used_learning_rate(state)) < 1e-4


def test_a_tensor_is_accepted_as_a_learning_rate():
    p = torch_params(3)
    run_both(torch.optim.Adam([p], lr=torch.tensor(1e-2), weight_decay=0.1), None, p)


def module():
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3, 2))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.linspace(-1, 1, p.numel()).reshape(p.shape))
    return model


def as_jax(model, table=TABLE):
    tensors = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    like = {"head": {"kernel": np.zeros((3, 2)), "bias": np.zeros(2)}}
    return jax.tree.map(jnp.asarray, table.to_jax(tensors, like))


@pytest.mark.parametrize(
    "names",
    [
        TABLE,
        {"1.weight": "head/kernel", "1.bias": "head/bias"},
        lambda n: "head/" + {"1.weight": "kernel"}.get(n, "bias"),
    ],
    ids=["table", "mapping", "function"],
)
def test_groups_under_one_scheduler(names):
    model = module()
    weight, bias = model.parameters()
    optimizer = torch.optim.AdamW([{"params": [weight], "weight_decay": 0.3}, {"params": [bias], "lr": 0.1}], lr=1e-2)
    scheduler = theirs.CyclicLR(optimizer, [1e-3, 1e-2], [1e-2, 1e-1], 5)
    tx = from_torch(optimizer, scheduler, model=model, names=names)
    start = as_jax(model)
    torch_run(list(model.parameters()), optimizer, scheduler)
    params, state = jax_run(tx, start)
    for path, leaf in as_jax(model)["head"].items():
        np.testing.assert_allclose(params["head"][path], leaf, rtol=1e-12)
    assert used_learning_rate(state) is None
    rates = used_learning_rates(state)
    assert set(rates) == {"0", "1"}
    np.testing.assert_allclose(rates["1"], 10 * rates["0"])


def test_parameters_outside_the_optimizer_are_unchanged_and_muons_are_transposed(monkeypatch):
    in_double = functools.partial(muon, dtype=np.float64)
    monkeypatch.setitem(expression.OPTIMIZERS, "muon", in_double)
    model = module()
    weight, bias = model.parameters()
    optimizer = torch.optim.Muon([("1.weight", weight)], lr=0.01)
    tx = from_torch(optimizer, names=TABLE)
    start = as_jax(model)
    torch_run([weight], optimizer)
    params, _ = jax_run(tx, start)
    np.testing.assert_array_equal(params["head"]["bias"], bias.detach().numpy())
    np.testing.assert_allclose(params["head"]["kernel"].T, weight.detach().numpy(), rtol=1e-12)


class Mine(torch.optim.SGD):
    pass


def sgd_of(*groups, **options):
    return torch.optim.SGD([{"params": [g]} for g in groups] or [torch_params(2)], lr=0.1, **options)


def hooked():
    optimizer = sgd_of()
    optimizer.register_step_post_hook(lambda *args: None)
    return optimizer


def scheduled(make, optimizer=None):
    optimizer = optimizer or sgd_of(momentum=0.9)
    return optimizer, make(optimizer)


def layers():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    return model, [list(layer.parameters()) for layer in model]


def stacked_layers_in_two_groups():
    model, (first, second) = layers()
    return from_torch(torch.optim.SGD([{"params": first}, {"params": second}]), model=model, names=STACKED)


def convert_one_parameter(kind, table):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    optimizer = kind([next(model.parameters())])
    return from_torch(optimizer, model=model, names=table)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: from_torch(torch.optim.LBFGS([torch_params(2)])), "LBFGS is not supported: use one of"),
        (lambda: from_torch(Mine([torch_params(2)])), "Mine is not supported: use one of"),
        (
            lambda: from_torch(torch.optim.SGD([{"params": [torch_params(2)], "lr_scale": 2}])),
            "SGD's lr_scale=2 in group 0",
        ),
        (lambda: from_torch(hooked()), "SGD has step hooks"),
        (lambda: from_torch(scheduled(lambda o: theirs.StepLR(o, 2))[0]), "SGD has a scheduler"),
        (lambda: from_torch(sgd_of(), scheduled(lambda o: theirs.StepLR(o, 2))[1]), "StepLR schedules another"),
        (lambda: from_torch(sgd_of(torch_params(1), torch_params(1))), "SGD has 2 parameter groups: pass names"),
        (lambda: from_torch(sgd_of(), names={}), "parameter 0 of group 0 has no name"),
        (lambda: from_torch(torch.optim.SGD([("w", torch_params(1))]), names={}), "w of group 0 is not in names"),
        (stacked_layers_in_two_groups, "bias stacks parameters|kernel stacks parameters"),
        (
            lambda: from_torch(*scheduled(lambda o: theirs.LambdaLR(o, lambda t: min(1, t)))),
            "lr_lambda must be a JAX function",
        ),
        (
            lambda: from_torch(*scheduled(lambda o: theirs.SequentialLR(o, [theirs.OneCycleLR(o, 0.1, 9)], []))),
            "cycle_momentum of a OneCycleLR in a SequentialLR",
        ),
        (lambda: convert_one_parameter(torch.optim.Muon, STACKED), "kernel does not have the layout of {layer}.weight"),
        (
            lambda: convert_one_parameter(torch.optim.Adafactor, NameTable({"k": TorchParam("0.weight", CONV)})),
            "k does not have the layout of 0.weight",
        ),
        (
            lambda: from_torch(*scheduled(theirs.ReduceLROnPlateau, torch.optim.ASGD([torch_params(2)]))).init(
                jnp.ones(2)
            ),
            "reduce_lr_on_plateau and rate_of_metric are not supported by an optimizer that reads its rate",
        ),
    ],
)
def test_an_unsupported_setting_is_named(call, message):
    with pytest.raises(UserError, match=message):
        call()


def test_stacked_layers_of_one_group_are_one_leaf():
    model, (first, second) = layers()
    weights, biases = [first[0], second[0]], [first[1], second[1]]
    optimizer = torch.optim.SGD([{"params": weights, "weight_decay": 0.1}, {"params": biases}], lr=0.1)
    tx = from_torch(optimizer, model=model, names=STACKED)
    tensors = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    like = {"kernel": np.zeros((2, 2, 2)), "bias": np.zeros((2, 2))}
    start = jax.tree.map(jnp.asarray, STACKED.to_jax(tensors, like))
    torch_run(list(model.parameters()), optimizer)
    params, _ = jax_run(tx, start)
    for name, tensor in STACKED.to_torch(params).items():
        np.testing.assert_allclose(tensor, dict(model.named_parameters())[name].detach().numpy(), rtol=1e-12)


def test_muon_finds_the_output_axis_in_the_table():
    layout = sys.modules["jaxtrain.interop.torch_optimizer"]._layout
    table = NameTable({"kernel": TorchParam("weight", LINEAR), "embedding": TorchParam("table")})
    assert layout("Muon", ["kernel"], table) == {"out_axis": -1}
    assert layout("Muon", ["embedding"], table) == {"out_axis": 0}
    with pytest.raises(UserError, match="kernel, embedding: Muon cannot have transposed and other parameters"):
        layout("Muon", ["kernel", "embedding"], table)
