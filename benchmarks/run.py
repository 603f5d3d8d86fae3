"""What it costs a run to survive: the guards of its steps, and its checkpoints."""

import itertools
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.engines import Engine
from benchmarks.job import Job

WORKLOAD = "run"
RECIPE = "gpt-stdlib"
BESIDE = 10
"""Steps of the features that take several: they last longer than a save."""
STEPS = ("", "guards")
SAVES = ("save", "begin a save", f"{BESIDE} steps", f"{BESIDE} steps beside a save")


def steps_of(feature: str) -> int:
    """Steps that one step of the benchmark counts."""
    return BESIDE if feature.startswith(f"{BESIDE} steps") else 1


def engine(job: Job) -> Engine:
    """The loop of a run, reduced to the feature of `job`, one of `FEATURES`."""
    from jaxtrain.recipes import RECIPES
    from jaxtrain.runner.checkpoint import Checkpoints
    from jaxtrain.runner.guards import Guard, Taken
    from jaxtrain.runner.loop import Interval, build_training

    recipe = RECIPES[RECIPE]
    training, state = build_training(recipe)
    batch = next(training.loader)
    interval, guard = Interval(recipe, training.task), Guard(recipe, state.params)
    numbers = itertools.count(1)
    checkpoints = Checkpoints(Path(tempfile.mkdtemp()) / "checkpoints")
    saves = itertools.count(1)

    def step(guarded: bool = True) -> None:
        nonlocal state
        number = next(numbers)
        state, metrics = training.step(state, batch)
        interval.add(metrics)
        if guarded:
            guard.add(Taken(number, batch, number, metrics))
        if number % recipe.log_every == 0:
            interval.close()

    def begin_save() -> None:
        checkpoints.save(state._replace(step=state.step * 0 + next(saves)), {}, None)

    def steps() -> None:
        for _ in range(BESIDE):
            step()

    def save() -> None:
        begin_save()
        checkpoints.wait()

    def steps_beside_a_save() -> None:
        begin_save()
        steps()

    taken = [lambda: step(guarded=False), step, save, begin_save, steps, steps_beside_a_save]
    features: Mapping[str, Callable[[], None]] = dict(zip((*STEPS, *SAVES), taken, strict=True))
    return Engine(features[job.feature], [], "cpu", lambda: None, prepare=checkpoints.wait)
