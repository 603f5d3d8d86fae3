"""The files of a ported script: `model.py`, `run.py`, and their arrays."""

import ast
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import torch

from jaxtrain.interop import live_expression
from jaxtrain.optim import Call, Expression, format_expression
from jaxtrain.port import shapes
from jaxtrain.port.refused import refused_at
from jaxtrain.port.replay import recorded_module
from jaxtrain.port.rerun import new_optimizer, set_start
from jaxtrain.port.understand import Training
from jaxtrain.torch_import import ImportedModel, Line, from_torch


@dataclass(frozen=True, eq=False)
class Ported:
    """A script as a model of JAX, with the settings of its run.

    Attributes:
      training: What the script is.
      module: Its recorded program.
      model: The same in JAX.
      others: The same for batches of other shapes, with these.
      optimizer: Its optimizer, with a schedule of updates or epochs.
    """

    training: Training
    module: torch.nn.Module
    model: ImportedModel
    others: tuple[tuple[str, ImportedModel], ...]
    optimizer: Expression


def ported(training: Training) -> Ported:
    """Import the program of a script, with the parameters that it starts with.

    Raises:
      UserError: The program cannot be imported; the message names the script's line.
    """
    set_start(training)
    models = [(shapes(batch), from_torch(module, batch)) for module, batch in _examples(training)]
    module, model = program_module(training, 0), models[0][1]
    return Ported(training, module, model, tuple(models[1:]), _optimizer(training, module, model))


def _examples(training: Training) -> Iterator[tuple[torch.nn.Module, dict[str, torch.Tensor]]]:
    """Yield the program and a micro-batch of each shape."""
    for i, (backward, inputs) in enumerate(training.programs):
        yield program_module(training, i), inputs.batch_of(backward)


def program_module(training: Training, number: int) -> torch.nn.Module:
    """Return the program of batches of a shape as a module, by the number of the shape."""
    backward, inputs = training.programs[number]
    module = recorded_module(backward.program, training.modules, inputs, training.first_carried())
    return module.train()


def _optimizer(training: Training, module: torch.nn.Module, model: ImportedModel) -> Expression:
    names = {id(p): name for name, p in module.named_parameters()}
    groups = training.optimizer.param_groups
    given = {names[id(p)] for group in groups for p in group["params"]}
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    is_whole = len(groups) == 1 and trained <= given
    rates = () if training.cut is None else training.cut.rates
    theirs = new_optimizer(training) if rates else training.optimizer
    found = live_expression(theirs, training.scheduler, model=module, names=None if is_whole else model.names)
    calls = [found] if isinstance(found, Call) else [*found.values()]
    for i, call in enumerate(calls):
        for name, value in call.arguments.items():
            if name == "learning_rate" and rates:
                call.arguments[name] = Call("rate_of_metric", {"name": rates[i]})  # type: ignore[index]
            elif isinstance(value, Call) and training.is_by_epoch:
                call.arguments[name] = Call("held", {"schedule": value, "every": training.epoch})  # type: ignore[index]
    return found


def write(result: Ported, script: Path, args: Sequence[str], folder: Path) -> list[Path]:
    """Write the files of a ported script to a folder.

    Args:
      result: The script.
      script: Its file.
      args: Its arguments.
      folder: A folder that exists.

    Returns:
      The files.
    """
    from safetensors.flax import save_file

    training = result.training
    written = _save_source(result.model, folder)
    of_shapes = {}
    for i, (shape, model) in enumerate(result.others, 2):
        files = _save_source(model, folder / f"shape_{i}")
        if any(_content(file) != _content(folder / file.name) for file in files):
            of_shapes[shape] = f"shape_{i}"
            (folder / f"shape_{i}" / "params.safetensors").unlink()  # those of the first one
        else:
            shutil.rmtree(folder / f"shape_{i}")
    text = recipe_source(result, script, args, of_shapes)
    if result.model.state is not None:
        save_file({name: jnp.asarray(x) for name, x in result.model.state.items()}, folder / "state.safetensors")
        written.append(folder / "state.safetensors")
    if training.cut is not None:
        (folder / INPUTS).write_text(training.cut.as_json(), encoding="utf-8")
        written.append(folder / INPUTS)
    (folder / "run.py").write_text(text, encoding="utf-8")
    return [folder / "run.py", *written]


def _save_source(model: ImportedModel, folder: Path) -> list[Path]:
    folder.mkdir(exist_ok=True)
    files: list[Path] = model.save_source(folder / "model.py", evaluation=not model.draws_in_evaluation)
    return files


def _content(file: Path) -> Any:
    """Return what a file says, of code without docstrings, which name shapes."""
    if file.suffix != ".py" or not file.exists():
        return file.read_bytes() if file.exists() else None
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)


INPUTS = "inputs.json"
"""File of what a script gives to its programs."""


def recipe_source(result: Ported, script: Path, args: Sequence[str], of_shapes: Mapping[str, str]) -> str:
    """Return the text of `run.py`.

    Args:
      result: The script.
      script: Its file.
      args: Its arguments.
      of_shapes: Folders of the models for batches of other shapes.
    """
    training, has_state = result.training, result.model.state is not None
    command = " ".join([script.name, *args])
    settings = "\n".join(_field(name, *setting) for name, setting in _settings(result).items())
    takes, gives = (", model_state", "loss, model_state") if has_state else ("", "loss, _")
    state = ', port.arrays(HERE / "state.safetensors")' if has_state else ""
    weight = "1" if training.accumulate == 1 else f"1 / {training.accumulate}"
    rates = dict.fromkeys(() if training.cut is None else training.cut.rates)
    metrics = ", ".join(f'"{name}": batch["{name}"][0]' for name in rates)
    returned = f"jt.Loss(loss, {weight}), {{{metrics}}}" + (", model_state" if has_state else "")
    keys = () if training.loader is None else _batch_keys(training, training.loader)
    if training.cut is not None:
        data, batch = f'port.ScriptBatches(SCRIPT, ARGS, HERE / "{INPUTS}")', "port.micro_batch(batch)"
    else:
        batch = "batch"
        loader = f"port.script_loader(SCRIPT, ARGS, {training.loader})"
        data = f"port.ScriptRows({loader}, {keys!r})" if training.accumulate > 1 else loader
    passed = f"params, {batch}, rng" + (", model_state" if has_state else "")
    frozen = sorted(name for name in result.model.params if result.model.frozen(name))
    fields = "".join(
        [
            f"\n            batch_keys={keys!r}," if keys and training.accumulate == 1 else "",
            f"\n            frozen={set(frozen)!r}.__contains__," if frozen else "",
        ]
    )
    line = training.programs[0][0].line
    pairs = ", ".join(f'"{shape}": HERE / "{name}" / "model.py"' for shape, name in of_shapes.items())
    others = f", {{{pairs}}}" if pairs else ""
    return f'''"""{command} as a recipe, written by `jaxtrain port {command}`.

    jaxtrain train run.py::Run

The loss is that of {Path(line.file).name}:{line.number}, in `model.py`; the data are the script's own.
`proof.html` compares both.
"""

from dataclasses import dataclass
from pathlib import Path

import jaxtrain as jt
from jaxtrain import port

HERE = Path(__file__).parent
SCRIPT = Path({str(script.resolve())!r})
ARGS = {[*args]!r}

model = port.model(HERE / "model.py"{others})


def loss_fn(params, batch, rng{takes}):
    """Return the loss of a micro-batch; the gradients of the {training.accumulate} of an update are added."""
    {gives} = model({passed})
    return {returned}


@dataclass(frozen=True, kw_only=True)
class Run(jt.Recipe):
    """The run of {script.name}."""

{settings}

    def task(self) -> jt.Task:
        """Return the script's data, model and loss."""
        return jt.Task(
            init=lambda: jt.Initial(port.arrays(HERE / "params.safetensors"){state}),
            loss_fn=loss_fn,
            train={data},{fields}
        )
'''


def _field(name: str, kind: str, value: Any, comment: str) -> str:
    """Return the lines of a setting: a long text in parts."""
    text = repr(value)
    if isinstance(value, str) and len(text) > _WIDTH:
        parts = [""]
        for word in value.split(" "):
            if len(parts[-1]) + len(word) > _WIDTH:
                parts.append("")
            parts[-1] += f"{word} "
        parts[-1] = parts[-1][:-1]
        text = "\n        ".join(["(", *map(repr, parts)]) + "\n    )"
    return (f"    # {comment}\n" if comment else "") + f"    {name}: {kind} = {text}"


_WIDTH = 100
"""Characters of a line of a long text."""


def _settings(result: Ported) -> dict[str, tuple[str, Any, str]]:
    """Return the settings of the recipe: type, value, and the script's line."""
    training = result.training
    recording = training.recording
    steps, data = _length(training)
    optimizer = _at(recording.optimizers[id(training.optimizer)])
    schedule = "" if training.scheduler is None else f", {_at(recording.schedulers[id(training.scheduler)])}"
    found: dict[str, tuple[str, Any, str]] = {
        "steps": ("int", *steps),
        "batch_size": ("int", training.rows * training.accumulate, data),
        "optimizer": ("str", format_expression(result.optimizer), optimizer + schedule),
        "clip_norm": ("float | None", None, "")
        if training.clip is None
        else ("float | None", training.clip.bound, _at(training.clip.line)),
    }
    if training.accumulate > 1:
        found["accumulate"] = ("int", training.accumulate, "")
    if training.autocast is not None:
        found["precision"] = ("str", PRECISIONS[training.autocast], _at(_first_autocast(training)))
    if (scale := _loss_scale(training)) is not None:
        found["loss_scale"] = ("str | None", scale, "")
    if len(training.programs) > 1:
        found["allow_recompile"] = ("int", len(training.programs) - 1, "batches differ in size")
    return found


def _length(training: Training) -> tuple[tuple[int, str], str]:
    """Return how many updates the script makes, with a comment, and where its data come from."""
    recording = training.recording
    if training.loader is None:
        length = "as in the script" if recording.is_over else "choose as many as you need"
        return (len(recording.updates), length), _at(training.programs[0][0].line)
    passes = sum(update.passes.count(training.loader) for update in (*recording.updates, recording.rest))
    epochs = passes if recording.is_over else 1
    length = f"{epochs} epochs" if recording.is_over else "an epoch; choose as many as you need"
    return (epochs * training.epoch, length), _at(recording.loaders[training.loader].line)


PRECISIONS = {None: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""The precision of a recipe, by the dtype of autocast."""


def _first_autocast(training: Training) -> Line:
    calls = training.programs[0][0].program.calls
    return next(call.line for call in calls if call.ambient.autocast is not None)


def _loss_scale(training: Training) -> str | None:
    if not training.is_scaled:
        return "static_loss_scale(scale=1.0)" if training.autocast == torch.float16 else None
    scaler, first = training.recording.scaler, training.recording.updates[0].scale
    given = {
        "init_scale": first,
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
    }
    return str(Call("dynamic_loss_scale", given))


def _at(line: Line) -> str:
    return f"{Path(line.file).name}:{line.number}"


def _batch_keys(training: Training, loader: int) -> tuple[str, ...]:
    """Return names for the values of a batch that is a tuple; none for those of a dict."""
    line = training.recording.loaders[loader].line
    batch = training.recording.batches[loader]
    names = {leaf.key: name for _, inputs in training.programs for name, leaf in inputs.leaves.items()}
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else [batch]
    if not all(isinstance(x, torch.Tensor) for x in values):
        raise refused_at("a batch has values that are no tensors", line, "return a tuple or a dict of tensors")
    if isinstance(batch, Mapping):
        if other := [name for key, name in names.items() if key != name]:
            raise refused_at(f"the tensor {other[0]} of a batch has another key", line, "use its key as a name")
        return ()
    if isinstance(batch, torch.Tensor):
        return (names[None],)
    return tuple(names.get(i, f"unused_{i}") for i in range(len(batch)))
