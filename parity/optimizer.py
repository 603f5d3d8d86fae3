"""An optimizer in both frameworks: PyTorch's and the gradient transformation that must equal it."""

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
    """An optimizer of PyTorch and its JAX counterpart.

    Attributes:
      name: Name in reports.
      torch: From (name, parameter) pairs to PyTorch's optimizer.
      jax: The gradient transformation, with its schedule.
      moments: From the name of a parameter's state in PyTorch's `optimizer.state` to the field of the state of `jax`
        that must equal it.
      scheduler: From PyTorch's optimizer to its scheduler, which steps after every applied update; None for none.
      by_path: Whether `torch` also takes a mapping from the parameters' names to their paths in JAX, by which
        parameter groups may be defined.
    """

    name: str
    torch: "Callable[..., TorchOptimizer]"
    jax: "optax.GradientTransformation"
    moments: Mapping[str, str] = field(default_factory=dict)
    scheduler: "Callable[[TorchOptimizer], Any] | None" = None
    by_path: bool = False


@dataclass(frozen=True)
class AdamW:
    """`torch.optim.AdamW` and `jaxtrain.optim.adamw` with the same hyperparameters.

    Every hyperparameter is passed to both, since the defaults of the frameworks differ.

    Attributes:
      lr: Learning rate.
      betas: Decay rates of the moments.
      eps: Added to the denominator.
      weight_decay: Decoupled weight decay.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2

    name = "AdamW"
    moments = ADAM_MOMENTS
    scheduler = None

    def torch(self, params: "Named") -> "TorchOptimizer":
        """Return PyTorch's optimizer."""
        from torch.optim import AdamW

        return AdamW(params, **asdict(self))

    @property
    def jax(self) -> "optax.GradientTransformation":
        """The gradient transformation of JAX."""
        from jaxtrain import optim

        return optim.adamw(self.lr, *self.betas, self.eps, self.weight_decay)
