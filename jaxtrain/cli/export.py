"""`jaxtrain export DIR --format FORMAT --out PATH`: write a run's newest checkpoint for other programs."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from jaxtrain.data.finetuning import ModelTokenizer
from jaxtrain.errors import UserError, escape_unprintable
from jaxtrain.export import huggingface, onnx, stablehlo, torch_checkpoint
from jaxtrain.export.inference import Inference, build_inference
from jaxtrain.export.model_card import ModelCard, auto_class
from jaxtrain.export.predict import predict_inference
from jaxtrain.export.transformers_logits import missing_packages, transformers_logits
from jaxtrain.export.verify import ALIKE, Trial, Verification, make_trials, verify
from jaxtrain.flags import Flag, parse
from jaxtrain.models import stored_dtype
from jaxtrain.run import Input, Recipe, Task
from jaxtrain.run_folder import RunFolder
from jaxtrain.runner import read_recipe, restore_state
from jaxtrain.step import TrainState, applied_updates, averaged


@dataclass(frozen=True)
class Export:
    """Export a run's newest checkpoint and verify on the run's data that the export computes the same outputs."""

    folder: Annotated[str, Flag(positional=True, metavar="DIR")] = ""
    """The run's folder."""
    out: Path | None = None
    """File for torch (default DIR.pt) and onnx (DIR.onnx), folder for stablehlo (DIR-stablehlo), huggingface
    (DIR-huggingface) and peft (DIR-peft)."""
    format: Literal["torch", "onnx", "stablehlo", "huggingface", "peft"] = "torch"
    """torch: state dicts of model, optimizer, scheduler and scaler; onnx: the model for ONNX Runtime; stablehlo: the
    model for JAX without jaxtrain; huggingface: the model for transformers, with adapters merged; peft: the adapters of
    a fine-tuned model. All but torch, which continues a run, export the moving average of the parameters if there is
    one."""
    dtype: Literal["stored", "float32", "bfloat16", "float16"] = "stored"
    """Dtype of the weights of huggingface; stored is that of the model that was fine-tuned, or else of the run."""


@dataclass(frozen=True)
class Restored:
    """A run at its newest checkpoint."""

    run: RunFolder
    name: str
    recipe: Recipe
    task: Task
    state: TrainState
    out: Path
    """Where the export will be."""
    dtype: Any = None
    """Dtype of the exported parameters; None for their own."""

    @cached_property
    def params(self) -> Any:
        """The parameters of the task's model: averaged if they are, with adapters merged."""
        params = averaged(self.state).params
        params = params if self.task.exported is None else self.task.exported(params)
        return params if self.dtype is None else jax.tree.map(self._converted, params)

    def _converted(self, x: Any) -> Any:
        return x.astype(self.dtype) if jnp.issubdtype(x.dtype, np.floating) else x

    def write_card(self, folder: Path, *, adapters: bool = False) -> None:
        """Write the model card into an exported folder."""
        described = ModelCard(folder, self.out, self.run, self.name, self.recipe, self.task, adapters=adapters)
        described.write(int(self.state.step))

    def inference(self) -> Inference:
        """Return the model as a function for other programs."""
        state = averaged(self.state)
        if (signature := self.task.signature) is not None:
            return build_inference(self.task, signature, self.params, state.model_state)
        return predict_inference(self.recipe, self.task, state.params, state.model_state)


def main(args: list[str]) -> int:
    """Parse, restore, write, verify, print."""
    options = parse(Export(), args, "jaxtrain export")
    folder = Path(options.folder)
    write, ending = _FORMATS[options.format]
    out = options.out or folder.with_name(f"{folder.name}{ending}")
    run = RunFolder(folder)
    name, recipe = read_recipe(run)
    if out.exists():
        raise UserError(f"{out} already exists: choose another --out")
    if not out.absolute().parent.is_dir():
        raise UserError(f"{out.parent} is not a folder: create it or choose another --out")
    with _atomic_output(out) as partial, Console(stderr=True).status(f"reading {folder}") as status:
        task = recipe.task()
        dtype = _dtype(options, task)
        restored = Restored(run, name, recipe, task, restore_state(run.checkpoints, recipe, task), out, dtype)
        status.update(f"writing and verifying {out}")
        summary = write(partial, restored)
    where = escape_unprintable(f"{run.path} to {out}")
    print(f"exported {where} after {int(applied_updates(restored.state))} updates: {summary}")
    if options.format == "stablehlo":
        print(f"\n{out / 'load.py'}:\n\n{stablehlo.LOADER}", end="")
    return 0


def _dtype(options: Export, task: Task) -> Any:
    """Return the dtype to export parameters in; None for their own."""
    if options.dtype == "stored":
        is_converted = options.format == "huggingface" and task.pretrained is not None
        return stored_dtype(task.pretrained) if is_converted and task.pretrained is not None else None
    if options.format != "huggingface":
        raise UserError(f"--dtype {options.dtype} is for --format huggingface: omit it")
    return jnp.dtype(options.dtype)


def _torch(path: Path, restored: Restored) -> str:
    run, task = restored.run, restored.task
    if task.names is None:
        raise UserError(
            f"{run.path} holds a run of {restored.name}, which has no PyTorch parameter names: define Task.names, or "
            "use another format"
        )
    torch_checkpoint.write_run(path, run, restored.recipe, task, task.names, restored.state)
    return "model, optimizer, scheduler, scaler, step"


def _onnx(path: Path, restored: Restored) -> str:
    found = restored.inference()
    symbolic = dict(zip(found.inputs, found.symbolic(), strict=True))
    onnx.write_onnx(path, onnx.to_onnx(found, found.weights, symbolic, "logits"))
    run, inputs = onnx.load_onnx(path), make_trials(found)
    return _summary(found, verify(inputs, (run(*trial.inputs) for trial in inputs), "the ONNX file"))


def _stablehlo(folder: Path, restored: Restored) -> str:
    found = restored.inference()
    stablehlo.write_stablehlo(folder, found, found.weights, found.symbolic())
    inputs = make_trials(found)
    return _summary(found, verify(inputs, stablehlo.run_stablehlo(folder, [x.inputs for x in inputs]), "the program"))


def _huggingface(folder: Path, restored: Restored) -> str:
    found, task, state = restored.inference(), restored.task, averaged(restored.state)
    huggingface.write_huggingface(
        folder,
        found.model,
        restored.params,
        state.model_state,
        class_names=task.class_names,
        texts=task.texts,
        save=task.save_pretrained,
    )
    restored.write_card(folder)
    run, inputs = huggingface.load_huggingface(folder, found), make_trials(found)
    summary = _summary(found, verify(inputs, (run(*trial.inputs) for trial in inputs), "the folder's model"))
    if task.pretrained is None or task.save_pretrained is not None or auto_class(folder) != "CausalLM":
        return summary
    if missing := missing_packages(adapters=False):
        return f"{summary}\nnot compared in transformers: pip install {' '.join(missing)}"
    return f"{summary}\nin transformers: {_in_transformers(inputs, folder, None)}"


def _peft(folder: Path, restored: Restored) -> str:
    """Write the adapters, and compare the logits of `peft` with those of the run on the base model as it is stored."""
    task, params = restored.task, averaged(restored.state).params
    if task.save_adapters is None:
        raise UserError(
            f"{restored.run.path} holds a run of {restored.name} without adapters: use --format huggingface"
        )
    task.save_adapters(folder, params)
    if isinstance(task.texts, ModelTokenizer):
        huggingface.copy_texts(task.texts, folder)
    restored.write_card(folder, adapters=True)
    if task.signature is None or task.on_stored_base is None or task.pretrained is None:
        return "adapters for peft, whose logits were not compared"
    if missing := missing_packages(adapters=True):
        return f"adapters for peft, whose logits were not compared: pip install {' '.join(missing)}"
    found = build_inference(task, task.signature, task.on_stored_base(params), None)
    return f"adapters for peft, {_in_transformers(make_trials(found), task.pretrained, folder)}"


def _in_transformers(trials: list[Trial], model: Path, adapters: Path | None) -> Verification:
    """Compare the logits of a folder in `transformers`, with adapters in `peft`, with those of the run."""
    # The kernels of PyTorch round otherwise.
    trials = [replace(trial, least_bound=ALIKE) for trial in trials]
    logits = transformers_logits(model, adapters, [trial.inputs[0] for trial in trials])
    return verify(trials, logits, "the model in transformers")


_FORMATS: dict[str, tuple[Callable[[Path, Restored], str], str]] = {
    "torch": (_torch, ".pt"),
    "onnx": (_onnx, ".onnx"),
    "stablehlo": (_stablehlo, "-stablehlo"),
    "huggingface": (_huggingface, "-huggingface"),
    "peft": (_peft, "-peft"),
}
"""The function that writes each format, and the ending of its default name."""


def _summary(found: Inference, result: Verification) -> str:
    """Return the exported function's signature and its difference from the run's outputs."""
    signature = ", ".join(
        f"{name} {x.dtype.__name__}[{', '.join([str(found.batch or 'batch'), *_sizes(x)])}]"
        for name, x in found.inputs.items()
    )
    return f"{signature} → logits, {result}" + (f"\n{found.note}" if found.note else "")


def _sizes(x: Input) -> list[str]:
    return [str(n) if x.fill is None else f"{x.length} ≤ {n}" for n in x.shape]


@contextlib.contextmanager
def _atomic_output(out: Path) -> Iterator[Path]:
    """Yield a temporary path that is renamed to `out` on success and removed on failure."""
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
