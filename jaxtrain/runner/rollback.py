"""Training to the end, back to a checkpoint after a loss spike, and the error of a run that cannot continue."""

from dataclasses import replace

import jax

from jaxtrain.distributed import processes
from jaxtrain.errors import RunFailed
from jaxtrain.observe import LogLine, MetricsLog, NoMetricsLog, metrics_log
from jaxtrain.runner import preflight
from jaxtrain.runner.checkpoint import saved_steps
from jaxtrain.runner.loop import train
from jaxtrain.runner.session import Session
from jaxtrain.runner.stops.guards import RunInvalid, Spike, write_batch
from jaxtrain.runner.training import Evaluation
from jaxtrain.step import TrainState, cause_in_batch, failed_assumption


def train_through(session: Session, state: TrainState, first: Evaluation | None) -> tuple[TrainState, int]:
    """Train to the end, rolling back after loss spikes if the recipe asks for it.

    Args:
      session: The run.
      state: The state to continue from; its arrays are donated.
      first: The evaluation of a new run's initial state; None for a run that continues.

    Returns:
      The last state and the exit status.

    Raises:
      RunFailed: The run cannot continue.
    """
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    run = session.run
    while True:
        with metrics_log(run.metrics, run.tensorboard, from_step=int(state.step) + (first is None)) as log:
            if log.damaged:
                lines = f"{', '.join(map(str, log.damaged[:5]))}{' …' * (len(log.damaged) > 5)}"
                session.console.message(
                    f"{run.metrics}: damaged lines ({lines}) were moved to metrics.superseded.jsonl"
                )
            if first is not None:
                _save_first(session, state, first, log)
            try:
                return train(session, state, log)
            except RunInvalid as error:
                invalid = error.with_traceback(None)  # its frames would keep a state alive
        session.checkpoints.wait()
        state, first = _rolled_back(session, like, invalid), None


def _save_first(session: Session, state: TrainState, first: Evaluation, log: MetricsLog | NoMetricsLog) -> None:
    """Log the evaluation of the initial state, and save it."""
    session.events.evaluation(0, first.metrics, state, first.media)
    log.write(LogLine(step=0, evaluation=first.metrics), session.events.take_media())
    score = session.position.patience.add(first.metrics)
    session.checkpoints.save(state, session.position.state(), score)


def _rolled_back(session: Session, like: TrainState, invalid: RunInvalid) -> TrainState:
    """Return the state of the checkpoint that a run returns to after an invalid step; raise `RunFailed` without one."""
    recipe = session.training.recipe
    if not (isinstance(invalid, Spike) and recipe.on_spike == "rollback"):
        raise _run_failed(session, invalid)
    # A stop by a signal saves between the regular steps: an undisturbed run would not have that checkpoint.
    saved_at = processes.once(lambda: saved_steps(session.run.checkpoints))
    regular = [step for step in saved_at if step % recipe.save_every == 0] or saved_at
    state, saved = session.checkpoints.restore(like, session.console.message, before=max(regular) + 1)
    rollback = session.position.roll_back(saved, state, invalid)
    if rollback is None:
        raise _run_failed(session, invalid)
    session.console.message(
        f"step {rollback.from_step}: {invalid.reason}: rolled back to step {rollback.to_step}, skipping "
        f"{rollback.batches_skipped} batches"
    )
    return state


def _run_failed(session: Session, invalid: RunInvalid) -> RunFailed:
    """Save the batch of the invalid step and return the error that ends the run."""
    run, position = session.run, session.position
    fetched = invalid.step.batch
    whole = replace(invalid.step, batch=fetched._replace(arrays=position.batches.gather(fetched.arrays)))

    def save_batch() -> str:
        try:
            write_batch(run.replay, whole, position.interval.unlogged_rollback)
        except OSError as error:
            return f" (its batch could not be saved: {error.strerror})"
        return ""

    note, newest, step = *processes.once(lambda: (save_batch(), max(saved_steps(run.checkpoints)))), whole.step
    loss = float(whole.metrics["loss"])
    task = session.training.task
    is_told = failed_assumption(task.loss_fn, loss, whole.batch.arrays) is not None
    cause = None if is_told else cause_in_batch(loss, preflight.suspects(task, whole.batch.arrays))
    return RunFailed(
        f"step {step}: {invalid.reason}: stopped{note}, the checkpoint of step {newest} is valid; "
        f"{f'the loss is {loss:g}, {cause}; ' if cause else ''}jaxtrain replay {run.path} {step} shows where it "
        f"arises; {'if that is not it,' if cause else 'then'} start again, for example with a lower --lr or another "
        "--precision"
    )
