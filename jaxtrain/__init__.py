"""Training in JAX as pure jitted step functions, proven equal to PyTorch.

The map of the package. Each line may import only from the lines above it (`tests/test_architecture.py`):

    errors, fields, flags   user errors; types and bounds of settings; settings as flags of a command line
    paths                   parameter paths and predicates on them
    interrupts              Ctrl-C that no callback drops
    records                 fields of files that nobody read
    cases                   the parity case of an imported model, which parity provides
    user_cache              the user's cache folder
    user_file               imports a user's Python file
    folder_files            files of a folder that may come from somebody else: no links followed
    pages                   one page, one chart and one table for every report: HTML and SVG
    compilation             compilation without the persistent cache
    threefry                random bits by operations that any kernel has
    program                 a JAX program as a value: its equations, and functions that rewrite them
    passes                  rewrites of programs: precision, fp8, remat, meshes, what XLA compiles better
    cpu                     what exists for XLA:CPU alone: products, workspace, host memory
    step                    the algorithm: train_step, state, accumulation, loss scale, clipping, EMA
    optim                   PyTorch's optimizers, parameter groups and schedules
    data                    sources, packing, tokenizers, batches
    interop                 PyTorch checkpoints, optimizers and schedulers, in and out
    losses                  PyTorch's losses and subgradients
    models                  one file or folder a family
    cost                    FLOPs, roofline, memory, communication
    distributed             meshes, sharding, processes
    run                     Recipe and Task: what a user's own run and a built-in one both are
    torch_internals         the private names of PyTorch in use, each with a probe
    torch_import            any `torch.nn.Module` as a pure function
    recipes                 the built-in runs
    profile                 profiler traces and estimates
    debug                   the first non-finite value; doctor
    run_folder              paths and config.json of a run
    observe                 console, metrics, report, trackers
    runner                  fit: loop, checkpoints, guards, signals
    planning                what fits in memory; scaling over devices
    export                  ONNX, StableHLO, Hugging Face, PyTorch
    port                    a PyTorch training script, unmodified, as a recipe
    cli                     the commands
    labs                    what is proved and not yet earned a place: pipeline axis, layer scales, process watch

Public names are imported on first use, so that the commands start quickly.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtrain.cpu.host_memory import keep_host_memory
    from jaxtrain.errors import UserError
    from jaxtrain.labs.loss_scales import per_layer_loss_scale
    from jaxtrain.optim import EffectiveBatch
    from jaxtrain.passes import Fp8, Policy, autocast, autocast_disabled, block, hook, kernel
    from jaxtrain.run import Audio, Image, Initial, Predictions, Recipe, Table, Task, Text
    from jaxtrain.runner import fit
    from jaxtrain.step import (
        Loss,
        TrainState,
        TrainStep,
        dynamic_loss_scale,
        eval_step,
        leaf_name,
        precision_losses,
        static_loss_scale,
        train_step,
    )
    from jaxtrain.torch_import import ImportedModel, SavedModel, from_torch, load_imported

__version__ = "0.1.0"

__all__ = [
    "Audio",
    "EffectiveBatch",
    "Fp8",
    "Image",
    "ImportedModel",
    "Initial",
    "Loss",
    "Policy",
    "Predictions",
    "Recipe",
    "SavedModel",
    "Table",
    "Task",
    "Text",
    "TrainState",
    "TrainStep",
    "UserError",
    "autocast",
    "autocast_disabled",
    "block",
    "dynamic_loss_scale",
    "eval_step",
    "fit",
    "from_torch",
    "hook",
    "keep_host_memory",
    "kernel",
    "leaf_name",
    "load_imported",
    "per_layer_loss_scale",
    "precision_losses",
    "static_loss_scale",
    "train_step",
]

_MODULES = {
    "cpu.host_memory": ("keep_host_memory",),
    "errors": ("UserError",),
    "labs.loss_scales": ("per_layer_loss_scale",),
    "optim": ("EffectiveBatch",),
    "runner": ("fit",),
    "run": ("Audio", "Image", "Initial", "Predictions", "Recipe", "Table", "Task", "Text"),
    "step": (
        *("Loss", "TrainState", "TrainStep", "dynamic_loss_scale"),
        *("eval_step", "leaf_name", "precision_losses", "static_loss_scale", "train_step"),
    ),
    "torch_import": ("ImportedModel", "SavedModel", "from_torch", "load_imported"),
    "passes": ("Fp8", "Policy", "autocast", "autocast_disabled", "block", "hook", "kernel"),
}


def __getattr__(name: str) -> Any:
    """Import a public name, or a module of this package (PEP 562)."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"jaxtrain.{module}"), name)
    try:
        return importlib.import_module(f"jaxtrain.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"jaxtrain.{name}":
            raise
        raise AttributeError(f"module 'jaxtrain' has no attribute {name!r}") from None
