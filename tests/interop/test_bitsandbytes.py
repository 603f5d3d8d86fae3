"""Runs of bitsandbytes' 8-bit optimizers, imported with their codes, continued and exported."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import jaxtrain as jt
from jaxtrain.interop import LINEAR, NameTable, TorchParam, from_torch, read_torch, to_torch, torch_run, write_torch
from jaxtrain.interop.names import CONV
from jaxtrain.optim.blockwise_quantization import Blockwise
from tests.interop.saved_runs import assert_same
from tests.optim.test_eight_bit import bitsandbytes, nearest_codes

TABLE = NameTable(
    {
        "wte": TorchParam("wte.weight"),
        "blocks/kernel": TorchParam("h.{layer}.weight", LINEAR),
        "blocks/bias": TorchParam("h.{layer}.bias"),
        "conv": TorchParam("conv.weight", CONV),
        "last": TorchParam("last.weight", LINEAR),
    }
)
SHAPES = {
    "wte": (50, 100),
    "blocks": {"kernel": (2, 64, 96), "bias": (2, 96)},
    "conv": (3, 3, 24, 32),
    "last": (70, 90),
}
LIKE = jax.tree.map(
    lambda shape: jax.ShapeDtypeStruct(shape, np.float32), SHAPES, is_leaf=lambda x: isinstance(x, tuple)
)
OPTIONS = {
    "SGD8bit": {"lr": 2**-7, "momentum": 0.5},
    "AdamW8bit": {"lr": 2**-7, "betas": (0.5, 0.5), "weight_decay": 0.125},
}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = torch.nn.Embedding(50, 100)
        self.h = torch.nn.ModuleList([torch.nn.Linear(64, 96) for _ in range(2)])
        self.conv = torch.nn.Conv2d(24, 32, 3, bias=False)
        self.last = torch.nn.Linear(70, 90, bias=False)


def gradient(name, shape, t):
    rng = np.random.default_rng([t, *name.encode()])
    return (rng.standard_normal(shape) * 10.0 ** rng.uniform(-4, 0, shape)).astype(np.float32)


class Run:
    def __init__(self, kind):
        torch.manual_seed(0)
        self.model, self.updates = Net(), 0
        self.optimizer = getattr(bitsandbytes()[0].optim, kind)(self.model.parameters(), **OPTIONS[kind])

    def step(self, times):
        for _ in range(times):
            for name, p in self.model.named_parameters():
                p.grad = torch.from_numpy(gradient(name, p.shape, self.updates))
            self.optimizer.step()
            self.updates += 1
        return self

    def parts(self):
        return copy.deepcopy({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})

    def load(self, parts):
        self.model.load_state_dict(parts["model"])
        self.optimizer.load_state_dict(parts["optimizer"])
        return self


def loss_fn(params, batch, rng):
    del rng
    total = sum((p * g.astype(p.dtype)).sum() for p, g in zip(jax.tree.leaves(params), batch["g"], strict=True))
    return jt.Loss(total, jnp.asarray(1.0)), {}


def exported(run, state, path):
    write_torch(path, to_torch(state, run.metadata, run.expression, run.names))
    return torch.load(path, weights_only=True)


def part(saved, *names):
    return {name: saved[name] for name in names}


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_run_continues_in_both_directions_with_the_same_codes(kind, tmp_path, monkeypatch):
    nearest_codes(monkeypatch)
    theirs = Run(kind).step(3)
    torch.save(theirs.parts(), tmp_path / "in.pt")
    run = torch_run(read_torch(tmp_path / "in.pt"), TABLE, LIKE)
    step = jt.train_step(loss_fn, run.optimizer(), precision="fp32")
    state = run.state(step)
    field = "mu" if kind == "AdamW8bit" else "momentum_buffer"
    moments = optax.tree.get(state.opt_state, field)
    assert [isinstance(moments[k], Blockwise) for k in ("wte", "conv", "last")] == [True] * 3
    assert isinstance(moments["blocks"]["kernel"], Blockwise)
    assert moments["blocks"]["bias"].dtype == np.float32
    saved = torch.load(tmp_path / "in.pt", weights_only=True)
    assert_same(part(exported(run, state, tmp_path / "out.pt"), *saved), saved)
    for t in range(3, 6):
        tensors = {name: gradient(name, p.shape, t) for name, p in theirs.model.named_parameters()}
        state, _ = step(state, {"g": jax.tree.leaves(TABLE.to_jax(tensors, LIKE))})
    back, expected = exported(run, state, tmp_path / "out.pt"), theirs.step(3).parts()
    resumed = Run(kind).load(back)
    resumed.updates = 6
    for mine, other in ((back, expected), (resumed.step(2).parts(), theirs.step(2).parts())):
        for number, of in other["optimizer"]["state"].items():
            for key, value in next(v for v in of.values() if isinstance(v, dict)).items():
                ours = next(v for v in mine["optimizer"]["state"][number].values() if isinstance(v, dict))[key]
                # The second moments' last digits depend on where a compiler contracts a product and a sum.
                close = {"rtol": 0, "atol": 0} if value.dtype == torch.uint8 else {"rtol": 1e-6, "atol": 1e-9}
                torch.testing.assert_close(ours, value, **close)
        for name, value in other["model"].items():
            torch.testing.assert_close(mine["model"][name], value, rtol=1e-6, atol=1e-6)


def test_what_cannot_be_converted_raises_an_error(tmp_path, monkeypatch):
    nearest_codes(monkeypatch)
    torch.save(Run("SGD8bit").step(1).parts(), tmp_path / "in.pt")

    def edited(change):
        saved = torch.load(tmp_path / "in.pt", weights_only=True)
        change(saved["optimizer"])
        torch.save(saved, tmp_path / "edited.pt")
        run = torch_run(read_torch(tmp_path / "edited.pt"), TABLE, LIKE)
        run.state(jt.train_step(loss_fn, run.optimizer(), precision="fp32"))

    def hidden(optimizer):
        return next(v for v in optimizer["state"][0].values() if isinstance(v, dict))

    with pytest.raises(jt.UserError, match=r"qmap1 of .* is not bitsandbytes' dynamic map"):
        edited(lambda o: hidden(o)["qmap1"].mul_(2))
    with pytest.raises(jt.UserError, match="absmax1 and qmap1 of"):
        edited(lambda o: hidden(o).pop("absmax1"))
    with pytest.raises(jt.UserError, match="with one moment"):
        edited(lambda o: o["param_groups"][0].update(betas=(0.9, 0.99)))
    odd = NameTable({"p": TorchParam("{layer}.weight")})
    holder = torch.nn.ModuleList([torch.nn.Linear(70, 90, bias=False) for _ in range(2)])
    optimizer = bitsandbytes()[0].optim.SGD8bit(holder.parameters(), lr=0.1, momentum=0.9)
    for p in holder.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    torch.save({"model": holder.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "odd.pt")
    with pytest.raises(jt.UserError, match="not whole blocks of 256"):
        torch_run(read_torch(tmp_path / "odd.pt"), odd, {"p": jax.ShapeDtypeStruct((2, 90, 70), np.float32)})


def test_a_live_optimizer_is_converted_by_its_class_and_arguments():
    optim = bitsandbytes()[0].optim
    net = Net()
    paths = {"h.0.weight": "first", "last.weight": "last"}
    tensors = {"h.0.weight": net.h[0].weight, "last.weight": net.last.weight}
    theirs = optim.AdamW(tensors.values(), lr=0.5, betas=(0.5, 0.25), optim_bits=8, min_8bit_size=6200)
    params = {path: jnp.ones(tensors[name].shape) for name, path in paths.items()}
    tx = from_torch(theirs, model=net, names=paths)
    mu = optax.tree.get(tx.init(params), "mu")
    assert [isinstance(mu[path], Blockwise) for path in ("first", "last")] == [False, True]
    updates, _ = tx.update(params, tx.init(params), params)
    assert float(updates["first"][0, 0]) == pytest.approx(-0.5 - 0.5 * 1e-2)
    optim.GlobalOptimManager.get_instance().override_config(net.last.weight, "optim_bits", 32)
    mu = optax.tree.get(from_torch(theirs, model=net, names=paths).init(params), "mu")
    assert not isinstance(mu["last"], Blockwise)
    with pytest.raises(jt.UserError, match="parameters with 32 bits: pass names"):
        from_torch(theirs)
    with pytest.raises(jt.UserError, match="bitsandbytes' Lion8bit is not supported"):
        from_torch(optim.Lion8bit(tensors.values()))
    theirs.param_groups[0]["alpha"] = 5.0
    with pytest.raises(jt.UserError, match="AdEMAMix"):
        from_torch(theirs, model=net, names=paths)
