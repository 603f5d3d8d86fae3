"""A PyTorch training script, unmodified, as a recipe: `jaxtrain port SCRIPT`.

script      runs the script and records its updates
recorder    records the calls between a batch and `backward`
calls       these calls, and the program of a loss
short_passes  passes over DataLoaders that show how an epoch ends
recording   what a recording contains
kept_files  files that exist are kept meanwhile
clamps      parameters that are clamped by hand after an update
joint       several optimizers that step together
schedules   how the settings of an optimizer change
clips       how gradients are clipped
training    a training loop: programs, optimizers and their settings
understand  what the script is, as a training; or a refusal with its line
inputs      where the tensors come from that a program reads
interval_program  the program of an interval from where the model begins
cut         what all programs of a script have in common, from where the model begins
find_cut    the same, found in a recording
first_states  states that are None in the first update
turns       several optimizers that update in turn
same_program  whether updates compute one program
refused     scripts that cannot be carried over
replay      a recorded program as a module
rerun       the recorded updates again, to the bit
validation  the data that the script evaluates its model on
ported      the script as a model of JAX
any_size    a model for batches of several sizes, as of texts of many lengths
recipe_source  the text of the recipe
write       the recipe and the model as files
data        the script's own DataLoader or batches, for the recipe
batch_shapes  the shapes of batches that a written model is for
windows     what the script's updates read, as the run takes it
feeder      the process that runs the script as the source of these batches
long_run    the process that runs the script for many updates, to be compared with those of the run

Only this file, `data` and `batch_shapes` are imported by the files that are written; the others need PyTorch.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.port.batch_shapes import load_shapes, shapes
from jaxtrain.port.data import ScriptBatches, ScriptRows, micro_batch, script_loader, turn, unless
from jaxtrain.torch_import import pytorchs_promotion
from jaxtrain.user_file import import_file

__all__ = [
    "ScriptBatches",
    "ScriptRows",
    "any_size",
    "arrays",
    "batch_shapes",
    "clamps",
    "cut",
    "data",
    "fed",
    "joint",
    "kept_files",
    "long_run",
    "micro_batch",
    "model",
    "ported",
    "recipe_source",
    "recording",
    "rerun",
    "script",
    "script_loader",
    "training",
    "turn",
    "understand",
    "unless",
    "validation",
    "write",
]


def arrays(path: Path) -> dict[str, Any]:
    """Return the arrays of a safetensors file, by name.

    Args:
      path: The file.
    """
    from safetensors.flax import load_file

    found: dict[str, Any] = load_file(path)
    return found


def model(folder: Path) -> Callable[..., Any]:
    """Return the model of a folder that `jaxtrain port` has written, with PyTorch's broadcasting and promotion.

    A written model is that of batches of its shapes (`jaxtrain.port.batch_shapes`).

    Args:
      folder: The folder.

    Returns:
      The function `model` of the file for the shapes of a batch; it raises `UserError` for other shapes.
    """
    known = [(its, import_file(folder / file).model) for its, file in load_shapes(folder)]

    @functools.wraps(known[0][1])
    def promoted(params: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        function = next((own for its, own in known if its.has(batch)), None)
        if function is None:
            raise UserError(
                f"a batch has the shapes {shapes(batch)}, and the models of {folder} are for"
                f" {' and for '.join(str(its) for its, _ in known)}:"
                " give all batches the same shapes, or record more of them by jaxtrain port --updates"
            )
        with pytorchs_promotion():
            return function(params, batch, *args, **kwargs)

    return promoted
