"""Complex parameters train as in PyTorch: with its gradient, and as pairs of real numbers in its optimizers."""

import copy
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import jaxtrain as jt
from jaxtrain import UserError, optim
from jaxtrain.torch_import import from_torch

Tensor = torch.Tensor
DECAY = 0.9


class Spectral(nn.Module):
    """A layer of a Fourier neural operator."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 2, 3, dtype=torch.complex128) * 0.3)
        self.skip = nn.Conv1d(2, 2, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        modes = torch.einsum("bim,iom->bom", torch.fft.rfft(x)[..., :3], self.weight)
        return torch.fft.irfft(modes, n=8) + self.skip(x)


class StateSpace(nn.Module):
    """A diagonal state space (S4D), as a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.complex(-torch.rand(2, 4).double() - 0.1, torch.randn(2, 4).double()))
        self.c = nn.Parameter(torch.randn(2, 4, dtype=torch.complex128))
        self.step = nn.Parameter(torch.zeros(2, 1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        powers = torch.exp((self.a * self.step.exp())[..., None] * torch.arange(8))
        kernel = 2 * torch.einsum("hn,hnl->hl", self.c, powers).real
        return torch.fft.irfft(torch.fft.rfft(x, n=16) * torch.fft.rfft(kernel, n=16), n=16)[..., :8]


Pair = tuple[Callable[[Any], torch.optim.Optimizer], Any]
OPTIMIZERS: dict[str, Pair] = {
    "sgd": (
        lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
        optim.sgd(0.01, 0.9, nesterov=True, weight_decay=0.1),
    ),
    "adamw": (lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1), optim.adamw(0.01, weight_decay=0.1)),
    "adam": (lambda p: torch.optim.Adam(p, 0.01, amsgrad=True), optim.adam(0.01, amsgrad=True)),
    "adagrad": (lambda p: torch.optim.Adagrad(p, 0.01), optim.adagrad(0.01)),
    "adadelta": (lambda p: torch.optim.Adadelta(p, 0.1), optim.adadelta(0.1)),
    "adamax": (lambda p: torch.optim.Adamax(p, 0.01), optim.adamax(0.01)),
    "asgd": (lambda p: torch.optim.ASGD(p, 0.01), optim.asgd(0.01)),
    "nadam": (lambda p: torch.optim.NAdam(p, 0.01), optim.nadam(0.01)),
    "radam": (lambda p: torch.optim.RAdam(p, 0.01), optim.radam(0.01)),
    "rmsprop": (lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5), optim.rmsprop(0.01, momentum=0.5)),
    "rprop": (lambda p: torch.optim.Rprop(p, 0.01), optim.rprop(0.01)),
}
X = np.random.default_rng(0).standard_normal((5, 4, 2, 8))


def trained_in_torch(module: nn.Module, make: Callable[[Any], Any], clip_norm: float | None) -> list[float]:
    """Train on windows of two micro-batches, with a moving average; return the losses."""
    optimizer, losses = make(module.parameters()), []
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for x in torch.tensor(X):
        loss = sum(((module(half) - 1) ** 2).mean() / 2 for half in x.split(2))
        optimizer.zero_grad()
        loss.backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip_norm)
        optimizer.step()
        average.update_parameters(module)
        losses.append(loss.item())
    module.average = dict(average.module.named_parameters())  # type: ignore[assignment]
    return losses


@pytest.mark.parametrize("kind", [Spectral, StateSpace])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_pytorchs(kind: type[nn.Module], name: str) -> None:
    torch.manual_seed(0)
    module, (make, ours) = kind(), OPTIMIZERS[name]
    clip_norm = 0.5 if name in ("sgd", "adam") else None
    with jax.enable_x64(True):
        model = from_torch(module, X[0])
        loss_fn = model.loss(lambda y, batch: jt.Loss.of((y - 1) ** 2))
        scale = jt.dynamic_loss_scale() if name == "sgd" else None
        options = {"precision": "fp64", "accumulate": 2, "clip_norm": clip_norm, "ema": DECAY}
        step = jt.train_step(loss_fn, ours, **options, **({"loss_scale": scale} if scale else {}))
        state, losses = step.init(model.params), []
        for x in X:
            state, metrics = step(state, x)
            losses.append(float(metrics["loss"]))
        params, average = jax.device_get((state.params, state.ema))
    expected = trained_in_torch(module, make, clip_norm)
    # PyTorch holds the rates of these two in float32.
    bound = 1e-6 if name in ("asgd", "nadam") else 1e-9
    np.testing.assert_allclose(losses, expected, rtol=bound)
    for path, x in module.named_parameters():
        for found, wanted in ((params, x), (average, module.average[path])):
            np.testing.assert_allclose(found[path], wanted.detach().numpy(), bound, bound, err_msg=path)


def test_streamed_windows_and_masks_by_axes_are_those_of_complex_arrays() -> None:
    torch.manual_seed(0)
    module = StateSpace()
    module.bias = nn.Parameter(torch.randn(2, dtype=torch.complex128))
    module.forward = lambda x: StateSpace.forward(module, x) + module.bias.abs()[:, None]  # type: ignore[method-assign]
    theirs = copy.deepcopy(module)
    theirs.forward = lambda x: StateSpace.forward(theirs, x) + theirs.bias.abs()[:, None]  # type: ignore[method-assign]
    params = dict(theirs.named_parameters())
    groups = [
        {"params": [x for n, x in params.items() if n != "bias"]},
        {"params": [params["bias"]], "weight_decay": 0.0},
    ]

    def loss_fn(params: Any, x: Any, rng: Any) -> Any:
        powers = jnp.exp((params["a"] * jnp.exp(params["step"]))[..., None] * np.arange(8.0)[None, None])
        kernel = 2 * jnp.einsum("hn,hnl->hl", params["c"], powers).real
        y = jnp.fft.irfft(jnp.fft.rfft(x, n=16) * jnp.fft.rfft(kernel, n=16)[None], n=16)[..., :8]
        return jt.Loss.of((y + jnp.abs(params["bias"])[None, :, None] - 1) ** 2), {}

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        adamw = optim.adamw(0.01, weight_decay=0.5, mask=optim.all_but(optim.no_decay))
        step = jt.train_step(loss_fn, adamw, precision="fp64", accumulate=2)
        state = step.init({n: x.detach().numpy().copy() for n, x in params.items()}, streaming=True)
        for x in X:
            for half in np.split(x, 2):
                state, _ = step.micro(state, half)
        found = jax.device_get(state.params)
    trained_in_torch(theirs, lambda _: torch.optim.AdamW(groups, 0.01, weight_decay=0.5), None)
    for path, x in params.items():
        np.testing.assert_allclose(found[path], x.detach().numpy(), rtol=1e-9, atol=1e-10, err_msg=path)


def test_an_optimizer_of_optax_goes_downhill() -> None:
    step = jt.train_step(lambda p, b, r: (jt.Loss.of(jnp.abs(p["w"] - b) ** 2), {}), optax.sgd(0.5))
    state = step.init({"w": np.complex64([3 + 4j])})
    state, _ = step(state, np.complex64([1 - 2j]))
    np.testing.assert_allclose(state.params["w"], [1 - 2j], atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_value": 1.0}, "the parameter w is complex, which clip_value, as PyTorch's clip_grad_value_, does not"),
        ({"optimizer": optim.muon()}, "the parameter w is complex, which muon does not support: put it in another"),
        ({"optimizer": optim.adafactor()}, "the parameter w is complex, which adafactor does not support"),
        ({"optimizer": optim.adamw8bit()}, "the parameter w is complex, which adamw8bit does not support"),
    ],
)
def test_what_pytorch_refuses_is_refused(options: dict[str, Any], message: str) -> None:
    optimizer = options.pop("optimizer", optim.adamw())
    step = jt.train_step(lambda p, b, r: (jt.Loss.of(jnp.abs(p["w"]) ** 2), {}), optimizer, **options)
    with pytest.raises(UserError, match=message):
        step.init({"w": np.ones((2, 2), np.complex64)})
