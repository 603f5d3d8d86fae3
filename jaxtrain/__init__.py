"""Training in JAX as pure jitted step functions, proven equal to PyTorch.

Nothing is imported before it is asked for: a command answers at once, and `keep_host_memory` comes before any thread.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtrain.batch_size import EffectiveBatch
    from jaxtrain.errors import UserError
    from jaxtrain.hooks import hook
    from jaxtrain.host_memory import keep_host_memory
    from jaxtrain.loss_scale import dynamic_loss_scale, static_loss_scale
    from jaxtrain.nonfinite import leaf_name
    from jaxtrain.objective import Loss
    from jaxtrain.precision import Policy, autocast, autocast_disabled, kernel
    from jaxtrain.remat import block
    from jaxtrain.step import TrainState, TrainStep, eval_step, train_step

__version__ = "0.1.0"

__all__ = [
    "EffectiveBatch",
    "Loss",
    "Policy",
    "TrainState",
    "TrainStep",
    "UserError",
    "autocast",
    "autocast_disabled",
    "block",
    "dynamic_loss_scale",
    "eval_step",
    "hook",
    "keep_host_memory",
    "kernel",
    "leaf_name",
    "static_loss_scale",
    "train_step",
]

_MODULES = {
    "batch_size": ("EffectiveBatch",),
    "errors": ("UserError",),
    "hooks": ("hook",),
    "host_memory": ("keep_host_memory",),
    "loss_scale": ("dynamic_loss_scale", "static_loss_scale"),
    "nonfinite": ("leaf_name",),
    "objective": ("Loss",),
    "precision": ("Policy", "autocast", "autocast_disabled", "kernel"),
    "remat": ("block",),
    "step": ("TrainState", "TrainStep", "eval_step", "train_step"),
}


def __getattr__(name: str) -> Any:
    """A public name, or a module of this package (PEP 562)."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"jaxtrain.{module}"), name)
    try:
        return importlib.import_module(f"jaxtrain.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"jaxtrain.{name}":
            raise
        raise AttributeError(f"jaxtrain has no {name!r}") from None
