"""A script as a model of JAX, with the optimizer of its run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from jaxtrain.errors import UserError
from jaxtrain.interop import live_expression
from jaxtrain.optim import Call, Expression
from jaxtrain.port.any_size import axes_of, common_source, sample_sizes
from jaxtrain.port.batch_shapes import Shapes, shapes
from jaxtrain.port.clamps import Bounds
from jaxtrain.port.refused import refused_at
from jaxtrain.port.replay import recorded_module
from jaxtrain.port.rerun import new_optimizer, set_start
from jaxtrain.port.same_program import check_same
from jaxtrain.port.training import Training
from jaxtrain.port.validation import last_batch, validation_of
from jaxtrain.torch_import import ImportedModel, from_torch


@dataclass(frozen=True, eq=False)
class Ported:
    """A script as a model of JAX, with the settings of its run.

    Attributes:
      training: What the script is.
      module: Its recorded program.
      model: The same in JAX.
      others: The same for batches of other shapes, with these.
      any_size: The source of the model for batches of all sizes of a range, with their shapes; None without one.
      optimizer: Its optimizer, with a schedule of updates or epochs.
      turns: The models of the turns of several optimizers; none for one.
      validation: Number of the DataLoader that it is evaluated on; None without one.
      not_evaluated: Why it is not evaluated on the one that the script has; None if it is, or there is none.
    """

    training: Training
    module: torch.nn.Module
    model: ImportedModel
    others: tuple[tuple[Shapes, ImportedModel], ...]
    any_size: tuple[str, Shapes] | None
    optimizer: Expression
    turns: tuple["Ported", ...] = ()
    validation: int | None = None
    not_evaluated: str | None = None

    def state(self) -> dict[str, Any]:
        """Return the buffers that its models change, by name; none for models without."""
        return {name: x for model in self.models() for name, x in (model.state or {}).items()}

    def models(self) -> list[ImportedModel]:
        """Return the models of all turns and shapes."""
        turns = self.turns or (self,)
        return [model for turn in turns for model in (turn.model, *(other for _, other in turn.others))]


def ported(training: Training) -> Ported:
    """Import the program of a script, with the parameters that it starts with.

    Raises:
      UserError: The program cannot be imported; the message names the script's line.
    """
    set_start(training)
    if training.turns:
        return _in_turn(training, [ported(turn) for turn in training.turns])
    (module, batch), *rest = _examples(training)
    model = from_torch(module, batch)
    any_size = for_any_size(training, model)
    others = () if any_size is not None else tuple((shapes(its), from_torch(part, its)) for part, its in rest)
    result = Ported(training, module, model, others, any_size, _optimizer(training, module, model))
    return result if training.is_turn else _evaluated(result)


def _evaluated(result: Ported) -> Ported:
    """Return a script that is evaluated on the DataLoader that it has for it, with a model for its last batch."""
    training = result.training
    number = validation_of(training)
    if number is None:
        return result
    if result.model.draws_in_evaluation:
        return replace(result, not_evaluated="the loss draws random numbers in evaluation mode")
    try:
        batch = last_batch(training, number)
        is_known = batch is None or (result.any_size is not None and result.any_size[1].has(batch))
        if result.any_size is not None and not is_known:
            return replace(result, not_evaluated=f"no model is for its last batch, {shapes(batch or {})}")
        its = [] if batch is None or is_known else [(shapes(batch), from_torch(program_module(training, 0), batch))]
    except UserError as error:
        return replace(result, not_evaluated=str(error))
    return replace(result, validation=number, others=(*result.others, *its))


def _in_turn(training: Training, turns: Sequence[Ported]) -> Ported:
    """Return the models of several optimizers, which update at their turns."""
    by_path: dict[str, dict[int, Call]] = {}
    for i, turn in enumerate(turns):
        assert not isinstance(turn.optimizer, Call)
        for paths, call in turn.optimizer.items():
            for path in paths.split():
                by_path.setdefault(path, {})[i] = Call("at_turn", {"optimizer": call, "turn": i})
        if turn.model.params.keys() != turns[0].model.params.keys():
            line = turn.training.programs[0][0].line
            problem = "several optimizers, and layers that are a loop in one program alone"
            raise refused_at(problem, line, "call all layers in the updates of each optimizer")
    return replace(turns[0], training=training, optimizer=_added(by_path, training), turns=tuple(turns))


def _added(by_path: Mapping[str, Mapping[int, Call]], training: Training) -> dict[str, Call]:
    """Return the optimizers of parameters by their paths: of those that several turns update, the sum of theirs."""
    groups: dict[str, list[str]] = {}
    for path, calls in by_path.items():
        groups.setdefault(str(calls), []).append(path)
    for i, turn in enumerate(training.turns):
        count = sum(i in by_path[paths[0]] for paths in groups.values())
        if turn.clip is not None and turn.clip.is_of_norm and count > 1:
            problem = "an optimizer clips by the norm of parameters, some of which another one updates as well"
            raise refused_at(problem, turn.clip.line, "clip by value, or give each parameter to one optimizer")
    found: dict[str, Call] = {}
    for paths in groups.values():
        call, *others = by_path[paths[0]].values()
        for other in others:
            call = Call("added", {"first": call, "second": other})
        found[" ".join(paths)] = call
    return found


def _examples(training: Training) -> Iterator[tuple[torch.nn.Module, dict[str, torch.Tensor]]]:
    """Yield the program and a micro-batch of each shape."""
    for i, (backward, inputs) in enumerate(training.programs):
        yield program_module(training, i), inputs.batch_of(backward)


def for_any_size(training: Training, model: ImportedModel) -> tuple[str, Shapes] | None:
    """Return the source of a model for batches of all sizes between those for which it is the same, with their shapes.

    Args:
      training: What the script is.
      model: The model for its first batch.

    Returns:
      The source; None if batches have few shapes, or the program computes something else for each.
    """
    (backward, inputs), *rest = training.programs
    batch = inputs.batch_of(backward)
    axes = axes_of([batch, *(its.batch_of(other) for other, its in rest)])
    if axes is None or inputs.sizes or not _are_one(training):
        return None
    evaluation = not model.draws_in_evaluation
    text, buffers = model.written(evaluation=evaluation)
    found = [(text, {letter: numbers[0] for letter, numbers in axes.numbers.items()})]
    module = program_module(training, 0)
    for choices in sample_sizes(axes):
        for sizes in choices:
            try:
                other, its = from_torch(module, axes.resized(batch, sizes)).written(evaluation=evaluation)
            except (UserError, RuntimeError, ValueError, IndexError):  # PyTorch's own, of a size that is too small
                continue
            if not _have_same_arrays(buffers, its):
                return None
            found.append((other, sizes))
            break
    common = common_source([text for text, _ in found])
    if common is None:
        return None
    ranges = {letter: (min(s[letter] for _, s in found), max(s[letter] for _, s in found)) for letter in axes.numbers}
    return common, axes.shapes(batch, ranges)


def _are_one(training: Training) -> bool:
    """Return whether the programs of batches of all shapes are one, with the same numbers."""
    first, *others = training.programs
    try:
        for other in others:
            check_same(*first, *other)
    except UserError:
        return False
    return True


def _have_same_arrays(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name], equal_nan=True) for name in one)


def program_module(training: Training, number: int) -> torch.nn.Module:
    """Return the program of batches of a shape as a module, by the number of the shape."""
    backward, inputs = training.programs[number]
    return recorded_module(backward.program, training.modules, inputs, training.first_carried())


def _optimizer(training: Training, module: torch.nn.Module, model: ImportedModel) -> Expression:
    """Return the optimizer of a training as an expression."""
    if len(training.parts) > 1:
        parts = [_optimizer(part, module, model) for part in training.parts]
        return {paths: call for part in parts if not isinstance(part, Call) for paths, call in part.items()}
    names = {id(p): name for name, p in module.named_parameters()}
    groups = training.optimizer.param_groups
    given = {names[id(p)] for group in groups for p in group["params"]}
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    is_whole = len(groups) == 1 and trained <= given and not training.is_turn
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
    return _clamped(_clipped(found, training), training, module, model)


def _clamped(found: Expression, training: Training, module: torch.nn.Module, model: ImportedModel) -> Expression:
    """Return an optimizer that clamps parameters, each to its bounds."""
    if not training.clamps:
        return found
    bounds = _bounds_of_paths(training, module, model)
    if isinstance(found, Call) and len({*bounds.values()}) == 1:
        return _with_bounds(found, bounds.popitem()[1])
    groups: dict[tuple[str, Bounds], list[str]] = {}
    calls = {" ".join(bounds): found} if isinstance(found, Call) else found
    for paths in calls:
        for path in paths.split():
            groups.setdefault((paths, bounds[path]), []).append(path)
    return {" ".join(own): _with_bounds(calls[paths], its) for (paths, its), own in groups.items()}


def _bounds_of_paths(training: Training, module: torch.nn.Module, model: ImportedModel) -> dict[str, Bounds]:
    """Return what the parameters of a model are clamped to, by path."""
    trained = {id(p) for group in training.optimizer.param_groups for p in group["params"]}
    own = {name: id(p) for name, p in module.named_parameters() if id(p) in trained}
    found: dict[str, Bounds] = {}
    for path, param in model.names.params.items():
        keys = [key for name, key in own.items() if param.has(model.names.tied.get(name, name))]
        its = {training.clamps[key].bounds if key in training.clamps else (None, None) for key in keys}
        if len(its) > 1:
            line = next(training.clamps[key].line for key in keys if key in training.clamps)
            raise refused_at("layers that are a loop are clamped unlike", line, "clamp all of them alike")
        if its:
            found[path] = its.pop()
    return found


def _with_bounds(optimizer: Call, bounds: Bounds) -> Call:
    given = {name: x for name, x in zip(("minimum", "maximum"), bounds, strict=True) if x is not None}
    return Call("clamped", {"optimizer": optimizer, **given}) if given else optimizer


def _clipped(found: Expression, training: Training) -> Expression:
    """Return an optimizer that clips, where `clip_norm` of a recipe does not: it bounds the norm of all gradients."""
    clip = training.clip
    if clip is None or not training.clips_itself:
        return found
    if isinstance(found, Call):
        return Call("clipped", {"optimizer": found, **clip.bounds})
    if clip.is_of_norm and len(found) > 1:
        raise refused_at("several optimizers, and one with groups that clips by the norm", clip.line, "use one group")
    return {paths: Call("clipped", {"optimizer": call, **clip.bounds}) for paths, call in found.items()}
