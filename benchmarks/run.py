"""Overhead of a run's safety: the guards of its steps, and its checkpoints."""

import itertools
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.engines import Engine
from benchmarks.job import Job

WORKLOAD = "run"
RECIPE = "gpt-stdlib"
COUNT = 10
"""Training steps per timed step: the loop waits for a step after dispatching the next, and a save spans several."""
STEPS = ("steps", "steps with guards")
SAVES = ("save", "begin a save", "steps", "steps beside a save")


def steps_per_step(feature: str) -> int:
    """Return the number of training steps in one timed step."""
    return COUNT if feature.startswith("steps") else 1


def engine(job: Job) -> Engine:
    """Return a run's loop reduced to the feature of `job`, one of `STEPS` or `SAVES`."""
    from jaxtrain.recipes import RECIPES
    from jaxtrain.runner import Checkpoints, DispatchedStep, FetchedBatch, Guard, Interval, build_training

    recipe = RECIPES[RECIPE]
    training = build_training(recipe)
    state = training.init()
    batch = next(training.loader)
    interval, guard = Interval(recipe, training.task), Guard(recipe, state.params)
    numbers = itertools.count(1)
    checkpoints = Checkpoints(Path(tempfile.mkdtemp()) / "checkpoints")
    saves = itertools.count(1)

    def steps(guarded: bool = False) -> None:
        nonlocal state
        for number in itertools.islice(numbers, COUNT):
            state, metrics = training.step(state, batch)
            dispatched = DispatchedStep(number, FetchedBatch(batch, number), metrics)
            interval.add(dispatched)
            if guarded:
                guard.add(dispatched)
        interval.close(number, state.opt_state)

    def begin_save() -> None:
        checkpoints.save(state._replace(step=state.step * 0 + next(saves)), {}, None)

    def save() -> None:
        begin_save()
        checkpoints.wait()

    def steps_beside_a_save() -> None:
        begin_save()
        steps()

    features: Mapping[str, Callable[[], None]] = {
        "steps": steps,
        "steps with guards": lambda: steps(guarded=True),
        "save": save,
        "begin a save": begin_save,
        "steps beside a save": steps_beside_a_save,
    }
    return Engine(features[job.feature], [], "cpu", lambda: None, prepare=checkpoints.wait)
