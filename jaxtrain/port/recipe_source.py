"""The text of `run.py`: a ported script as a recipe, whose settings name the script's lines."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from jaxtrain.optim import Call, format_expression
from jaxtrain.port.cut import PADDING
from jaxtrain.port.joint import parts_of
from jaxtrain.port.ported import Ported
from jaxtrain.port.refused import refused_at
from jaxtrain.port.training import Training
from jaxtrain.torch_import import Line

INPUTS = "inputs.json"
"""File of what a script gives to its programs."""


def recipe_source(result: Ported, script: Path, args: Sequence[str]) -> str:
    """Return the text of `run.py`.

    Args:
      result: The script.
      script: Its file.
      args: Its arguments.
    """
    command = " ".join([script.name if script.is_file() else f"-m {script.name}", *args])
    line = result.training.programs[0][0].line
    folder = f"FOLDER = Path({str(Path.cwd())!r})\n"
    state = ', port.arrays(HERE / "state.safetensors")' if result.state() else ""
    settings = "\n".join(_field(name, *setting) for name, setting in _settings(result).items())
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
{folder}ARGS = {[*args]!r}

{_model_source(result)}


{_loss_source(result)}


@dataclass(frozen=True, kw_only=True)
class Run(jt.Recipe):
    """The run of {script.name}."""

{settings}

    def task(self) -> jt.Task:
        """Return the script's data, model and loss."""
        return jt.Task(
            init=lambda: jt.Initial(port.arrays(HERE / "params.safetensors"){state}),
            loss_fn=loss_fn,
            train={_data_source(result)}
        )
'''


def _model_source(result: Ported) -> str:
    """Return the text of the model, or of the models of turns."""
    if not result.turns:
        return "model = port.model(HERE)"
    others = [f'port.model(HERE / "{turn_folder(i)}")' for i in range(1, len(result.turns))]
    return f"models = [{', '.join(['port.model(HERE)', *others])}]"


def turn_folder(i: int) -> str:
    """Return the name of the folder of a turn after the first one, whose number is 0."""
    return f"turn_{i + 1}"


def _loss_source(result: Ported) -> str:
    """Return the text of the loss function."""
    training, has_state, k = result.training, bool(result.state()), result.training.accumulate
    found = training.cut
    of_window = "" if k == 1 else f"; the gradients of the {k} of an update are added"
    lines = [f'"""Return the loss of a micro-batch{of_window}."""']
    if found is not None:
        lines.append("batch = port.micro_batch(batch)")
    if result.turns:
        lines.append("turn, batch = port.turn(batch)")
    metrics = {"turn": "turn"} if result.turns else {}
    metrics |= _metrics_of_rates(training)
    given = ", ".join(f'"{name}": {value}' for name, value in metrics.items())
    lines += [f"metrics = {{{given}}}"] * bool(metrics)
    if found is not None and found.window:
        lines.append(f'is_padding = batch.pop("{PADDING}")')
    model = "models[turn]" if result.turns else "model"
    lines.append(
        f"loss, {'new_state' if has_state else '_'} = {model}(params, batch, rng{', model_state' * has_state})"
    )
    if found is not None and found.window:
        lines.append("loss = port.unless(is_padding, loss, 0)")
        lines += ["new_state = port.unless(is_padding, new_state, model_state)"] * has_state
    weight = "1" if k == 1 else f"1 / {k}"
    result_of_loss = "metrics" if metrics else "{}"
    lines.append(f"return jt.Loss(loss, {weight}), {result_of_loss}{', new_state' * has_state}")
    return f"def loss_fn(params, batch, rng{', model_state' * has_state}):\n    " + "\n    ".join(lines)


def _metrics_of_rates(training: Training) -> dict[str, str]:
    """Return what takes rates out of a batch, by name; optimizers ask for all, also those of other turns."""
    cuts = [found for found in (turn.cut for turn in training.of_turns) if found is not None]
    names = dict.fromkeys(name for found in cuts for name in found.rates)
    in_all = {name for name in names if all(name in found.rates for found in cuts)}
    return {name: f'batch.pop("{name}")' if name in in_all else f'batch.pop("{name}", 0.0)' for name in names}


def _data_source(result: Ported) -> str:
    """Return the text of the training data and of what follows it."""
    training = result.training
    models = [turn.model for turn in result.turns] or [result.model]
    frozen = sorted(name for name in result.model.params if all(model.frozen(name) for model in models))
    end = f"\n            frozen={set(frozen)!r}.__contains__," if frozen else ""
    if training.loader is None:
        return f'port.ScriptBatches(SCRIPT, ARGS, HERE / "{INPUTS}", FOLDER),{end}'
    keys = _batch_keys(training, training.loader)
    loaders = [training.loader, *([] if result.validation is None else [result.validation])]
    found = [f"port.script_loader(SCRIPT, ARGS, {number}, FOLDER)" for number in loaders]
    if training.accumulate > 1:
        found = [f"port.ScriptRows({loader}, {keys!r})" for loader in found]
    validation = "".join(f"\n            validation={loader}," for loader in found[1:])
    names = f"\n            batch_keys={keys!r}," if keys and training.accumulate == 1 else ""
    return f"{found[0]},{validation}{end}{names}"


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
    parts = training.parts
    optimizer = ", ".join(_at(recording.optimizers[id(part)]) for part in parts_of(training.optimizer))
    schedules = [_at(recording.schedulers[id(part.scheduler)]) for part in parts if part.scheduler is not None]
    lines = dict.fromkeys(clamp.line for turn in training.of_turns for clamp in turn.clamps.values())
    schedule = "".join(f", {line}" for line in dict.fromkeys(schedules))
    clamps = "".join(f", {_at(line)}" for line in lines)
    found: dict[str, tuple[str, Any, str]] = {
        "steps": ("int", *steps),
        "batch_size": ("int", training.rows * training.accumulate, data),
        "optimizer": ("str", format_expression(result.optimizer), optimizer + schedule + clamps),
        "clip_norm": ("float | None", training.clip_norm, _at(training.clip.line) if training.clip else ""),
    }
    if training.accumulate > 1:
        found["accumulate"] = ("int", training.accumulate, "")
    if training.autocast is not None:
        found["precision"] = ("str", PRECISIONS[training.autocast], _at(_first_autocast(training)))
    if (scale := loss_scale(training)) is not None:
        why = f"{_at(training.clip.line)} clips scaled gradients" if training.clip and training.clips_scaled else ""
        found["loss_scale"] = ("str | None", scale, why)
    if more := sum(_count_shapes(turn) for turn in result.turns or (result,)) - 1:
        why = "a program for each optimizer" if training.turns else "batches differ in size"
        found["allow_recompile"] = ("int", more, why)
    return found


def _count_shapes(result: Ported) -> int:
    """Return the number of shapes that the model of a program is for."""
    if result.any_size is None:
        return len(result.training.programs)
    return math.prod(high - low + 1 for low, high in result.any_size[1].ranges.values())


def _length(training: Training) -> tuple[tuple[int, str], str]:
    """Return how many updates the script makes, with a comment, and where its data come from."""
    recording = training.recording
    if training.loader is None:
        is_whole = recording.is_over and not recording.is_shortened
        length = "as in the script" if is_whole else "choose as many as you need"
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


def loss_scale(training: Training) -> str | None:
    """Return the loss scale of a script as an expression; None for the one that its precision has."""
    if not training.is_scaled:
        return "static_loss_scale(scale=1.0)" if training.autocast == torch.float16 else None
    scaler, first = training.recording.scaler, training.recording.updates[0].scale
    given = {
        "init_scale": first,
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
    }
    call = Call("dynamic_loss_scale", given)
    if training.clip is not None and training.clips_scaled:
        call = Call("clipped", {"optimizer": call, **training.clip.bounds})
    return str(call)


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
