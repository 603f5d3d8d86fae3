"""A ported script's long runs: the script itself for 200 updates beside the recipe as `jaxtrain train` runs it.

The proof in float64 (`parity.ported`) feeds both sides the recorded batches of a few updates. It cannot see the
recipe's own batches, nor what changes after these updates. So here neither side has anything of the other but the first
parameters: PyTorch's side is the script in a process of its own (`jaxtrain.port.long_run`), JAX's the recipe with its
own data, schedule and precision. Both have the same seed, one of three.

The rule. What PyTorch's runs of a seed have in common must be the same in JAX's run, and what differs between them must
differ by no more than there:

- the learning rates of every update, unless a `GradScaler` skips updates or the batches have them;
- the batches of every update: their order, the ends of epochs, random augmentations. They need not be the same if the
  perturbed run has others, if random numbers of the model come between those of the batches, or if the iteration of a
  DataLoader is not PyTorch's own. Then only the losses are compared, and a line says so;
- the losses, as means over windows of updates: their root mean square distance from the nearer of the script's two runs
  is at most twice PyTorch's own noise, as the median of the seeds. The noise is the largest distance of a perturbed run
  of the script from the plain one of the same seed. It is perturbed by rounding (one ulp of every parameter after every
  update, no autocast) and, if the model draws random numbers, by drawing others. Where runs draw their own batches, the
  distances of runs of different seeds are noise as well.

Curves that are random walks of one distribution are over the bar in 5 of 1000 verdicts. So three more seeds decide
whether one is; they are in the noise and in the median as well.

Where rounding is amplified, as by a GAN, perturbed runs of the script part as JAX's does, and the bound is wide; where
it is not, a loss that is rounded too much is many times as far.
"""

import dataclasses
import itertools
import json
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console
from torch.utils.data import DataLoader

from jaxtrain.optim import used_learning_rate, used_learning_rates
from jaxtrain.pages import Chart, Panel, between, curve, linear, logarithmic, whole
from jaxtrain.port.data import ScriptBatches, sent
from jaxtrain.port.long_run import FEWEST, SECONDS, LongRun, Made, digest_of
from jaxtrain.port.ported import Ported
from jaxtrain.port.recipe_source import INPUTS
from jaxtrain.port.understand import Training
from jaxtrain.run import Recipe, load_recipe, task_batches
from jaxtrain.runner import build_training
from parity.attestation import environment
from parity.bars import RATIO_BAR
from parity.ported import PAGE, Proof
from parity.progress import report
from parity.report import waiting
from parity.report.figures import JAX, TORCH
from parity.report.verdict_page import Section, write_page
from parity.verify.behaviour import SEEDS, UPDATES, WINDOW, distance, least
from parity.verify.behaviour import curve as means

OTHER_SEED = 1000
"""What is added to a seed for other random numbers of the model."""
RATE_BAR = 1e-5
"""Largest relative difference of two learning rates, of which JAX's is float32."""


class LongRuns(NamedTuple):
    """Whether long runs of a ported script are those of the script.

    Attributes:
      passed: Whether they are.
      lines: What was compared, and what differs.
      needs_more: Whether more seeds decide.
    """

    passed: bool
    lines: tuple[str, ...]
    needs_more: bool = False


class Seed(NamedTuple):
    """The runs of a seed, of the same length.

    Attributes:
      script: The script's.
      perturbed: The script's, perturbed.
      recipe: The recipe's.
    """

    script: Sequence[Made]
    perturbed: Sequence[Made]
    recipe: Sequence[Made]


def long_runs(result: Ported, folder: Path, script: Path, args: Sequence[str], proof: Proof) -> LongRuns:
    """Compare long runs, and add them to `proof.html`.

    Args:
      result: The script.
      folder: The folder with the files that were written for it.
      script: Its file.
      args: Its arguments.
      proof: The proof of the files.

    Raises:
      UserError: The script fails.
    """
    training, recipe = result.training, load_recipe(f"{folder / 'run.py'}::Run")[1]
    with waiting(Console(stderr=True), script.name.removesuffix(".py")):
        seeds = with_recipe(training, recipe, script_runs(training, folder, script, args))
        found = verdict(training, seeds)
        if found.needs_more:
            others = script_runs(training, folder, script, args, first=SEEDS + 1)
            seeds += with_recipe(training, recipe, others, first=SEEDS + 1)
            found = verdict(training, seeds)
    write_page(folder / PAGE, environment(), proof.cases, Section("Behaviour", found.passed, found.lines, chart(seeds)))
    return found


def verdict(training: Training, seeds: Sequence[Seed]) -> LongRuns:
    """Compare the runs of seeds.

    Args:
      training: What the script is.
      seeds: The runs.
    """
    seeds = _of_one_length(seeds)
    different = [*_other_rates(training, seeds)]
    other = next((fault for seed in seeds for fault in _other_batches(seed)), None)
    repeats = _repeats(training, seeds)
    different += [other] if other is not None and repeats else []
    noise = _noise(seeds, other is None)
    ratios = sorted((apart / noise, update) for apart, update in map(_apart, seeds))
    ratio, update = ratios[(len(ratios) - 1) // 2]
    is_near = ratio <= RATIO_BAR
    faults = [*different]
    if not is_near:
        faults.append(
            f"the losses are {ratio:.3g} times as far from the script's as PyTorch's own noise, over {RATIO_BAR:g};"
            f" farthest at update {update}"
        )
    draws = other is not None and not repeats
    notes = ["each run draws its own batches: the losses alone are compared"] * draws
    count, tenth = len(seeds[0].script), max(1, len(seeds[0].script) // 10)
    theirs, ours = (
        float(np.mean([_losses(run)[-tenth:] for run in runs]))
        for runs in ([seed.script for seed in seeds], [seed.recipe for seed in seeds])
    )
    answer = "NOT EQUAL" if faults else "equal"
    head = f"{count} updates, {len(seeds)} seed{'s' * (len(seeds) > 1)}"
    compared = f"last tenth {ours:.4g} beside {theirs:.4g}, apart {ratio:.2g} times PyTorch's noise of {noise:.1g}"
    lines = (f"{head}: {compared}        {answer}", *faults, *notes)
    return LongRuns(not faults, lines, needs_more=not is_near and not different and len(seeds) <= SEEDS)


def _of_one_length(seeds: Sequence[Seed]) -> list[Seed]:
    count = min(len(run) for seed in seeds for run in seed)
    return [Seed(*(run[:count] for run in seed)) for seed in seeds]


def _apart(seed: Seed) -> tuple[float, int]:
    """Return the distance of the recipe's losses from the nearer run of the script, and where it is largest."""
    return min(distance(_losses(seed.recipe), _losses(run)) for run in (seed.script, seed.perturbed))


def _noise(seeds: Sequence[Seed], has_same_batches: bool) -> float:
    """Return the largest distance of PyTorch's runs from each other, which is no less than the rounding of a loss."""
    pairs = [(seed.perturbed, seed.script) for seed in seeds]
    if not has_same_batches:
        pairs += itertools.combinations([seed.script for seed in seeds], 2)
    floor = max(least(_losses(seed.script)) for seed in seeds)
    return max(floor, *(distance(_losses(one), _losses(other))[0] for one, other in pairs))


def _losses(run: Sequence[Made]) -> list[float]:
    return [made.loss for made in run]


def _other_rates(training: Training, seeds: Sequence[Seed]) -> Iterator[str]:
    """Yield a line if an update has other learning rates than the script's, if the recipe has a schedule of its own."""
    skips = any(not made.is_applied for seed in seeds for made in (*seed.script, *seed.recipe))
    if skips or training.turns or any(cut.rates for cut in training.feed().cuts):
        return
    for i, (ours, theirs) in enumerate(zip(seeds[0].recipe, seeds[0].script, strict=True), 1):
        same = len(ours.rates) == len(theirs.rates)
        if ours.rates and not (same and np.allclose(ours.rates, theirs.rates, RATE_BAR, 0.0)):
            given = [", ".join(f"{rate:.6g}" for rate in made.rates) for made in (ours, theirs)]
            yield f"update {i}: the learning rate is {given[0]}, the script's {given[1]}"
            return


def _other_batches(seed: Seed) -> Iterator[str]:
    """Yield a line for each update with another batch than the script's."""
    known = {made.batch: i for i, made in reversed([*enumerate(seed.script, 1)])}
    for i, (ours, theirs) in enumerate(zip(seed.recipe, seed.script, strict=True), 1):
        if ours.batch != theirs.batch:
            of = f"that of its update {known[ours.batch]}" if ours.batch in known else "none of its batches"
            yield f"update {i}: the batch is not the script's, but {of}"


def _repeats(training: Training, seeds: Sequence[Seed]) -> bool:
    """Whether runs of a script with one seed have the same batches.

    They have not if the model draws random numbers between those of the batches, if the perturbed run shows so, or if
    the DataLoader has an iteration of its own, which may draw others before the run begins a pass.
    """
    if training.loader is None:
        return not _draws(training)
    loader = training.recording.loaders[training.loader].loader
    pairs = (pair for seed in seeds for pair in zip(seed.script, seed.perturbed, strict=True))
    return type(loader).__iter__ is DataLoader.__iter__ and all(one.batch == other.batch for one, other in pairs)


def _draws(training: Training) -> bool:
    """Whether the model of a script draws random numbers."""
    programs = [backward.program for turn in training.of_turns for backward, _ in turn.programs]
    return any(call.random is not None for program in programs for call in program.calls)


def with_recipe(
    training: Training, recipe: Recipe, runs: Sequence[tuple[list[Made], list[Made]]], first: int = 1
) -> list[Seed]:
    """Return runs of a script with those of its recipe, of fewer seeds if they take long.

    Args:
      training: What the script is.
      recipe: The recipe.
      runs: The plain and the perturbed run of the script for each seed.
      first: The first seed.
    """
    ours, found, begin = _RecipeRuns(training, recipe), list[Seed](), time.monotonic()
    for number, (plain, perturbed) in enumerate(runs, first):
        count = min(len(plain), len(perturbed))
        found.append(Seed(plain, perturbed, [*_timed(ours.run(number), f"JAX, seed {number}", count)]))
        if time.monotonic() - begin > SEEDS * SECONDS:
            break
    return found


def script_runs(
    training: Training, folder: Path, script: Path, args: Sequence[str], first: int = 1
) -> list[tuple[list[Made], list[Made]]]:
    """Return the plain and the perturbed run of a script for each seed.

    Args:
      training: What the script is.
      folder: The folder with the files that were written for it.
      script: Its file.
      args: Its arguments.
      first: The first seed.

    Raises:
      UserError: The script fails.
    """
    seeds = [_how(training, folder, number) for number in range(first, first + SEEDS)]
    runs: list[list[Made]] = [[] for _ in range(2 * SEEDS)]
    report("behaviour: the script starts")
    with tempfile.TemporaryDirectory(prefix="jaxtrain-port-") as kept:
        given = [kept, json.dumps([list(map(dataclasses.asdict, pair)) for pair in seeds]), script.resolve(), *args]
        for number, found in sent("jaxtrain.port.long_run", given, script, None, is_quiet=True):
            runs[number].append(Made(**found))
            report(f"behaviour: PyTorch, seed {number // 2 + first}, update {len(runs[number])} of {UPDATES}")
    return [pair for pair in zip(runs[::2], runs[1::2], strict=True) if all(pair)]


def _how(training: Training, folder: Path, seed: int) -> tuple[LongRun, LongRun]:
    """Return how the script trains with a seed, and how perturbed."""
    from_loader = training.loader is not None
    plain = LongRun(
        updates=UPDATES,
        loader=training.loader,
        inputs=None if from_loader else str((folder / INPUTS).resolve()),
        data_seed=seed if training.accumulate == 1 else 0,  # `ScriptRows` has one order
        model_seed=seed,
        is_perturbed=False,
    )
    # Other random numbers of the model, unless all are those of the batches.
    others = OTHER_SEED if from_loader or _draws(training) else 0
    return plain, dataclasses.replace(plain, model_seed=seed + others, is_perturbed=True)


def _timed(updates: Generator[Made, None, None], what: str, most: int) -> Iterator[Made]:
    """Yield updates until there are enough, or they have taken long."""
    begin = None
    report(f"behaviour: {what}, compiles")
    for number, found in enumerate(itertools.islice(updates, most), 1):
        report(f"behaviour: {what}, update {number} of {most}")
        yield found
        begin = begin or time.monotonic()
        if number >= FEWEST and time.monotonic() - begin > SECONDS:
            break
    updates.close()


class _RecipeRuns:
    """Trains a recipe as `jaxtrain train` does, from its first parameters, with several seeds."""

    def __init__(self, training: Training, recipe: Recipe) -> None:
        self._recipe, self._training = recipe, build_training(recipe)
        # Of a DataLoader those tensors that the updates read.
        self._names = {name for _, inputs in training.programs for name in inputs.leaves}

    def run(self, seed: int) -> Generator[Made, None, None]:
        """Yield the updates of a seed."""
        recipe, task = dataclasses.replace(self._recipe, seed=seed), self._training.task
        if isinstance(task.train, ScriptBatches):
            task = dataclasses.replace(task, train=task.train.seeded(seed))
        training, batches = dataclasses.replace(self._training, recipe=recipe), task_batches(task, recipe)
        state = training.init()
        try:
            for batch in batches:
                digest = digest_of(x for name, x in batch.items() if name in self._names or not self._names)
                state, metrics = training.step_of(batch)(state, batch)
                yield Made(float(metrics["loss"]), _rates(state), digest, not bool(metrics["skipped"]))
        finally:
            batches.close()


def _rates(state: Any) -> tuple[float, ...]:
    """Return the learning rates of the last update."""
    groups = [*used_learning_rates(state.opt_state).values()]
    one = used_learning_rate(state.opt_state) if not groups else None
    return tuple(sorted({float(rate) for rate in jax.device_get(groups if one is None else [one])}))


def chart(seeds: Sequence[Seed]) -> Chart:
    """Return the chart of the losses of all seeds, and of their distances."""
    seeds = _of_one_length(seeds)
    steps = len(seeds[0].script)
    x = between(0.5, steps + 0.5, whole(1, steps))
    ends = [min(end, steps) for end in range(WINDOW, steps + WINDOW, WINDOW)]
    theirs, perturbed, ours = ([means(_losses(seed[i])) for seed in seeds] for i in range(3))
    y = linear([float(loss) for run in (*theirs, *ours) for loss in run])
    apart = [np.abs(one - other) for one, other in zip(ours, theirs, strict=True)]
    noise = [np.abs(one - other) for one, other in zip(perturbed, theirs, strict=True)]
    far = logarithmic([float(loss) for run in (*apart, *noise) for loss in run])

    def drawn(css: str, runs: Sequence[np.ndarray], axis: Any) -> list[tuple[str, str]]:
        return [(css, curve(zip(ends, map(float, run), strict=True), x, axis)) for run in runs]

    return Chart(
        f"Losses of {steps} updates, means of {WINDOW}",
        x,
        [
            Panel("loss", y, [*drawn(TORCH, theirs, y), *drawn(JAX, ours, y)]),
            Panel("distance from the script", far, [*drawn("c1 dotted", noise, far), *drawn("c3", apart, far)]),
        ],
        label="update",
        key=[
            (TORCH, "the script"),
            (JAX, "the recipe"),
            ("c3", "its distance"),
            ("c1 dotted", "the script, perturbed"),
        ],
    )
