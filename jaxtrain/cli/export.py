"""`jaxtrain export DIR --format FORMAT --out PATH`: a run's newest checkpoint for other programs."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console

from jaxtrain.cli.arguments import parse
from jaxtrain.errors import UserError
from jaxtrain.export import huggingface, onnx, stablehlo, torch_run
from jaxtrain.export.inference import Inference, Input, inference
from jaxtrain.export.verify import Verified, trials, verified
from jaxtrain.recipes import Recipe
from jaxtrain.run_folder import RunFolder
from jaxtrain.runner import read_recipe, restore_state
from jaxtrain.step import TrainState, applied_updates
from jaxtrain.tasks import Task, build


@dataclass(frozen=True)
class Export:
    """Write a run's newest checkpoint for other programs, and check on its own data that they compute the same."""

    out: Path | None = None
    """A file for torch (DIR.pt by default) and onnx (DIR.onnx), a folder for stablehlo (DIR-stablehlo) and huggingface
    (DIR-huggingface)."""
    format: Literal["torch", "onnx", "stablehlo", "huggingface"] = "torch"
    """torch: model, optimizer, scheduler and scaler, each as its load_state_dict takes it; onnx: the model, for ONNX
    Runtime; stablehlo: the model, for JAX without this project; huggingface: the model, for transformers."""


@dataclass(frozen=True)
class Restored:
    """A run, as it was at its newest checkpoint."""

    run: RunFolder
    name: str
    recipe: Recipe
    task: Task
    state: TrainState

    def inference(self) -> Inference:
        """Its model as other programs call it."""
        return inference(self.recipe, self.task, self.state.params, self.state.model_state)


def main(args: list[str]) -> int:
    """Parse, restore, write, verify, tell."""
    if any(a in ("-h", "--help") for a in args):
        args = ["DIR", *args]
    if not args or args[0].startswith("-"):
        raise UserError("which run? jaxtrain export DIR --format torch --out CKPT.pt")
    folder = Path(args[0])
    asked = parse(Export(), args[1:], f"jaxtrain export {folder}")
    write, ending = _FORMATS[asked.format]
    out = asked.out or folder.with_name(f"{folder.name}{ending}")
    run = RunFolder(folder)
    name, recipe = read_recipe(run)
    if out.exists():
        raise UserError(f"{out} is there already: choose another --out")
    if not out.absolute().parent.is_dir():
        raise UserError(f"{out.parent} is no folder: make it, or choose another --out")
    with _whole_or_not_at_all(out) as partial, Console(stderr=True).status(f"reading {folder}") as status:
        task = build(recipe)
        restored = Restored(run, name, recipe, task, restore_state(run.checkpoints, recipe, task))
        status.update(f"writing {out}, and checking that it computes the same")
        told = write(partial, restored)
    print(f"{run.path} is {out}, after {int(applied_updates(restored.state))} updates: {told}")
    if asked.format == "stablehlo":
        print(f"\n{out / 'load.py'}:\n\n{stablehlo.LOADER}", end="")
    return 0


def _torch(path: Path, restored: Restored) -> str:
    run, task = restored.run, restored.task
    if task.names is None:
        raise UserError(f"{run.path} holds a run of {restored.name}, of which PyTorch's names are not known")
    torch_run.write_run(path, run, restored.recipe, task, task.names, restored.state)
    return "model, optimizer, scheduler, scaler, step"


def _onnx(path: Path, restored: Restored) -> str:
    found = restored.inference()
    given = dict(zip(found.inputs, found.symbolic(), strict=True))
    onnx.write_onnx(path, onnx.to_onnx(found, found.weights, given, "logits"))
    run, asked = onnx.runs(path), trials(found)
    return _told(found, verified(asked, (run(*trial.inputs) for trial in asked), "the ONNX file"))


def _stablehlo(folder: Path, restored: Restored) -> str:
    found = restored.inference()
    stablehlo.write_stablehlo(folder, found, found.weights, found.symbolic())
    asked = trials(found)
    return _told(found, verified(asked, stablehlo.runs(folder, [x.inputs for x in asked]), "the program"))


def _huggingface(folder: Path, restored: Restored) -> str:
    found, task, state = restored.inference(), restored.task, restored.state
    huggingface.write_huggingface(
        folder, found.model, state.params, state.model_state, class_names=task.class_names, texts=task.texts
    )
    run, asked = huggingface.runs(folder, found), trials(found)
    return _told(found, verified(asked, (run(*trial.inputs) for trial in asked), "the folder's model"))


_FORMATS: dict[str, tuple[Callable[[Path, Restored], str], str]] = {
    "torch": (_torch, ".pt"),
    "onnx": (_onnx, ".onnx"),
    "stablehlo": (_stablehlo, "-stablehlo"),
    "huggingface": (_huggingface, "-huggingface"),
}
"""What writes each, and the ending of its name where none is given."""


def _told(found: Inference, how: Verified) -> str:
    """The signature, and how far off it is."""
    said = ", ".join(
        f"{name} {x.dtype.__name__}[{', '.join(['batch', *_sizes(x)])}]" for name, x in found.inputs.items()
    )
    return f"{said} → logits, {how}"


def _sizes(given: Input) -> list[str]:
    return [str(n) if given.fill is None else f"{given.length} ≤ {n}" for n in given.shape]


@contextlib.contextmanager
def _whole_or_not_at_all(out: Path) -> Iterator[Path]:
    """A name to write under, which becomes `out` where nothing goes wrong; otherwise nothing is left."""
    partial = out.with_name(f"{out.name}.partial")
    _remove(partial)
    try:
        yield partial
        partial.rename(out)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}): choose another --out") from error
    finally:
        _remove(partial)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
