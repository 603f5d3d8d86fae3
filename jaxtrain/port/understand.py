"""What a recorded script is: one program, one optimizer, a window of micro-batches, a schedule.

Whatever differs from this is refused, with the line of the script.
"""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from jaxtrain.errors import UserError
from jaxtrain.port.calls import Value
from jaxtrain.port.clips import clamps_of, clip_of
from jaxtrain.port.cut import Cut
from jaxtrain.port.find_cut import cut
from jaxtrain.port.inputs import Inputs, changed, free, of_batches
from jaxtrain.port.interval_program import Place, place_of
from jaxtrain.port.joint import Joint, owned, parts_of
from jaxtrain.port.recorder import has_tensors
from jaxtrain.port.recording import Backward, Leaf, Recording, Update
from jaxtrain.port.refused import refused_at
from jaxtrain.port.same_program import check_same
from jaxtrain.port.schedules import check_settings, rates_of, scheduler_of
from jaxtrain.port.training import Training
from jaxtrain.port.turns import made_in, of_turns


def understood(recording: Recording) -> Training:
    """Return what a recorded script is.

    Its data are those of a DataLoader if its programs begin with the batches of one; else those that the script gives.
    Several calls of `backward` in an update are micro-batches of one program, or parts of one loss.

    Raises:
      UserError: It is something else; the message names the line.
    """
    optimizers = _optimizers(recording)
    for optimizer in optimizers:
        _check_trained_alike(recording, optimizer)
    if len(optimizers) > 1:
        return _in_turn(recording, optimizers)
    try:
        return _with_loader(recording, optimizers[0])
    except UserError:
        pass
    try:
        return _with_cut(recording, optimizers[0])
    except UserError as error:
        if all(len(update.backwards) == 1 for update in recording.updates):
            raise
        try:
            (joined,) = of_turns(recording, optimizers)
            return _joined(_with_cut(joined, optimizers[0]))
        except UserError:
            raise error from None


def _joined(training: Training) -> Training:
    """Return a training whose updates have one program each, of all their calls of `backward`."""
    assert training.cut is not None
    return replace(training, cut=replace(training.cut, is_joined=True))


def _in_turn(recording: Recording, optimizers: Sequence[torch.optim.Optimizer | Joint]) -> Training:
    """Return a training of several optimizers that take turns."""
    skipped = next((update for update in recording.updates if update.optimizer is None), None)
    if skipped is not None:
        raise refused_at("several optimizers and a GradScaler", skipped.line, "scale no loss")
    _check_they_alternate(recording, optimizers)
    modules = _modules(recording, [b for update in recording.updates for b in update.backwards], *optimizers)
    turns = of_turns(recording, optimizers)
    made = [made_in(turn) for turn in turns]
    others = [{x for other in made if other is not own for x in other} for own in made]
    cuts = [cut(turn, modules, known)[1] for turn, known in zip(turns, others, strict=True)]
    found = [
        _joined(_with_cut(turn, optimizer, modules, known, _produced(turn, turns, cuts, modules)))
        for turn, optimizer, known in zip(turns, optimizers, others, strict=True)
    ]
    like = {name: x for t in found for b, i in t.programs[:1] for name, x in i.batch_of(b).items() if name in i.carried}
    evaluated, other_mode = _modes([b for training in found for b, _ in training.programs], modules)
    names = _rates_of_turns(recording, found)
    found = [
        replace(t, kept_like=like, evaluated=evaluated, is_turn=True, cut=replace(t.cut, rates=rates))
        for t, rates in zip(found, names, strict=True)
        if t.cut is not None
    ]
    found[0] = replace(found[0], other_mode=other_mode)
    for training in found:
        _check_turn(training)
    clamped = {key for training in found for key in training.clamps}
    for clamp in (clamp for u in recording.updates for key, clamp in u.clamps.items() if key not in clamped):
        raise refused_at("parameters are clamped before an update", clamp.line, "clamp them after each update")
    return replace(found[0], recording=recording, turns=tuple(found))


def _check_they_alternate(recording: Recording, optimizers: Sequence[torch.optim.Optimizer | Joint]) -> None:
    """Refuse optimizers of which one trains after the other, as those of several folds of data."""
    order = [optimizers.index(update.optimizer) for update in recording.updates if update.optimizer is not None]
    count = order.count(order[0])
    if order == sorted(order, key=order.index) and min(map(order.count, order)) > 1:
        line = recording.optimizers[id(parts_of(optimizers[order[-1]])[0])]
        remedy = f"give --updates {count} to port the first one"
        raise refused_at("an optimizer begins when another one has ended", line, remedy)


def _produced(
    turn: Recording, turns: Sequence[Recording], cuts: Sequence[Cut], modules: Mapping[str, torch.nn.Module]
) -> dict[Place, str]:
    """Return what the programs of an optimizer compute for those of others, with the names that these have for it."""
    found: dict[Place, str] = {}
    makers = {x: b for update in turn.updates for b in update.backwards for c in b.interval.calls for _, x in c.results}
    for other, its in zip(turns, cuts, strict=True):
        if other is turn:
            continue
        for backward in (b for update in other.updates for b in update.backwards):
            roots = its.read(backward, None).program.roots
            of_name = {root.name: x for x, root in zip(roots, its.roots, strict=True) if root.name in its.foreign}
            found |= {place_of(makers[x], x): name for name, x in of_name.items() if x in makers}
    return found


def _rates_of_turns(recording: Recording, turns: Sequence[Training]) -> list[tuple[str, ...]]:
    """Return names for the rates of each turn, which the script gives if one may change; else none."""
    groups = [len(turn.recording.updates[0].settings) for turn in turns]
    if not recording.schedulers and not any(rates_of(turn.recording.updates) for turn in turns):
        return [()] * len(turns)
    return [("rate",) if max(groups) == 1 else tuple(f"rate_{i}" for i in range(count)) for count in groups]


def _check_turn(training: Training) -> None:
    """Refuse what a turn of several cannot have."""
    backward = training.programs[0][0]
    repeated = next((c for c in backward.program.calls if c.is_repeated and c.random is not None), None)
    problems = {
        "several optimizers and a GradScaler": training.is_scaled and backward.line,
        "random numbers that two updates share": repeated is not None and repeated.line,
    }
    for problem, line in problems.items():
        if line:
            raise refused_at(problem, line, "this is not carried over; leave one of them out")


def _with_loader(recording: Recording, optimizer: torch.optim.Optimizer | Joint) -> Training:
    """Return a training whose data are a DataLoader."""
    updates = recording.updates
    backwards = [backward for update in updates for backward in update.backwards]
    modules = _modules(recording, backwards, optimizer)
    names: dict[Leaf, str] = {}
    programs = _programs(backwards, lambda backward: of_batches(backward, modules, names))
    accumulate = _window(updates, programs)
    loader, rows = _data(programs)
    count = _batches(recording, loader)
    if count % accumulate:
        raise refused_at(
            f"the last window of an epoch has {count % accumulate} of {accumulate} micro-batches",
            updates[0].line,
            f"choose a batch size with which the {count} batches are whole windows, or accumulate nothing",
        )
    scheduler, is_by_epoch = None, False
    if not isinstance(optimizer, Joint):
        scheduler, is_by_epoch = scheduler_of(recording, optimizer, loader)
    training = _training(
        recording,
        modules,
        programs,
        optimizer,
        scheduler,
        inputs=lambda backward: of_batches(backward, modules, names),
        epoch=count // accumulate,
        is_by_epoch=is_by_epoch,
        loader=loader,
        rows=rows,
    )
    _ = training.parts  # which refuses settings of optimizers that update together
    return training


def _with_cut(
    recording: Recording,
    optimizer: torch.optim.Optimizer | Joint,
    modules: Mapping[str, torch.nn.Module] | None = None,
    others: Collection[Value] = (),
    produced: Mapping[Place, str] | None = None,
) -> Training:
    """Return a training whose data are those that the script gives."""
    if modules is None:
        modules = _modules(recording, [b for update in recording.updates for b in update.backwards], optimizer)
    backwards, found = cut(recording, modules, others, produced)
    programs = _programs(sorted(backwards, key=lambda backward: not backward.is_led), found.inputs)
    of_update = iter(backwards)
    updates = [replace(update, backwards=[next(of_update) for _ in update.backwards]) for update in recording.updates]
    longest = max(len(update.backwards) for update in updates)
    is_uneven = any(len(update.backwards) != longest for update in updates)
    _check_sizes(longest, programs)
    rates, scheduler = rates_of(recording.updates), None
    if produced is not None:  # one of several turns, whose rates the script gives
        check_settings(recording.updates, but_for_rates=True)
    elif not isinstance(optimizer, Joint):
        try:
            scheduler, _ = scheduler_of(recording, optimizer, None)
        except UserError:
            if not rates:
                raise
    numbers = tuple([*recording.optimizers].index(id(part)) for part in parts_of(optimizer))
    found = replace(found, window=longest if is_uneven else 0, optimizers=numbers)
    training = _training(
        replace(recording, updates=updates), modules, programs, optimizer, scheduler, inputs=found.inputs, cut=found
    )
    if scheduler is not None or not rates:
        return training
    if produced is None and isinstance(optimizer, Joint) and _have_schedulers(training):
        return training
    return replace(training, cut=replace(found, rates=rates))


def _have_schedulers(training: Training) -> bool:
    """Return whether the settings of optimizers that update together change by schedulers alone."""
    try:
        return bool(training.parts)
    except UserError:
        return False


def _training(
    recording: Recording,
    modules: Mapping[str, torch.nn.Module],
    programs: tuple[tuple[Backward, Inputs], ...],
    optimizer: torch.optim.Optimizer | Joint,
    scheduler: Any,
    **of_data: Any,
) -> Training:
    backwards = [backward for update in recording.updates for backward in update.backwards]
    _check_not_changed(backwards, modules, optimizer)
    is_scaled = any(b.scale is not None for b in backwards)
    evaluated, other_mode = _modes(backwards, modules)
    return Training(
        recording=recording,
        modules=modules,
        programs=programs,
        accumulate=max(len(update.backwards) for update in recording.updates),
        clip=None if _clips_parts(recording.updates, optimizer) else clip_of(recording.updates, optimizer),
        optimizer=optimizer,
        scheduler=scheduler,
        autocast=_autocast(backwards),
        is_scaled=is_scaled,
        evaluated=evaluated,
        other_mode=other_mode,
        clamps=clamps_of(recording.updates, optimizer),
        **of_data,
    )


def _clips_parts(updates: Sequence[Update], optimizer: torch.optim.Optimizer | Joint) -> bool:
    """Return whether each clipping is of one of several optimizers that update together."""
    parts = [owned(part) for part in parts_of(optimizer)]
    clips = [clip for update in updates for clip in update.clips]
    return len(parts) > 1 and all(any(own.issuperset(clip.parameters) for own in parts) for clip in clips)


def _optimizers(recording: Recording) -> list[torch.optim.Optimizer | Joint]:
    """Return the optimizers, in the order in which they were made."""
    updates = recording.updates
    found = {id(update.optimizer): update.optimizer for update in updates if update.optimizer is not None}
    if not found:
        raise refused_at(
            "every update was skipped by the GradScaler", updates[0].line, "give --updates a larger number"
        )
    by_part: dict[int, torch.optim.Optimizer | Joint] = {}
    for optimizer in found.values():
        for part in parts_of(optimizer):
            if by_part.setdefault(id(part), optimizer) is not optimizer:
                line = recording.optimizers[id(part)]
                raise refused_at("optimizers step together in some updates alone", line, "step them alike")
    waiting = [line for key, line in recording.optimizers.items() if key not in by_part]
    if waiting:
        raise refused_at(
            f"an optimizer made no step in {len(updates)} updates", waiting[0], "give --updates a larger number"
        )
    return [*dict.fromkeys(by_part[key] for key in recording.optimizers)]


def _check_trained_alike(recording: Recording, optimizer: torch.optim.Optimizer | Joint) -> None:
    """Refuse parameters that some updates of an optimizer train, and others do not."""
    modules = recording.modules.items()
    names = {id(p): f"{name}.{path}" for name, part in modules for path, p in part.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    own = [(i, update) for i, update in enumerate(recording.updates) if update.optimizer is optimizer]
    _, first = own[0]
    for i, update in own:
        later = itertools.zip_longest(parameters, first.gradients, update.gradients)
        changed = next((p for p, a, b in later if (a is None) != (b is None)), None)
        if changed is not None:
            raise refused_at(
                f"{names.get(id(changed), 'a parameter')} is trained in some updates alone",
                update.line,
                f"give --updates {i} to port the updates before",
            )


def _modules(
    recording: Recording, backwards: Sequence[Backward], *optimizers: torch.optim.Optimizer | Joint
) -> dict[str, torch.nn.Module]:
    """Return the outermost modules that programs call or read, or that are trained, by the script's names."""
    called = {
        id(c.function): c.function
        for b in backwards
        for c in b.program.calls
        if isinstance(c.function, torch.nn.Module)
    }
    read = {key for b in backwards for value, key in b.interval.identities.items() if value in b.program.roots}
    read |= {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    named = {name if name != "self" else type(part).__name__.lower(): part for name, part in recording.modules.items()}
    known = {id(part) for part in named.values()}
    for part in called.values():
        if id(part) not in known and has_tensors(part):
            named.setdefault(free(type(part).__name__.lower(), named), part)
    inner = {id(x) for part in named.values() for x in part.modules() if x is not part}
    used = {
        name: part
        for name, part in named.items()
        if id(part) not in inner
        and (
            any(id(x) in called for x in part.modules())
            or not read.isdisjoint(map(id, (*part.parameters(), *part.buffers())))
        )
    }
    own = {id(x) for part in used.values() for x in part.parameters()}
    parts = [part for optimizer in optimizers for part in parts_of(optimizer)]
    for maker, p in ((x, p) for x in parts for group in x.param_groups for p in group["params"]):
        if id(p) not in own:
            raise refused_at(
                f"a trained tensor {list(p.shape)} belongs to no module",
                recording.optimizers.get(id(maker)),
                "make it a parameter of a torch.nn.Module",
            )
    return used


def _modes(
    backwards: Sequence[Backward], modules: Mapping[str, torch.nn.Module]
) -> tuple[frozenset[int], UserError | None]:
    """Return the identities of the parts of modules that are first called in evaluation mode.

    Returns:
      These; the error of one that is called in the other mode later, which many modules compute the same in.
    """
    paths = {id(part): f"{name}.{path}".strip(".") for name in modules for path, part in modules[name].named_modules()}
    modes, error = dict[int, bool](), None
    for call in (call for backward in backwards for call in backward.program.calls):
        parts = call.function.modules() if isinstance(call.function, torch.nn.Module) else ()
        for part in parts:
            if modes.setdefault(id(part), id(part) in call.evaluated) != (id(part) in call.evaluated):
                what = f"{paths.get(id(part), type(part).__name__)} is called in training and in evaluation mode"
                error = error or refused_at(what, call.line, "call it in one of them, or a copy of it")
    return frozenset(key for key, is_evaluated in modes.items() if is_evaluated), error


def _check_not_changed(
    backwards: Sequence[Backward], modules: Mapping[str, torch.nn.Module], optimizer: torch.optim.Optimizer | Joint
) -> None:
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    names = {f"{name}.{path}" for name in modules for path, p in modules[name].named_parameters() if id(p) in trained}
    for backward in backwards:
        writes = [call for call in backward.program.calls if call.writes]
        for name in sorted(names.intersection(changed(backward, writes, modules))):
            call = next(call for call in writes if name in changed(backward, [call], modules))
            raise refused_at(
                f"{name} is trained, and changed by hand", call.line, "let its optimizer alone change a parameter"
            )


def _programs(
    backwards: Sequence[Backward], inputs_of: Callable[[Backward], Inputs]
) -> tuple[tuple[Backward, Inputs], ...]:
    """Return a micro-batch of each shape, of which all programs are equal."""
    found: dict[Any, tuple[Backward, Inputs]] = {}
    for backward in backwards:
        inputs = inputs_of(backward)
        shapes = tuple((name, tuple(x.shape)) for name, x in inputs.batch_of(backward).items())
        is_new = shapes not in found
        first = found.setdefault(shapes, (backward, inputs))
        check_same(*first, backward, inputs)
        if is_new:  # a batch of another size: the same program, but for sizes
            check_same(*next(iter(found.values())), backward, inputs, of_sizes=True)
    return tuple(found.values())


def _window(updates: Sequence[Update], programs: Sequence[tuple[Backward, Inputs]]) -> int:
    count = len(updates[0].backwards)
    for update in updates:
        if len(update.backwards) != count:
            raise refused_at(
                f"an update has {len(update.backwards)} calls of backward, the first one {count}",
                update.line,
                "accumulate the same number of micro-batches in every update",
            )
    _check_sizes(count, programs)
    return count


def _check_sizes(count: int, programs: Sequence[tuple[Backward, Inputs]]) -> None:
    if count > 1 and len(programs) > 1:
        raise refused_at(
            "the micro-batches of a window differ in size", programs[1][0].line, "give the DataLoader drop_last=True"
        )


def _data(programs: Sequence[tuple[Backward, Inputs]]) -> tuple[int, int]:
    """Return the number of the DataLoader, and the rows of its first batch."""
    backward, inputs = programs[0]
    loaders = {leaf.loader for _, inputs in programs for leaf in inputs.leaves.values()}
    if len(loaders) != 1 or -1 in loaders:
        problem = (
            "the loss reads batches of several DataLoaders" if loaders else "the loss reads no batch of a DataLoader"
        )
        raise refused_at(problem, backward.line, "take the batches from one torch.utils.data.DataLoader")
    rows = {backward.tensors[value].shape[0] if backward.tensors[value].ndim else 0 for value in inputs.batch}
    if len(rows) != 1 or 0 in rows:
        raise refused_at(
            "the tensors of a batch differ in their rows", backward.line, "give each the rows of the batch"
        )
    return loaders.pop(), rows.pop()


def _batches(recording: Recording, loader: int) -> int:
    found = recording.loaders[loader]
    try:
        return len(found.loader)
    except TypeError:
        raise refused_at("the DataLoader has no length", found.line, "give its dataset a __len__") from None


def _autocast(backwards: Sequence[Backward]) -> torch.dtype | None:
    found = {c.ambient.autocast: c.line for b in backwards for c in b.program.calls if c.ambient.autocast is not None}
    if len({dtype for dtype, _ in found}) > 1:
        raise refused_at("autocast regions of two dtypes", [*found.values()][1], "use one")
    return next((dtype for dtype, _ in found), None)
