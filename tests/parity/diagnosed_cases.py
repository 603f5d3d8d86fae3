"""Cases of one operation, and their diagnosis."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import torch

import jaxtrain
from jaxtrain import optim
from jaxtrain.interop import NameTable, TorchParam
from parity.case import Case
from parity.explain.diagnose import Diagnosis, Untrained, diagnose
from parity.explain.stages import run_stages
from parity.optimizer import Optimizer

SHAPE = (3, 6, 6)
ROWS = 4
IGNORED = -100
SGD = Optimizer("SGD", partial(torch.optim.SGD, lr=0.1), optim.sgd(0.1))


class Scaled(torch.nn.Module):
    """A function of the elementwise product of the input and `w`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.w = torch.nn.Parameter(torch.rand(SHAPE) + 0.5)

    def forward(self, batch: Any) -> Any:
        return self.function(batch["x"] * self.w, batch["label"])


def case(
    theirs: Callable[..., Any],
    ours: Callable[..., Any],
    optimizer: Any = SGD,
    clip_norm: float | None = None,
) -> Case:
    """Return a case that trains w on a weighted sum of the outputs of the functions of (x·w, labels)."""

    def batch(seed: int, rows: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        label = rng.integers(3, size=(rows, *SHAPE[1:]))
        return {"x": rng.standard_normal((rows, *SHAPE), np.float32), "label": np.where(label == 2, IGNORED, label + 1)}

    def torch_loss(model: Any, batch: Any) -> Any:
        out = model(batch)
        return (out * torch.from_numpy(weights(out.shape))).sum(), ROWS

    def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
        with jax.numpy_rank_promotion("allow"):
            out = ours(batch["x"] * params["w"], batch["label"])
            return jaxtrain.Loss((out * weights(out.shape)).sum(), weight=ROWS), {}

    return Case(
        name="tiny",
        torch_model=lambda: Scaled(theirs),
        torch_loss=torch_loss,
        loss_fn=loss_fn,
        params_like={"w": jax.ShapeDtypeStruct(SHAPE, np.float32)},
        names=NameTable({"w": TorchParam("w")}),
        batch=batch,
        rows=ROWS,
        optimizer=optimizer,
        clip_norm=clip_norm,
    )


def weights(shape: tuple[int, ...]) -> np.ndarray:
    return np.cos(np.arange(math.prod(shape), dtype=np.float64)).reshape(shape)


def diagnosed(case: Case, steps: int = 2) -> Diagnosis | Untrained | None:
    return diagnose(run_stages(case, steps=steps))
