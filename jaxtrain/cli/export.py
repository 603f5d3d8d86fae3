"""`jaxtrain export DIR --format torch --out CKPT.pt`: a run as PyTorch's `load_state_dict`s take it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxtrain.cli.arguments import parse
from jaxtrain.errors import UserError
from jaxtrain.interop.outline import new_outline, read_outline
from jaxtrain.interop.torch_file import write_torch
from jaxtrain.interop.torch_run import to_torch
from jaxtrain.loss_scale import LossScaleState, dynamic_loss_scale, state_dict
from jaxtrain.optim import no_decay
from jaxtrain.runner import RunFolder
from jaxtrain.runner.checkpoint import restore_state
from jaxtrain.runner.optimizer import expression, loss_scale
from jaxtrain.step import applied
from jaxtrain.tasks import build


@dataclass(frozen=True)
class Export:
    """Write a run's newest checkpoint for other programs."""

    out: Path | None = None
    """The file; DIR.pt by default."""
    format: Literal["torch"] = "torch"
    """torch: model, optimizer, scheduler and scaler, each as its load_state_dict takes it."""


def main(args: list[str]) -> int:
    """Parse, restore, write."""
    if any(a in ("-h", "--help") for a in args):
        args = ["DIR", *args]
    if not args or args[0].startswith("-"):
        raise UserError("which run? jaxtrain export DIR --format torch --out CKPT.pt")
    folder = Path(args[0])
    asked = parse(Export(), args[1:], f"jaxtrain export {folder}")
    out = asked.out or folder.with_name(f"{folder.name}.pt")
    run = RunFolder(folder)
    name, recipe = run.read_recipe()
    if out.exists():
        raise UserError(f"{out} is there already: choose another --out")
    task = build(recipe)
    if task.names is None:
        raise UserError(f"{run.path} holds a run of {name}, of which PyTorch's names are not known")
    state = restore_state(run.checkpoints, recipe, task)
    optimizer = expression(recipe)
    if run.torch.exists():
        outline = read_outline(run.torch)
    else:
        scaled = isinstance(state.loss_scale, LossScaleState)
        scaler = state_dict(loss_scale(recipe) or dynamic_loss_scale(), state.loss_scale) if scaled else {}
        outline = new_outline(
            optimizer,
            task.names,
            task.params,
            buffer_names=task.buffers.torch_order(task.model_state) if task.buffers else [],
            count=int(applied(state)),
            lr=recipe.lr,
            scaler=scaler,
            decays=lambda path: not no_decay(path),
        )
    write_torch(out, to_torch(state, outline, optimizer, task.names, task.buffers))
    print(f"{run.path} is {out}, after {int(applied(state))} updates: model, optimizer, scheduler, scaler, step")
    return 0
