"""The small cases of the mutants: one layer or one loss in each framework.

JAX's parameters are a flat dict under PyTorch's names, in PyTorch's layouts. All weights come from PyTorch, so that
initialization plays no part.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter

import jaxtrain
from jaxtrain import optim
from jaxtrain.interop import NameTable, TorchParam
from parity.case import Batch, Case
from parity.optimizer import Optimizer

ROWS = 4
LR = 1e-2
SGD = Optimizer("SGD", lambda named: torch.optim.SGD(named, lr=LR), optim.sgd(LR))
"""Its updates are proportional to the gradients, so that a gradient of rounding noise changes nothing."""

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


class Call(Module):
    """A layer that calls a function of tensors."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Return the value of the function."""
        return self.function(x)


class Net(Module):
    """A layer after a trained scale or shift, which shows the gradient with respect to the layer's input."""

    def __init__(self, layer: Module, move: str, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.scale = Parameter(torch.ones(shape)) if move == "scale" else None
        self.shift = Parameter(torch.zeros(shape)) if move == "shift" else None
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's flattened output."""
        x = x if self.scale is None else x * self.scale
        return self.layer(x if self.shift is None else x + self.shift).flatten(1)


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw Gaussian noise."""
    return rng.standard_normal(shape, np.float32)


def layered(
    layer: Callable[[], Module],
    ours: Callable[..., Any],
    shape: tuple[int, ...],
    draw: Draw = normal,
    move: str = "scale",
) -> Case:
    """Return a case of one layer.

    Args:
      layer: Creates PyTorch's layer.
      ours: JAX's layer, called with (params, x), or (params, x, state) for a layer with buffers.
      shape: Shape of one row of the input; a batch has 4.
      draw: Draws a batch.
      move: Trained operation before the layer: "scale"; "shift", for gradients at 0, which vanishes before a
        normalization; or "" before indices.

    Returns:
      The case.
    """
    net = Net(layer(), move, shape)
    buffers = dict(net.named_buffers())

    def batch(seed: int, rows: int) -> Batch:
        return {"x": draw(np.random.default_rng(seed), (rows, *shape))}

    def torch_loss(model: Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        y = model(batch["x"])
        return ((y - 1) ** 2 * torch.as_tensor(_ramp(y.shape[1]), dtype=y.dtype)).sum(), len(y)

    def loss_fn(params: Any, batch: Any, rng: Any, *state: Any) -> Any:
        with jax.numpy_rank_promotion("allow"):
            x = batch["x"]
            x = x * params["scale"] if move == "scale" else x + params["shift"] if move == "shift" else x
            own = {name.removeprefix("layer."): p for name, p in params.items()}
            own_state = [{name.removeprefix("layer."): s for name, s in tree.items()} for tree in state]
            y = ours(own | ({"rng": rng} if ours.__name__.endswith("dropout") else {}), x, *own_state)
            new_state = []
            if state:
                y, updated = y
                new_state = [{f"layer.{name}": s for name, s in updated.items()}]
            y = y.reshape(len(x), -1)
            total = (jnp.square(y - 1) * jnp.asarray(_ramp(y.shape[1]), y.dtype)).sum()
        return jaxtrain.Loss(total, weight=len(x)), {}, *new_state

    return Case(
        name="layer",
        torch_model=lambda: Net(layer(), move, shape),
        torch_loss=torch_loss,
        loss_fn=loss_fn,
        params_like=_like(dict(net.named_parameters())),
        names=_names(dict(net.named_parameters())),
        batch=batch,
        rows=ROWS,
        optimizer=SGD,
        clip_norm=None,
        state_like=_like(buffers) if buffers else None,
        buffers=_names(buffers) if buffers else None,
    )


def criterion(
    theirs: Callable[[Tensor, Tensor], tuple[Any, Any]],
    ours: Callable[[Any, Any], tuple[Any, Any]],
    labels: Draw = lambda rng, shape: rng.integers(5, size=shape[:1]),
    *,
    optimizer: Any = SGD,
    clip_norm: float | None = None,
    size: float = 1.0,
) -> Case:
    """Return a case of a loss, as (total, weight), of the five outputs of a linear layer and labels."""

    def batch(seed: int, rows: int) -> Batch:
        rng = np.random.default_rng(seed)
        return {"x": np.float32(size) * normal(rng, (rows, 6)), "y": labels(rng, (rows, 5))}

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        del rng
        with jax.numpy_rank_promotion("allow"):
            total, weight = ours(batch["x"] @ params["weight"].T + params["bias"], batch["y"])
        return jaxtrain.Loss(total, weight), {}

    params = dict(Linear(6, 5).named_parameters())
    return Case(
        name="criterion",
        torch_model=lambda: Linear(6, 5),
        torch_loss=lambda model, batch: theirs(model(batch["x"]), batch["y"]),
        loss_fn=loss_fn,
        params_like=_like(params),
        names=_names(params),
        batch=batch,
        rows=2 * ROWS,
        optimizer=optimizer,
        clip_norm=clip_norm,
    )


def _ramp(n: int) -> np.ndarray:
    """Weights of the outputs, exact in every precision; neighbors differ."""
    return (np.arange(n) % 5 + 1).astype(np.float32)


def _like(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: jax.ShapeDtypeStruct(tuple(x.shape), x.detach().numpy().dtype) for name, x in tensors.items()}


def _names(tensors: Mapping[str, Tensor]) -> NameTable:
    return NameTable({name: TorchParam(name) for name in tensors})
