"""Whether a recording is the script: its updates again, from its calls and its settings alone, to the bit.

What was understood of the script computes losses, gradients and parameters in PyTorch again, from the start of the
script. Each must have the bits that it had in the script. So whatever else changes a loss, a gradient or a parameter in
the script, which nobody thought of, is found here.
"""

import functools
import inspect
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch

from jaxtrain.errors import UserError, format_location
from jaxtrain.port.calls import Program
from jaxtrain.port.clamps import Clamp
from jaxtrain.port.joint import Joint
from jaxtrain.port.recording import Backward, Clip, Update
from jaxtrain.port.replay import recorded_module
from jaxtrain.port.script import digest
from jaxtrain.port.training import Training
from jaxtrain.torch_import import Line


def check_rerun(training: Training) -> None:
    """Compute the recorded updates again.

    Raises:
      UserError: A loss, a gradient or a parameter has other bits than in the script.
    """
    set_start(training)
    turns = training.of_turns
    optimizers = [new_optimizer(turn) for turn in turns]
    carried = {name: x for turn in turns for name, x in turn.first_carried().items()}
    for number, (i, update) in enumerate(training.by_turn()):
        try:
            _check_update(turns[i], number, update, optimizers[i], carried)
        except UserError as error:
            raise (training.other_mode or error) from None


def _check_update(
    training: Training,
    number: int,
    update: Update,
    optimizer: Any,
    carried: dict[str, torch.Tensor],
) -> None:
    for part in training.modules.values():
        part.zero_grad(set_to_none=True)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    scaler = _scaler(update)
    for backward in update.backwards:
        losses = _losses(training, backward, carried)
        loss = functools.reduce(torch.add, losses).detach()
        if not torch.equal(loss, backward.loss) and not (loss.isnan() & backward.loss.isnan()).all():
            raise _differs("the loss", number, backward.line)
        for one in losses:
            scaler.scale(one).backward(retain_graph=one is not losses[-1])
    scaled = [clip for clip in update.clips if update.scale is not None and not clip.is_unscaled]
    for clip in scaled:
        _clip(clip, parameters)
    if update.scale is not None:
        scaler.unscale_(optimizer)
    for clip in (clip for clip in update.clips if clip not in scaled):
        _clip(clip, parameters)
    if update.optimizer is None:
        return
    assert update.line is not None
    if [digest(p.grad) for p in parameters] != update.gradients:
        raise _differs("a gradient", number, update.line)
    for group, settings in zip(optimizer.param_groups, update.settings, strict=True):
        group.update(settings)
    optimizer.step()
    if [digest(p) for p in parameters] != update.after:
        raise _differs("a parameter", number, update.line)
    clamp(parameters, update.clamps)


def clamp(parameters: Iterable[torch.Tensor], to: Mapping[int, Clamp]) -> None:
    """Clamp parameters to their bounds, by identity."""
    with torch.no_grad():
        for p in parameters:
            if id(p) in to:
                p.clamp_(to[id(p)].minimum, to[id(p)].maximum)


def set_start(training: Training) -> None:
    """Set the script's modules to what they were before its first update, in the modes in which they are called."""
    start = training.recording.start
    with torch.no_grad():
        for part in training.modules.values():
            for inner in part.modules():
                # Not by `train`, which a script's own class may use for something else.
                inner.training = id(inner) not in training.evaluated
            for x in (*part.parameters(), *part.buffers()):
                if id(x) in start:
                    x.copy_(start[id(x)])
                x.grad = None


def _losses(training: Training, backward: Backward, carried: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the losses that `backward` is called on."""
    inputs = training.inputs(backward)
    restore = partial(_restore, backward.program)
    module = recorded_module(backward.program, training.modules, inputs, carried, restore=restore)
    found = module(**inputs.batch_of(backward))
    return found if isinstance(found, tuple) else (found,)


def _restore(program: Program, i: int) -> None:
    state = program.calls[i].random
    assert state is not None
    torch.set_rng_state(state)


def new_optimizer(training: Training) -> Any:
    """Return a new optimizer of the script's class and groups, which has no scheduler."""
    if isinstance(training.optimizer, Joint):
        return Joint(map(new_optimizer, training.parts))
    theirs, (first, *_) = training.optimizer, [u for u in training.recording.updates if u.optimizer is not None]
    groups = [
        {"params": group["params"], **{name: x for name, x in settings.items() if name != "initial_lr"}}
        for group, settings in zip(theirs.param_groups, first.settings, strict=True)
    ]
    return like(theirs, groups)


def like(theirs: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return a new optimizer of the class and with the arguments of another one."""
    takes = inspect.signature(type(theirs)).parameters
    arguments = {name: value for name, value in theirs.defaults.items() if name in takes}
    optimizer: torch.optim.Optimizer = type(theirs)(groups, **arguments)
    return optimizer


def _scaler(update: Update) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=update.scale or 1.0, enabled=update.scale is not None)


def _clip(clip: Clip, parameters: list[torch.Tensor]) -> None:
    """Clip in the order of the script, in which norms are added."""
    by_id = {id(p): p for p in parameters}
    getattr(torch.nn.utils, clip.function)(
        [by_id[key] for key in clip.parameters if key in by_id], clip.bound, **clip.options
    )


def _differs(what: str, update: int, line: Line) -> UserError:
    at = format_location(line.file, line.number)
    return UserError(
        f"{what} of update {update} has another value when the recorded calls are made again ({at}): the script changes"
        " it by something that is not recorded; make such changes inside the module, or leave them out"
    )
