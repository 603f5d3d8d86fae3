"""The proof of a ported script: the files that were written for it, beside the recorded program in PyTorch.

PyTorch's side is the script's own modules, its optimizer's class and groups, and the learning rates with which its
updates were recorded. `jaxtrain.port.rerun` has computed the script's updates from these to the bit.
"""

import contextlib
import dataclasses
import itertools
import linecache
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from rich.console import Console

from jaxtrain.cost import flops
from jaxtrain.errors import UserError
from jaxtrain.interop import NameTable
from jaxtrain.port import micro_batch, turn
from jaxtrain.port.batch_shapes import shapes
from jaxtrain.port.clamps import Bounds
from jaxtrain.port.cut import PADDING
from jaxtrain.port.joint import Joint, parts_of
from jaxtrain.port.ported import Ported, program_module
from jaxtrain.port.recipe_source import PRECISIONS, loss_scale
from jaxtrain.port.recording import Clip
from jaxtrain.port.rerun import like, set_start
from jaxtrain.port.training import Training
from jaxtrain.run import Recipe, Task, load_recipe
from jaxtrain.runner import frozen, optimizer_expression, recipe_optimizer
from parity.attestation import environment
from parity.case import Batch, Case, Outputs
from parity.cases.recipe_case import NAMED, moments_of
from parity.compare.examination import Examination
from parity.divergence import Line
from parity.explain.first_statement import Found, first_statement
from parity.explain.stages import at_fault, stages
from parity.optimizer import Optimizer
from parity.report import Result, waiting
from parity.report.page_case import PageCase, page_case
from parity.report.terminal import divergence
from parity.report.verdict_page import write_page
from parity.run import examine
from parity.settings import settings_of
from parity.sides.frozen import frozen_too, without_frozen
from parity.sides.jax_lines import lines_in
from parity.source import source_line


class Proof(NamedTuple):
    """Whether the files of a ported script are the script.

    Attributes:
      passed: Whether they are.
      lines: What was compared, and what differs.
      cases: The checks, as `proof.html` shows them.
    """

    passed: bool
    lines: tuple[str, ...]
    cases: tuple[PageCase, ...]


PAGE = "proof.html"
"""The page of a proof."""


def prove(result: Ported, folder: Path, name: str) -> Proof:
    """Compare the files in a folder with PyTorch in float64, and write `proof.html` there.

    A script with autocast is compared in its precision as well: how far both are from float64.

    Args:
      result: The script that they were written for.
      folder: The folder.
      name: Name in reports.
    """
    if changed := _changed_settings(result, load_recipe(f"{folder / 'run.py'}::Run")[1]):
        write_page(folder / PAGE, environment(), [])
        return Proof(False, ("settings of run.py        NOT EQUAL", *changed), ())
    case = ported_case(result, folder, name)
    with waiting(Console(stderr=True), name), lines_in(folder):
        try:
            examination = examine(case, "fp64")
        except UserError as error:  # as of random numbers that only one side draws
            statement = _first_statement(case, folder)
            raise UserError(f"{error}; {statement}" if statement else str(error)) from error
        statement = at = None
        if not examination.verdict.passed:
            statement = _first_statement(case, folder)
            at = _at_fault(case, statement, result, folder)
            examination = _placed(examine(case, "fp64", locate=True), at, result, folder)
    found = examination.verdict
    results = [Result(case, "fp64", settings_of(case), examination)]
    if result.training.autocast is not None and found.passed:
        precision = PRECISIONS[result.training.autocast]
        with waiting(Console(stderr=True), name):
            results.append(Result(case, precision, settings_of(case), examine(case, precision)))
    cases = tuple(map(page_case, results))
    write_page(folder / PAGE, environment(), cases)
    worst = f"losses {found.loss_rel:.0e}, gradients {found.grad_rel_max:.0e}, parameters {found.param_rel_max:.0e}"
    changed = [] if found.passed else _changed_weight(case, result, folder)
    others = () if result.turns else _other_shapes(result)  # turns have batches of all shapes
    changed += [line for i in others for line in _of_shape(result, folder, name, i)]
    is_equal = found.passed and not changed
    answer = "equal" if is_equal else "NOT EQUAL"
    lines = [f"{case.settings['steps']} updates in float64: {worst}        {answer}", *found.faults, *changed]
    lines += [line for one in results[1:] for line in _accuracy(one)]
    if found.first_divergence is not None:
        lines += divergence(found.first_divergence).plain.splitlines()
    elif (line := at or (None if statement is None else statement.line)) is not None:
        lines.append(f"  in JAX             {source_line(*line)}")
    passed = is_equal and all(one.examination.verdict.passed for one in results)
    return Proof(passed, tuple(lines), cases)


def _accuracy(result: Result) -> list[str]:
    """Return lines on the accuracy of a low precision."""
    found = result.examination.verdict
    answer = "as accurate" if found.passed else "NOT AS ACCURATE"
    line = f"{result.precision}: {found.error_ratio or 0:.2f} times PyTorch's distance to float64        {answer}"
    return [line, *found.faults]


def _first_statement(case: "RecordedCase", folder: Path) -> Found | None:
    """Return the first statement of the files in a folder that differs from PyTorch; None where they cannot be run."""
    for file in folder.glob("**/*.py"):
        linecache.checkcache(str(file))
    steps = min(case.settings["steps"], case.turns + 2)
    with contextlib.suppress(UserError):  # the error of the proof says more
        return first_statement(case, folder, accumulate=case.settings["accumulate"], steps=steps)
    return None


def _at_fault(case: "RecordedCase", statement: Found | None, result: Ported, folder: Path) -> Line | None:
    """Return the line of the statement that differs, or of the setting of the recipe that an update follows."""
    if statement is not None and statement.what == "value":
        return statement.line
    elements = sum(x.size for x in jax.tree.leaves(case.params_like))
    steps = min(case.settings["steps"], max(case.turns + 2, _KEPT // elements))
    found = at_fault(stages(case, accumulate=case.settings["accumulate"], steps=steps))
    if found is None or found.name not in ("clipped gradients", "optimizer state", "update"):
        return None
    setting = "optimizer" if found.name != "clipped gradients" or result.training.clips_itself else "clip_norm"
    return str(folder / "run.py"), _line_with(folder / "run.py", f"    {setting}: ")


_KEPT = 60_000_000
"""Parameters of all updates whose states are kept to be compared stage by stage: about 4 GB."""


def _placed(examination: Examination, at: Line | None, result: Ported, folder: Path) -> Examination:
    """Return an examination whose first difference is at a line of the files."""
    found = examination.verdict.first_divergence
    if found is None or (at is None and found.jax_at is not None):
        return examination
    if at is None:
        setting = "clip_norm" if found.stage == "clip" and not result.training.clips_itself else "optimizer"
        at = str(folder / "run.py"), _line_with(folder / "run.py", f"    {setting}: ")
    placed = dataclasses.replace(found, jax_at=at, jax_source=source_line(*at))
    return dataclasses.replace(examination, verdict=dataclasses.replace(examination.verdict, first_divergence=placed))


def _line_with(file: Path, start: str) -> int:
    """Return the number of the last line of a file that begins with a text: the setting that a class has."""
    lines = enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
    return max((number for number, line in lines if line.startswith(start)), default=1)


def _changed_weight(case: "RecordedCase", result: Ported, folder: Path) -> list[str]:
    """Return a line if the weight of a micro-batch's loss is not the script's."""
    like, batch = (case.params_like, case.state_like), case.windows[0]
    params, state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    rows = len(next(iter(batch.values()))) // result.training.accumulate
    micro = {name: x[:rows] for name, x in batch.items()}
    loss, *_ = case.loss_fn(params, micro, jax.random.key(0), *([] if state is None else [state]))
    theirs = 1 / result.training.accumulate
    if math.isclose(float(loss.weight), theirs, rel_tol=1e-6):
        return []
    at = source_line(str(folder / "run.py"), _line_with(folder / "run.py", "    return "))
    return [f"the loss has the weight {float(loss.weight):g}, the script's {theirs:g} ({at})"]


def _changed_settings(result: Ported, recipe: Recipe) -> list[str]:
    """Return a line for each setting that both sides of a check take from the recipe and that is not the script's."""
    training = result.training
    theirs = {
        "batch_size": training.rows * training.accumulate,
        "accumulate": training.accumulate,
        "clip_norm": training.clip_norm,
        "precision": PRECISIONS[training.autocast],
        **{field.name: field.default for field in dataclasses.fields(Recipe) if field.name in NAMED},
        "loss_scale": loss_scale(training),
    }
    given = {name: getattr(recipe, name) for name in theirs}
    return [
        f"{name} is {given[name]!r}, the script's {theirs[name]!r}" for name in theirs if given[name] != theirs[name]
    ]


def _other_shapes(result: Ported) -> Sequence[int]:
    """Return the numbers of the shapes that are proved besides the first one: of one model for all, the extremes."""
    programs = result.training.programs
    rest = range(1, len(programs))
    if result.any_size is None or not rest:
        return rest
    sizes = [sum(x.numel() for x in inputs.batch_of(backward).values()) for backward, inputs in programs]
    return sorted({min(rest, key=sizes.__getitem__), max(rest, key=sizes.__getitem__)})


def _of_shape(result: Ported, folder: Path, name: str, shape: int) -> list[str]:
    """Return a line for each difference of an update on batches of another shape, which the files compute as well."""
    try:
        case = ported_case(result, folder, name, shape)
        faults = examine(case, "fp64", steps=1).verdict.faults
    except (TypeError, ValueError) as error:  # of the written model, whose shapes are those of the first batch
        faults = (str(error).partition("\n")[0],)
    backward, inputs = result.training.programs[shape]
    of_batch = shapes(inputs.batch_of(backward))
    return [f"batches of {of_batch}: {fault}; give the DataLoader drop_last=True" for fault in faults]


def ported_case(result: Ported, folder: Path, name: str, shape: int = 0) -> "RecordedCase":
    """Return the case of the files in a folder.

    Args:
      result: The script that they were written for.
      folder: The folder, with `run.py`.
      name: Name in reports.
      shape: Number of the shape of its batches.

    Raises:
      UserError: A file cannot be read.
    """
    training, model = result.training, result.model
    recipe = shortened(load_recipe(f"{folder / 'run.py'}::Run")[1], training)
    task = recipe.task()
    is_frozen = frozen(recipe, task)
    like = task.shapes()
    expression = optimizer_expression(recipe)
    ours = recipe_optimizer(recipe, task.no_decay or (lambda path: False))
    windows, settings = _windows(result, shape)
    micro = {name: x[: len(x) // training.accumulate] for name, x in windows[0].items()}
    module = result.module if shape == 0 else program_module(training, shape)
    if result.turns:
        torch_loss, torch_optimizer, moments = _loss_of_turns(result, module), partial(_optimizer_of_turns, result), {}
        scheduler = None
    else:
        torch_loss, torch_optimizer = _loss(training), partial(_optimizer, result, settings[0])
        moments, scheduler = moments_of(expression, ours, like.params), partial(_Recorded, settings)
    kinds = " and ".join(type(part).__name__ for part in parts_of(training.optimizer))
    side = Optimizer(kinds, torch_optimizer, ours, moments, scheduler)
    tables = [found.state_names for found in result.models() if found.state_names is not None]
    return RecordedCase(
        name=name,
        torch_model=partial(_started, result, module),
        torch_loss=torch_loss,
        loss_fn=without_frozen(task.loss_fn, is_frozen),
        params_like=like.params,
        names=model.names,
        batch=partial(_first_rows, windows),
        rows=len(next(iter(windows[0].values()))),
        windows=windows,
        begins_anywhere=not result.turns and (training.cut is None or not training.cut.rates),
        optimizer=frozen_too(side, is_frozen),
        clip_norm=recipe.clip_norm,
        state_like=like.model_state,
        buffers=NameTable({path: x for table in tables for path, x in table.params.items()}) if tables else None,
        settings={"accumulate": recipe.accumulate, "steps": len(training.recording.updates)},
        precision=recipe.precision,
        module=module,
        turns=_turns(result.training),
        outputs=None if result.validation is None else _outputs(result, task, windows),
        is_large=flops(task.loss_fn, like.params, micro, jax.random.key(0), *_state(like)) > _LARGE,
    )


def _outputs(result: Ported, task: Task, windows: Sequence[Batch]) -> Outputs:
    """Return the losses of batches in evaluation mode."""

    def in_jax(params: Any, batch: Mapping[str, Any], state: Any) -> Any:
        return task.loss_fn(params, batch, None, *([] if state is None else [state]))[0].total

    return Outputs(
        in_torch=lambda module, batch: module(**batch),
        in_jax=in_jax,
        batch=partial(_first_rows, windows),
        rows=result.training.rows,
        fixed_rows=True,
    )


def _turns(training: Training) -> int:
    """Return the number of updates until each optimizer has made one."""
    numbers = [number for number, _ in training.by_turn()]
    return 1 + max(map(numbers.index, {*numbers}))


def _loss(training: Training) -> Callable[[torch.nn.Module, Mapping[str, torch.Tensor]], tuple[torch.Tensor, Any]]:
    """Return the loss of a micro-batch, and its weight."""
    rates = () if training.cut is None else training.cut.rates

    def loss(module: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, Any]:
        read = batch if training.cut is None else micro_batch(batch)
        given = {name: x for name, x in read.items() if name not in (*rates, PADDING)}
        found = _nothing(module, given) if read.get(PADDING) else module(**given)
        return found, 1 / training.accumulate

    return loss


def _loss_of_turns(
    result: Ported, module: torch.nn.Module
) -> Callable[[torch.nn.Module, Mapping[str, torch.Tensor]], tuple[torch.Tensor, Any]]:
    """Return the loss of the turn of a batch; the module gets the constants of all turns."""
    forwards: list[dict[str, Any]] = []
    rates = {name for cut in result.training.feed().cuts for name in cut.rates}
    for training in (its.training for its in result.turns):
        programs = [program_module(training, i) for i in range(len(training.programs))]
        batches = [inputs.batch_of(backward) for backward, inputs in training.programs]
        forwards.append({str(shapes(batch)): type(p).forward for batch, p in zip(batches, programs, strict=True)})
        for name, x in (pair for p in programs for pair in p.named_buffers(recurse=False)):
            module.register_buffer(name, x, persistent=False)

    def loss(module: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, Any]:
        i, read = turn(micro_batch(batch))
        own = {name: x for name, x in read.items() if name not in rates}
        return forwards[i][str(shapes(own))](module, **own), 1

    return loss


def unhooked(optimizer: torch.optim.Optimizer) -> None:
    """Update by an optimizer that is a part of another one, whose hooks have been called."""
    step: Any = type(optimizer).step
    step.__wrapped__(optimizer)


class _InTurn(torch.optim.Optimizer):
    """Optimizers of which one steps in each update, with the recorded settings."""

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], order: Sequence[tuple[int, Sequence[Mapping[str, Any]]]]
    ) -> None:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        super().__init__([*dict.fromkeys(p for group in groups for p in group["params"])], {})
        self._optimizers, self._order, self._count = optimizers, order, 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update by the optimizer of this turn."""
        number, settings = self._order[self._count % len(self._order)]
        for group, given in zip(self._optimizers[number].param_groups, settings, strict=True):
            group.update(given)
        unhooked(self._optimizers[number])
        self._count += 1


def _optimizer_of_turns(result: Ported, named: Sequence[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    """Return the script's optimizers, which take turns."""
    named = [*named]
    made = [_optimizer(its, its.training.recording.updates[0].settings, named) for its in result.turns]
    return _InTurn(made, [(number, update.settings) for number, update in result.training.by_turn()])


def _nothing(module: torch.nn.Module, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a loss of 0; draw the random numbers of a micro-batch, which JAX draws too."""
    before = [x.clone() for x in module.buffers()]
    with torch.no_grad():
        module(**given)
        for x, old in zip(module.buffers(), before, strict=True):
            x.copy_(old)
    return torch.stack([0 * p.sum() for p in module.parameters()]).sum()


@dataclasses.dataclass(frozen=True)
class RecordedCase(Case):
    """A case of recorded windows, in the order of the script.

    Attributes:
      windows: The windows.
      begins_anywhere: Whether a run may begin with another window: where several runs decide, each is another training.
    """

    windows: Sequence[Batch] = ()
    begins_anywhere: bool = False

    def of_one_batch(self, accumulate: int) -> Case:
        """Return the case with a micro-batch in each step: the written model is for its rows."""
        rows = self.rows // accumulate
        split = [
            {name: x[i : i + rows] for name, x in window.items()}
            for window in self.windows
            for i in range(0, self.rows, rows)
        ]
        settings = {**self.settings, "accumulate": 1}
        return dataclasses.replace(self, windows=split, rows=rows, settings=settings, batch=partial(_first_rows, split))

    def batches_like(self, seed: int, steps: int, rows: int) -> Iterator[Batch]:
        """Yield the first rows of the windows."""
        yield from ({name: x[:rows] for name, x in window.items()} for window in self.batches(seed, steps))

    def batches(self, seed: int, steps: int) -> Iterator[Batch]:
        """Yield the windows."""
        first = seed % len(self.windows) if self.begins_anywhere else 0
        yield from itertools.islice(itertools.cycle(self.windows), first, first + steps)


def _first_rows(windows: Sequence[Batch], seed: int, rows: int) -> Batch:
    return {name: x[:rows] for name, x in windows[seed % len(windows)].items()}


_LARGE = 10**8
"""FLOPs of a loss whose program is worth optimizing."""


def _state(like: Any) -> list[Any]:
    return [] if like.model_state is None else [like.model_state]


def shortened(recipe: Recipe, training: Any) -> Recipe:
    """Return a recipe whose schedule counts the epochs of the recording, which have fewer updates."""
    lengths = set(_lengths(training))
    if not any(part.is_by_epoch for part in training.parts) or not lengths:
        return recipe
    (length,) = lengths
    text = recipe.optimizer.replace(f"every={training.epoch}", f"every={length}")
    return dataclasses.replace(recipe, optimizer=text)


def _lengths(training: Any) -> list[int]:
    """Return the numbers of updates of the recorded epochs."""
    ends = [i for i, update in enumerate(training.recording.updates) if training.loader in update.passes]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _started(result: Ported, module: torch.nn.Module) -> torch.nn.Module:
    set_start(result.training)
    return module


def _optimizer(
    result: Ported, first: Sequence[Mapping[str, Any]], named: Sequence[tuple[str, torch.nn.Parameter]]
) -> torch.optim.Optimizer:
    """Return the script's optimizer of a module's parameters, with the settings of an update."""
    theirs = result.training.optimizer
    if isinstance(theirs, Joint):
        return _joint(result, first, [*named])
    names = {id(p): name for name, p in result.module.named_parameters()}
    by_name = dict(named)
    groups = [
        {**settings, "params": [(names[id(p)], by_name[names[id(p)]]) for p in group["params"]]}
        for group, settings in zip(theirs.param_groups, first, strict=True)
    ]
    optimizer = like(theirs, groups)
    if (clip := result.training.clip) is not None and result.training.clips_itself:
        optimizer = _Clipped(optimizer, clip)
    if clamps := result.training.clamps:
        optimizer = _Clamped(optimizer, {by_name[names[key]]: clamp.bounds for key, clamp in clamps.items()})
    return optimizer


class _Clipped(torch.optim.Optimizer):
    """An optimizer that clips the gradients by which it updates, and leaves them as they are."""

    def __init__(self, optimizer: torch.optim.Optimizer, clip: Clip) -> None:
        super().__init__(optimizer.param_groups, {})
        self._optimizer, self._clip, self.state = optimizer, clip, optimizer.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Clip and update."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        before = [None if p.grad is None else p.grad.clone() for p in parameters]
        getattr(torch.nn.utils, self._clip.function)(parameters, self._clip.bound, **self._clip.options)
        unhooked(self._optimizer)
        for p, grad in zip(parameters, before, strict=True):
            p.grad = grad


def _joint(
    result: Ported, first: Sequence[Mapping[str, Any]], named: Sequence[tuple[str, torch.nn.Parameter]]
) -> torch.optim.Optimizer:
    """Return the optimizers that update together as one."""
    made, rest = [], [*first]
    for part in result.training.parts:
        own = rest[: len(part.optimizer.param_groups)]
        made.append(_optimizer(dataclasses.replace(result, training=part), own, named))
        rest = rest[len(own) :]
    return _Joint(made)


class _Joint(torch.optim.Optimizer):
    """Optimizers that all step in every update."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        self._optimizers = optimizers

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update by all."""
        for optimizer in self._optimizers:
            unhooked(optimizer)


class _Clamped(torch.optim.Optimizer):
    """An optimizer that clamps parameters after its update."""

    def __init__(self, optimizer: torch.optim.Optimizer, bounds: Mapping[torch.nn.Parameter, Bounds]) -> None:
        super().__init__(optimizer.param_groups, {})
        self._optimizer, self._bounds, self.state = optimizer, bounds, optimizer.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update and clamp."""
        unhooked(self._optimizer)
        with torch.no_grad():
            for p, bounds in self._bounds.items():
                p.clamp_(*bounds)


class _Recorded:
    """Gives an optimizer the settings of the recorded updates, one after another."""

    def __init__(self, settings: Sequence[Any], optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._settings, self._count = optimizer, settings, 0

    def step(self) -> None:
        """Set those of the next update: the windows of a shape come again and again."""
        self._count += 1
        settings = self._settings[self._count % len(self._settings)]
        for group, given in zip(self._optimizer.param_groups, settings, strict=True):
            group.update(given)


def _windows(result: Ported, shape: int) -> tuple[list[dict[str, np.ndarray]], list[list[dict[str, Any]]]]:
    """Return the recorded windows of batches of a shape, and the optimizer's settings, one update after another.

    A window has the rows of its micro-batches, or, of data that the script gives, micro-batches as rows.
    """
    training, windows, settings = result.training, [], []
    first, inputs = training.programs[shape]
    sizes = {} if training.turns else {name: x.shape for name, x in inputs.batch_of(first).items()}
    join = np.concatenate if training.cut is None else np.stack
    for update, window in training.windows():
        if all(micro[name].shape == sizes[name] for micro in window for name in sizes):
            windows.append({name: join([np.asarray(micro[name]) for micro in window]) for name in window[0]})
            settings.append(update.settings)
    if training.cut is None or not training.cut.rates:  # a schedule, which counts all updates that were not skipped
        settings = [update.settings for update in training.recording.updates if update.optimizer is not None]
    return windows, settings
