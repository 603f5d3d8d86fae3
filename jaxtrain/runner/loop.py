"""The training loop: step, log, evaluate and save until done or stopped."""

from dataclasses import replace
from typing import Any

from jaxtrain.distributed import processes
from jaxtrain.errors import RunFailed
from jaxtrain.observe import LogLine, MetricsLog, NoMetricsLog, first_rows, histograms
from jaxtrain.runner.fetched_batches import DispatchedStep
from jaxtrain.runner.precision_watch import PrecisionWatch
from jaxtrain.runner.session import Phase, Session
from jaxtrain.runner.stops.signals import StopSignals
from jaxtrain.runner.training import Evaluation
from jaxtrain.step import PrecisionLosses, TrainState


def train(session: Session, state: TrainState, log: MetricsLog | NoMetricsLog) -> tuple[TrainState, int]:
    """Run the remaining steps.

    Args:
      session: The run.
      state: The state after the last step that was trained; its arrays are donated.
      log: Where metrics are written.

    Returns:
      The last state, its checkpoint committed, and the exit status.

    Raises:
      RunInvalid: A step after which the run cannot continue.
      RunFailed: All updates are skipped; the last state is saved.
    """
    training, position, console, watch = session.training, session.position, session.console, session.watch
    recipe, guard, patience, events = training.recipe, position.guard, position.patience, session.events
    saves, precision = _Saves(session), PrecisionWatch(training, position.interval, console.message)
    with StopSignals() as stop, console.progress(int(state.step), recipe.steps, training.task.unit) as progress:
        position.interval.restart_clock()
        for i in range(int(state.step) + 1, recipe.steps + 1):
            if session.trace:
                session.trace.before(i, state)
            watch.enter(Phase.READ, i)
            batch = next(position.batches)
            losses = precision.measure(i, state, batch)
            watch.enter(Phase.STEP, i)
            state, metrics = training.dispatch(state, batch)
            position.add(DispatchedStep(i, batch, metrics))
            events.step(i, metrics, state)
            score = _observe(session, i, state, losses, log, progress)
            is_stuck = guard.reached_skip_limit
            saves.report()
            is_last = stop.wanted(i) or i == recipe.steps or is_stuck or patience.is_exhausted
            if i % recipe.save_every == 0 or is_last or events.error:
                saves.save(i, state, score)
            if events.error:
                break
            if patience.is_exhausted:
                console.message(patience.message(i))
            if is_stuck:
                raise RunFailed(guard.skip_limit_message(i, state))
            if is_last:
                break
        saves.wait()
        if events.error:
            raise events.error
        if session.trace:
            session.trace.close(state)
    return state, stop.exit_status


def _observe(
    session: Session,
    i: int,
    state: TrainState,
    losses: PrecisionLosses | None,
    log: MetricsLog | NoMetricsLog,
    progress: Any,
) -> float | None:
    """Log and show what is due after a step; return the score of its evaluation, if it has one."""
    position, recipe, watch = session.position, session.training.recipe, session.watch
    line, evaluation, score = None, None, None
    if position.interval.is_due(i) or i == recipe.steps or position.guard.reached_skip_limit:
        line = position.line(i, state)
        line = replace(line, other={**line.other, **watch.metrics()})
    if i % recipe.eval_every == 0 or i == recipe.steps:
        watch.enter(Phase.EVALUATE, i)
        evaluation, score = _evaluate(session, i, state)
        line = replace(line or LogLine(step=i), evaluation=evaluation.metrics)
        if recipe.histograms:
            log.histograms(i, histograms(state.params))
        position.interval.restart_clock()
    if losses:
        line = replace(line or LogLine(step=i), precision=losses)
    watch.enter(Phase.LOG, i)
    media = session.events.take_media()
    if line or media:
        log.write(line or LogLine(step=i), media)
    progress.advance(i, line)
    if evaluation:
        progress.tables(i, first_rows(evaluation.media))
    for warning in position.warnings(line) if line else ():
        session.console.message(warning)
    return score


def _evaluate(session: Session, i: int, state: TrainState) -> tuple[Evaluation, float | None]:
    """Evaluate a state and report it; return the evaluation and its score."""
    evaluation = session.training.evaluate(state)
    score = session.position.patience.add(evaluation.metrics)
    if evaluation.cause:
        loss = evaluation.metrics["loss"]
        session.console.message(f"warning: step {i}: the validation loss is {loss:g}, {evaluation.cause}")
    session.events.evaluation(i, evaluation.metrics, state, evaluation.media)
    return evaluation, score


class _Saves:
    """Saves checkpoints, and calls the user's functions once each is committed."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._unreported: int | None = None

    def save(self, i: int, state: TrainState, score: float | None) -> None:
        """Check a state and begin to save it, once the checkpoint before it is committed."""
        session, position = self._session, self._session.position
        session.watch.enter(Phase.SAVE, i)
        position.guard.check(state)
        # A stop has no line: the resumed run logs what an uninterrupted one would have.
        session.checkpoints.save(state, position.state(), score)
        self._report()
        self._unreported = i
        position.interval.restart_clock()

    def report(self) -> None:
        """Report a checkpoint that is committed by now. Several processes wait for it together, at the next one."""
        if self._unreported is not None and processes.count() == 1 and self._session.checkpoints.idle:
            self.wait()

    def wait(self) -> None:
        """Wait until the last checkpoint is committed, and report it."""
        self._session.checkpoints.wait()
        self._report()

    def _report(self) -> None:
        if self._unreported is not None:
            self._session.events.checkpoint(self._unreported, self._session.run.checkpoints / str(self._unreported))
        self._unreported = None
