"""Runs of small PyTorch models, saved to files, imported and exported again."""

import jax
import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as S

import jaxtrain as jt
from jaxtrain.interop import AS_IS, LINEAR, NameTable, TorchParam
from jaxtrain.interop.torch_file import read_torch, write_torch
from jaxtrain.interop.torch_run import to_torch, torch_run

TABLE = NameTable({"fc/kernel": TorchParam("fc.weight", LINEAR), "fc/bias": TorchParam("fc.bias", AS_IS)})
LIKE = {"fc": {"kernel": jax.ShapeDtypeStruct((3, 2), np.float32), "bias": jax.ShapeDtypeStruct((2,), np.float32)}}
MATRIX = NameTable({"fc/kernel": TABLE.params["fc/kernel"]})
MATRIX_LIKE = {"fc": {"kernel": LIKE["fc"]["kernel"]}}
HAVE_MOMENTUM = {"Adam", "Adamax", "AdamW", "NAdam", "RAdam", "RMSprop", "SGD", "Muon"}
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


def edit_saved(path, change):
    saved = torch.load(path, weights_only=True)
    change(saved)
    torch.save(saved, path)


def without(key):
    def change(saved):
        for group in saved["optimizer"]["param_groups"]:
            del group[key]

    return change
