"""An optimizer said twice: PyTorch's, and the gradient transformation that is to be it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # listing the cases imports neither framework
    import optax
    import torch

    Named = Iterable[tuple[str, torch.nn.Parameter]]
    TorchOptimizer = torch.optim.Optimizer

ADAM_MOMENTS = {"exp_avg": "mu", "exp_avg_sq": "nu"}


@dataclass(frozen=True)
class Optimizer:
    """`torch(params)` makes PyTorch's optimizer of (name, parameter) pairs, which PyTorch takes as they are;
    `scheduler(optimizer)` its scheduler, which is stepped after every applied update. `jax` is the transformation, its
    schedule inside. `moments`: what a parameter's state is called in PyTorch's `optimizer.state`, and the field of
    `jax`'s state that is to hold it.
    """

    name: str
    torch: "Callable[[Named], TorchOptimizer]"
    jax: "optax.GradientTransformation"
    moments: Mapping[str, str] = field(default_factory=dict)
    scheduler: "Callable[[TorchOptimizer], Any] | None" = None


@dataclass(frozen=True)
class AdamW:
    """`torch.optim.AdamW` and ours, with the same hyperparameters, all of them said: the defaults differ."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2

    name = "AdamW"
    moments = ADAM_MOMENTS
    scheduler = None

    def torch(self, params: "Named") -> "TorchOptimizer":
        """PyTorch's."""
        from torch.optim import AdamW

        return AdamW(params, **asdict(self))

    @property
    def jax(self) -> "optax.GradientTransformation":
        """Ours."""
        from jaxtrain import optim

        return optim.adamw(self.lr, *self.betas, self.eps, self.weight_decay)
